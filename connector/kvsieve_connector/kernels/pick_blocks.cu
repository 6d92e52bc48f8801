// Picking of one layer: for each batch row and KV head the blocks that its query attends to, as a block table, fetching from
// the host what is missing. One cluster of CTAS blocks per row and head, one launch. pick_blocks.py gives the constants;
// dense/gpu/pick_blocks_reference.py is the semantics.
//
//   1. Score every full block by its summary, each block of the cluster a part of them.   (only past what is listed anyhow)
//   2. The cluster's first block takes the BUDGET best, beside the FIRST and the newest WINDOW.
//   3. It looks them up: in the pool; in a hot slot; else a miss, which takes the hot slot that was used longest ago.
//   4. All blocks of the cluster copy the misses from the host.
//
// HEADS, GROUP, DIM, BLOCK_TOKENS, PIECE_BYTES; SELECTOR: 0 quest-bounds, 1 mean-key, 2 mean-outlier; FP16, else bf16;
// FIRST, BUDGET, WINDOW, HOT, MAX_BLOCKS; CTAS, THREADS, LANES: of a warp that share a block.

constexpr int LISTED = FIRST + BUDGET + WINDOW;               // full blocks of a list at most
constexpr int WARPS = THREADS / 32;
constexpr int SHARE = (MAX_BLOCKS + CTAS - 1) / CTAS;         // of which one block scores
constexpr int CHANNELS = DIM / LANES;                         // of a lane
constexpr int AT_ONCE = 32 / LANES;                           // blocks that a warp scores at once
constexpr int WIDTH = SELECTOR == 1 ? DIM : 2 * DIM;          // of a summary
constexpr int UNITS = PIECE_BYTES / 16;
constexpr int UNROLL = 4;                                     // loads in flight of a thread
constexpr int DEPTH = CHANNELS < 32 ? 32 / CHANNELS : 1;      // blocks whose summaries a lane loads ahead
constexpr float MEAN_WEIGHT = 64.f;                           // selectors.MeanOutlier.MEAN_WEIGHT
constexpr unsigned ALL = 0xffffffffu;
constexpr int IN_POOL = -2, MISSING = -1;                     // of where[]

enum { ASKED, IN_POOL_COUNT, HOT_HITS, MISSES, COUNTERS };
typedef unsigned long long u64;
typedef unsigned short u16;

#define INFINITY __int_as_float(0x7f800000)                   // NVRTC has none

struct __align__(16) Vec { unsigned x, y, z, w; };

__device__ __forceinline__ Vec load_host(const char* p) {
  Vec v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

__device__ __forceinline__ float number(unsigned bits) {      // the lower 16 bits
#if FP16
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)bits));
  return f;
#else
  return __uint_as_float(bits << 16);
#endif
}

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync() { cluster_arrive(); cluster_wait(); }

// The same variable in the shared memory of another block of the cluster.
__device__ __forceinline__ unsigned remote(const void* p, int rank) {
  const unsigned mine = (unsigned)__cvta_generic_to_shared(p);
  unsigned theirs;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(mine), "r"(rank));
  return theirs;
}
__device__ __forceinline__ void store_remote(unsigned to, unsigned v) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" :: "r"(to), "r"(v) : "memory");
}
__device__ __forceinline__ unsigned load_remote(unsigned from) {
  unsigned v;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ u64 load_remote64(unsigned from) {
  u64 v;
  asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(v) : "r"(from) : "memory");
  return v;
}

__device__ __forceinline__ float log_add(float a, float b) {
  const float high = fmaxf(a, b), low = fminf(a, b);
  return high == -INFINITY ? high : high + __logf(1.f + __expf(low - high));
}

