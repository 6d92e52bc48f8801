// Picking of one layer: for each batch row and KV head the blocks that its query attends to, as a block table, fetching from
// the host what is missing. One cluster of CTAS blocks per row and head, one launch. pick_blocks.py gives the constants;
// dense/gpu/pick_blocks_reference.py is the semantics.
//
//   1. Score every full block by its summary, each block of the cluster a part of them.   (only past what is listed anyhow)
//   2. The cluster's first block takes the BUDGET best, beside the FIRST and the newest WINDOW.
//   3. It looks them up: in the pool; in a hot slot; else a miss, which takes the hot slot that was used longest ago.
//   4. All blocks of the cluster copy the misses from the host.
//
// HEADS, GROUP, DIM, BLOCK_TOKENS, PIECE_BYTES; SELECTOR: 0 quest-bounds, 1 mean-key, 2 mean-outlier, 3 part-means; VECTORS
// of a summary: 1, 2, 4, 8, 16; FP16, else bf16; FIRST, BUDGET, WINDOW, HOT, MAX_BLOCKS; CTAS, THREADS; RESIDENT:
// thread blocks that a multiprocessor takes.

constexpr int LISTED = FIRST + BUDGET + WINDOW;               // full blocks of a list at most
constexpr int WARPS = THREADS / 32;
constexpr int SHARE = (MAX_BLOCKS + CTAS - 1) / CTAS;         // of which one block scores
constexpr int TILE = 16;                                      // vectors that a warp multiplies at once
constexpr int TILE_BLOCKS = TILE / VECTORS;
constexpr int STEPS = (DIM + 31) / 32;                        // of 32 channels
constexpr int DEPTH = STEPS < 8 ? 8 / STEPS : 1;              // tiles that are loaded ahead
constexpr int WIDTH = VECTORS * DIM;                          // of a summary
constexpr int UNITS = PIECE_BYTES / 16;
constexpr int UNROLL = 4;                                     // loads in flight of a thread
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

// c += a * b: 16 vectors by 16 channels, times 16 channels by 8 query heads. Each lane has four vectors' pairs of channels, two
// heads' pairs, and of the result two heads of two vectors (PTX ISA, mma.m16n8k16).
__device__ __forceinline__ void multiply(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
#if FP16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Both halves of a pair, where they are negative, or where they are not; else 0.
__device__ __forceinline__ unsigned where_sign(unsigned pair, bool negative) {
  const unsigned mask = (pair >> 15 & 0x10001u) * 0xffffu;
  return pair & (negative ? mask : ~mask);
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

// The logit of a block from the products of its vectors with a query, of which each lane has one. The others are those of the
// rows beside it, four lanes apart, and with 16 vectors the lane has a second one. All of them get it.
__device__ __forceinline__ float block_logit(float mine, float second, int row) {
  if (SELECTOR == 1) return mine;
  if (SELECTOR == 2) mine += row % 2 ? -__logf(1.f + MEAN_WEIGHT) : __logf(MEAN_WEIGHT / (1.f + MEAN_WEIGHT));
  float high = VECTORS > 8 ? fmaxf(mine, second) : mine;
#pragma unroll
  for (int step = 4; step < min(VECTORS, 8) * 4; step *= 2) high = fmaxf(high, __shfl_xor_sync(ALL, high, step));
  float sum = SELECTOR == 0 ? mine : __expf(mine - high) + (VECTORS > 8 ? __expf(second - high) : 0.f);
#pragma unroll
  for (int step = 4; step < min(VECTORS, 8) * 4; step *= 2) sum += __shfl_xor_sync(ALL, sum, step);
  return SELECTOR == 0 ? sum : high + __logf(SELECTOR == 2 ? sum : sum / VECTORS);
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

extern "C" __global__ void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(THREADS, RESIDENT)
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
    const int row8 = lane / 4, column = lane % 4 * 8;         // of a tile's vectors, two: row8 and row8 + 8
    for (int i = start + tid; i < end; i += THREADS) s.page[i - start] = page[i];
    __syncthreads();
    summaries += (long long)head * pages * WIDTH;
#pragma unroll 1
    for (int g0 = 0; g0 < GROUP; g0 += 8) {
      // Both operands have their channels in the same other order, in which a lane loads eight that are neighbours.
      Vec q[STEPS];
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int channel = step * 32 + column;
        q[step] = g0 + row8 < GROUP && channel < DIM ? *reinterpret_cast<const Vec*>(query + (g0 + row8) * DIM + channel) : Vec{0, 0, 0, 0};
      }
      for (int base = start + warp * TILE_BLOCKS * DEPTH; base < end; base += WARPS * TILE_BLOCKS * DEPTH) {
        Vec v[DEPTH][2][STEPS];
        bool known[DEPTH][2];
#pragma unroll
        for (int d = 0; d < DEPTH; ++d)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int vector = half * 8 + row8, block = base + d * TILE_BLOCKS + vector / VECTORS;
            const int where = block < end ? s.page[block - start] : -1;
            known[d][half] = where >= 0;
            const u16* from = summaries + (long long)max(where, 0) * WIDTH + vector % VECTORS * DIM + column;
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
              v[d][half][step] = known[d][half] && step * 32 + column < DIM ? *reinterpret_cast<const Vec*>(from + step * 32) : Vec{0, 0, 0, 0};
          }
#pragma unroll
        for (int d = 0; d < DEPTH; ++d) {
          float c[4] = {0.f, 0.f, 0.f, 0.f};
          if (SELECTOR == 0) {                                // the lower bounds, even rows, by what is negative, the upper by the rest
            float upper[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
              const Vec a = v[d][0][step], b = v[d][1][step], x = q[step];
              multiply(c, a.x, b.x, a.y, b.y, where_sign(x.x, true), where_sign(x.y, true));
              multiply(c, a.z, b.z, a.w, b.w, where_sign(x.z, true), where_sign(x.w, true));
              multiply(upper, a.x, b.x, a.y, b.y, where_sign(x.x, false), where_sign(x.y, false));
              multiply(upper, a.z, b.z, a.w, b.w, where_sign(x.z, false), where_sign(x.w, false));
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) if (row8 % 2) c[i] = upper[i];
          } else {
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
              const Vec a = v[d][0][step], b = v[d][1][step], x = q[step];
              multiply(c, a.x, b.x, a.y, b.y, x.x, x.y);
              multiply(c, a.z, b.z, a.w, b.w, x.z, x.w);
            }
          }
#pragma unroll
          for (int half = 0; half < (VECTORS > 8 ? 1 : 2); ++half)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const float logit = block_logit(c[half * 2 + i] * scale, c[2 + i] * scale, row8);
              const int vector = half * 8 + row8, block = base + d * TILE_BLOCKS + vector / VECTORS, g = g0 + lane % 4 * 2 + i;
              if (vector % VECTORS == 0 && g < GROUP && block < end) s.logits[(block - start) * GROUP + g] = known[d][half] ? logit : -INFINITY;
            }
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