// Sums over the block, exclusive, of one number a thread. `room`: WARPS + 1 words; the last is the total afterwards.
__device__ unsigned scan(unsigned mine, unsigned* room, int tid) {
  const int lane = tid % 32, warp = tid / 32;
  unsigned sum = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const unsigned other = __shfl_up_sync(ALL, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();
  if (lane == 31) room[warp] = sum;
  __syncthreads();
  if (tid == 0) {
    unsigned total = 0;
    for (int w = 0; w < WARPS; ++w) { const unsigned v = room[w]; room[w] = total; total += v; }
    room[WARPS] = total;
  }
  __syncthreads();
  return sum - mine + room[warp];
}

struct Shared {                                               // dynamic
  u64 source[LISTED], target[LISTED];                         // of the misses
  float maximum[GROUP], sum[GROUP], norm[GROUP];
  int list[LISTED + 1], where[LISTED], victim[LISTED], missed[LISTED];
  int hot[HOT], tag[HOT], last[HOT], used[HOT];
  unsigned histogram[256], room[WARPS + 1];
  unsigned prefix, need, settled;
  int misses, hits, pooled;
  unsigned keys[MAX_BLOCKS];                                  // in the first block: of all full blocks
  int page[SHARE];
  float logits[SHARE * GROUP];
};

extern "C" __global__ void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(THREADS, 3)
pick_blocks(const u16* __restrict__ query, long long query_stride,   // [R, HEADS * GROUP, DIM]
            const int* __restrict__ lengths,                         // [R]
            const int* __restrict__ block_table, int table_stride,   // [R, table_stride]
            const int* __restrict__ row_slot,                        // [R]
            const int* __restrict__ page,                            // [S, MAX_BLOCKS]
            const long long* __restrict__ address,                   // [S, MAX_BLOCKS]
            const int* __restrict__ hot_blocks,                      // [S, HOT]
            char* cache, int stride_rows,                            // pieces between two blocks of the pool
            long long layer_offset,
            const u16* __restrict__ summaries, int pages,            // [HEADS, pages, WIDTH]
            int* tag, int* stamp, int* clock,                        // [S, HEADS, HOT] twice, [S, HEADS]
            u64* counters,                                           // [S, COUNTERS]
            int* __restrict__ out, int out_stride,                   // [R * HEADS, out_stride]
            int* __restrict__ out_lengths,                           // [R * HEADS]
            u16* __restrict__ out_query,                             // [R * HEADS, GROUP, DIM]
            float scale, int write_whole) {
  extern __shared__ __align__(16) unsigned char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int row = blockIdx.x / CTAS, rank = blockIdx.x % CTAS;
  const int request = row / HEADS, head = row % HEADS;
  const int length = lengths[request], slot = row_slot[request];
  query += request * query_stride + head * GROUP * DIM;
  block_table += (long long)request * table_stride;
  out += (long long)row * out_stride;

  if (rank == CTAS - 1) {                                     // the query, in the form that attention takes
    for (int i = tid; i < GROUP * DIM / 8; i += THREADS)
      reinterpret_cast<Vec*>(out_query + (long long)row * GROUP * DIM)[i] = reinterpret_cast<const Vec*>(query)[i];
  }
  if (slot < 0) {                                             // all of it is in the pool: the same for the whole cluster
    const int blocks = (length + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    if (write_whole) {
      for (int b = rank * THREADS + tid; b < blocks; b += CTAS * THREADS) out[b] = block_table[b] * stride_rows + head;
      if (rank == 0 && tid == 0) out_lengths[row] = length;
    }
    return;
  }
  page += (long long)slot * MAX_BLOCKS;
  address += (long long)slot * MAX_BLOCKS;
  hot_blocks += slot * HOT;
  const int full = max(length - 1, 0) / BLOCK_TOKENS;         // the block after these has the row's newest token
  const int count = min(full, LISTED);
  if (rank == 0) {                                            // on its way while blocks are scored
    tag += ((long long)slot * HEADS + head) * HOT;
    stamp += ((long long)slot * HEADS + head) * HOT;
    for (int h = tid; h < HOT; h += THREADS) {
      s.hot[h] = hot_blocks[h];
      s.tag[h] = tag[h];
      s.last[h] = stamp[h];
    }
  }

  // 1. Score.
  if (full > LISTED) {
    const int share = (full + CTAS - 1) / CTAS, start = min(rank * share, full), end = min(start + share, full);
    const int part = lane % LANES;
    for (int i = start + tid; i < end; i += THREADS) s.page[i - start] = page[i];
    float q[GROUP][CHANNELS];
#pragma unroll
    for (int g = 0; g < GROUP; ++g)
#pragma unroll
      for (int v = 0; v < CHANNELS / 8; ++v) {
        const Vec four = reinterpret_cast<const Vec*>(query + g * DIM + part * CHANNELS)[v];
        const unsigned pairs[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int c = 0; c < 8; ++c) q[g][v * 8 + c] = number(c % 2 ? pairs[c / 2] >> 16 : pairs[c / 2]) * scale;
      }
    summaries += (long long)head * pages * WIDTH + part * CHANNELS;
    __syncthreads();
    for (int base = start + warp * AT_ONCE * DEPTH; base < end; base += WARPS * AT_ONCE * DEPTH) {
      Vec a[DEPTH][CHANNELS / 8], b[DEPTH][CHANNELS / 8];
      bool known[DEPTH];
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
        const int block = base + d * AT_ONCE + lane / LANES;
        const int where = block < end ? s.page[block - start] : -1;
        known[d] = where >= 0;
        const u16* from = summaries + (long long)max(where, 0) * WIDTH;
#pragma unroll
        for (int v = 0; v < CHANNELS / 8; ++v) {
          a[d][v] = known[d] ? reinterpret_cast<const Vec*>(from)[v] : Vec{0, 0, 0, 0};
          if (WIDTH > DIM) b[d][v] = known[d] ? reinterpret_cast<const Vec*>(from + DIM)[v] : Vec{0, 0, 0, 0};
        }
      }
#pragma unroll
      for (int d = 0; d < DEPTH; ++d) {
        const int block = base + d * AT_ONCE + lane / LANES;
        float first[GROUP], second[GROUP];
#pragma unroll
        for (int g = 0; g < GROUP; ++g) first[g] = second[g] = 0.f;
#pragma unroll
        for (int v = 0; v < CHANNELS / 8; ++v) {
          const unsigned as[4] = {a[d][v].x, a[d][v].y, a[d][v].z, a[d][v].w};
          const unsigned bs[4] = {b[d][v].x, b[d][v].y, b[d][v].z, b[d][v].w};
#pragma unroll
          for (int c = 0; c < 8; ++c) {
            const float low = number(c % 2 ? as[c / 2] >> 16 : as[c / 2]);
            const float high = WIDTH > DIM ? number(c % 2 ? bs[c / 2] >> 16 : bs[c / 2]) : 0.f;
#pragma unroll
            for (int g = 0; g < GROUP; ++g) {
              const float x = q[g][v * 8 + c];
              if (SELECTOR == 0) first[g] += x < 0.f ? x * low : x * high;
              else first[g] += x * low;
              if (SELECTOR == 2) second[g] += x * high;
            }
          }
        }
#pragma unroll
        for (int g = 0; g < GROUP; ++g)
#pragma unroll
          for (int step = 1; step < LANES; step *= 2) {
            first[g] += __shfl_xor_sync(ALL, first[g], step);
            if (SELECTOR == 2) second[g] += __shfl_xor_sync(ALL, second[g], step);
          }
#pragma unroll
        for (int g0 = 0; g0 < GROUP; g0 += LANES) {           // lane `part` finishes one head of the group
          float mine = 0.f, other = 0.f;
#pragma unroll
          for (int g = g0; g < min(g0 + LANES, GROUP); ++g)
            if (part == g - g0) { mine = first[g]; other = second[g]; }
          if (SELECTOR == 2) mine = log_add(mine + __logf(MEAN_WEIGHT), other) - __logf(1.f + MEAN_WEIGHT);
          if (part < GROUP - g0 && block < end) s.logits[(block - start) * GROUP + g0 + part] = known[d] ? mine : -INFINITY;
        }
      }
    }
    __syncthreads();
    for (int g = warp; g < GROUP; g += WARPS) {
      float high = -INFINITY, sum = 0.f;
      for (int i = lane; i < end - start; i += 32) high = fmaxf(high, s.logits[i * GROUP + g]);
#pragma unroll
      for (int step = 16; step; step /= 2) high = fmaxf(high, __shfl_xor_sync(ALL, high, step));
      for (int i = lane; i < end - start; i += 32)
        if (high > -INFINITY) sum += __expf(s.logits[i * GROUP + g] - high);
#pragma unroll
      for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(ALL, sum, step);
      if (lane == 0) { s.maximum[g] = high; s.sum[g] = sum; }
    }
    cluster_sync();
    if (tid < GROUP) {                                        // the logarithm of the sum over all blocks
      float high = -INFINITY, sum = 0.f;
      for (int r = 0; r < CTAS; ++r) high = fmaxf(high, __uint_as_float(load_remote(remote(&s.maximum[tid], r))));
      for (int r = 0; r < CTAS; ++r) {
        const float theirs = __uint_as_float(load_remote(remote(&s.maximum[tid], r)));
        if (theirs > -INFINITY) sum += __uint_as_float(load_remote(remote(&s.sum[tid], r))) * __expf(theirs - high);
      }
      s.norm[tid] = high > -INFINITY ? high + logf(sum) : 0.f;
    }
    __syncthreads();
    const unsigned keys = remote(s.keys, 0);
    for (int i = tid; i < end - start; i += THREADS) {
      float mass = 0.f;                                       // shares of the attention, added over the group
#pragma unroll
      for (int g = 0; g < GROUP; ++g) mass += __expf(s.logits[i * GROUP + g] - s.norm[g]);
      store_remote(keys + (start + i) * 4, __float_as_uint(mass) << 1);  // the bits of positive floats are ordered alike
    }
    cluster_sync();
  }

  // 2. and 3., by the first block.
  if (rank == 0) {
    const int now = clock[slot * HEADS + head] + 1;
    if (full > LISTED) {
      const int candidates = full - FIRST - WINDOW;
      if (tid == 0) { s.prefix = 0; s.need = BUDGET; s.settled = 0; }
      __syncthreads();
      for (int shift = 24; shift >= 0 && BUDGET > 0 && !s.settled; shift -= 8) {
        for (int i = tid; i < 256; i += THREADS) s.histogram[i] = 0;
        __syncthreads();
        const unsigned prefix = s.prefix, mask = shift == 24 ? 0 : ALL << (shift + 8);
        for (int i = tid; i < candidates; i += THREADS) {
          const unsigned key = s.keys[FIRST + i];
          if ((key & mask) == prefix) atomicAdd(&s.histogram[key >> shift & 255], 1u);
        }
        __syncthreads();
        if (warp == 0) {                                      // lane l has the digits 255 - 8 l down to 248 - 8 l
          unsigned own = 0;
#pragma unroll
          for (int d = 0; d < 8; ++d) own += s.histogram[255 - lane * 8 - d];
          unsigned above = own;
#pragma unroll
          for (int step = 1; step < 32; step *= 2) {
            const unsigned other = __shfl_up_sync(ALL, above, step);
            if (lane >= step) above += other;
          }
          above -= own;
          const unsigned need = s.need;
          __syncwarp();
          if (above < need && need <= above + own) {
            int digit = 255 - lane * 8;
            while (above + s.histogram[digit] < need) above += s.histogram[digit--];
            const unsigned bin = prefix | (unsigned)digit << shift;
            s.settled = above + s.histogram[digit] == need && bin > 0;
            s.prefix = s.settled ? bin - 1 : bin;             // all of the bin are taken, or it is divided
            s.need = s.settled ? 0 : need - above;
          }
        }
        __syncthreads();
      }
      const unsigned least = s.prefix, equal = s.need;        // of keys equal to `least` the first `equal` are taken
      const int chunk = (candidates + THREADS - 1) / THREADS, from = min(tid * chunk, candidates);
      const int to = min(from + chunk, candidates);
      unsigned found = 0;                                     // greater ones, and equal ones in the upper half
      for (int i = from; i < to && BUDGET > 0; ++i) {
        const unsigned key = s.keys[FIRST + i];
        found += key > least ? 1u : key == least ? 1u << 16 : 0u;
      }
      const unsigned before = scan(found, s.room, tid);
      unsigned greater = before & 0xffff, same = before >> 16;
      for (int i = from; i < to && BUDGET > 0; ++i) {
        const unsigned key = s.keys[FIRST + i];
        if (key > least || (key == least && same < equal)) s.list[FIRST + greater + min(same, equal)] = FIRST + i;
        greater += key > least;
        same += key == least;
      }
      for (int i = tid; i < FIRST; i += THREADS) s.list[i] = i;
      for (int i = tid; i < WINDOW; i += THREADS) s.list[FIRST + BUDGET + i] = full - WINDOW + i;
    } else {
      for (int i = tid; i < count; i += THREADS) s.list[i] = i;
    }
    if (tid == 0) s.hits = s.pooled = s.misses = 0;
    __syncthreads();

    for (int e = tid; e < count; e += THREADS) {
      const int block = s.list[e];
      const long long from = address[block];
      s.where[e] = from == 0 ? IN_POOL : MISSING;
      s.source[e] = (u64)from;
      if (from == 0) {
        out[e] = block_table[block] * stride_rows + head;
        atomicAdd(&s.pooled, 1);
      }
    }
    __syncthreads();
    for (int h = tid; h < HOT; h += THREADS) {                // the list ascends
      const int block = s.tag[h];
      int low = 0, high = count;
      while (low < high) {
        const int middle = (low + high) / 2;
        if (s.list[middle] < block) low = middle + 1; else high = middle;
      }
      const bool hit = block >= 0 && low < count && s.list[low] == block && s.where[low] == MISSING;
      s.used[h] = hit;
      if (hit) {
        s.where[low] = h;
        stamp[h] = now;
        out[low] = s.hot[h] * stride_rows + head;
        atomicAdd(&s.hits, 1);
      }
    }
    __syncthreads();
    if (warp == 0) {
      int misses = 0;
      for (int base = 0; base < count; base += 32) {
        const bool missing = base + lane < count && s.where[base + lane] == MISSING;
        const unsigned all = __ballot_sync(ALL, missing);
        if (missing) s.missed[misses + __popc(all & ((1u << lane) - 1))] = base + lane;
        misses += __popc(all);
      }
      if (lane == 0) s.misses = misses;
    }
    __syncthreads();
    const int misses = s.misses;
    if (misses) {
      for (int h = tid; h < HOT; h += THREADS) {              // how many unused slots were used longer ago
        if (s.used[h]) continue;
        int older = 0;
        for (int other = 0; other < HOT; ++other)
          older += !s.used[other] && (s.last[other] < s.last[h] || (s.last[other] == s.last[h] && other < h));
        if (older < misses) s.victim[older] = h;
      }
      __syncthreads();
      u64 from = 0;
      for (int base = 0; base < misses; base += THREADS) {    // source[] is compacted in place, in order
        const int m = base + tid;
        if (m < misses) from = s.source[s.missed[m]];
        __syncthreads();
        if (m < misses) {
          const int h = s.victim[m], e = s.missed[m], at = s.hot[h] * stride_rows + head;
          tag[h] = s.list[e];
          stamp[h] = now;
          out[e] = at;
          s.source[m] = from + layer_offset + (u64)head * PIECE_BYTES;
          s.target[m] = (u64)(cache + (long long)at * PIECE_BYTES);
        }
        __syncthreads();
      }
    }
    if (tid == 0) {
      out[count] = block_table[full] * stride_rows + head;
      out_lengths[row] = count * BLOCK_TOKENS + length - full * BLOCK_TOKENS;
      clock[slot * HEADS + head] = now;
      counters += slot * COUNTERS;
      atomicAdd(counters + ASKED, (u64)count);
      if (s.pooled) atomicAdd(counters + IN_POOL_COUNT, (u64)s.pooled);
      if (s.hits) atomicAdd(counters + HOT_HITS, (u64)s.hits);
      if (misses) atomicAdd(counters + MISSES, (u64)misses);
    }
  }
  cluster_sync();

  // 4. Copy.
  const int misses = (int)load_remote(remote(&s.misses, 0));
  if (misses && rank) {
    for (int m = tid; m < misses; m += THREADS) {
      s.source[m] = load_remote64(remote(&s.source[m], 0));
      s.target[m] = load_remote64(remote(&s.target[m], 0));
    }
    __syncthreads();
  }
  cluster_arrive();                                           // of the first block's memory nothing is read any more
  const int units = misses * UNITS;
  for (int base = rank * THREADS + tid; base < units; base += CTAS * THREADS * UNROLL) {
    Vec data[UNROLL];
    char* to[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const int unit = base + i * CTAS * THREADS;
      if (unit >= units) break;
      const int m = unit / UNITS, at = unit % UNITS * 16;
      to[i] = (char*)s.target[m] + at;
      data[i] = load_host((const char*)s.source[m] + at);
    }
#pragma unroll
    for (int i = 0; i < UNROLL; ++i)
      if (base + i * CTAS * THREADS < units) *(Vec*)to[i] = data[i];
  }
  cluster_wait();
}
