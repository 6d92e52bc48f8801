// Swap-in of one layer: top-k positions -> row indices of the layer's paged cache, fetching from the host what is missing.
// One cluster of CTAS blocks per batch row, one launch. swap_in.py gives the constants; swap_in_reference.py is the semantics.
//
//   1. Look up: page 0 -> the GPU block; a hot row -> stamp it as used in this call; else a miss, listed in shared memory.
//   2. Fetch: the misses' rows start on their way from the host, before it is known where they go.
//   3. Cluster barrier: every row that this call uses is stamped.
//   4. Claim: each miss takes a slot from the clock hand, never one stamped in this call; the fetched rows are stored there.
//
// TOPK, QUERY_TOKENS, HOT_ROWS, ROW_BYTES, BLOCK_TOKENS; CTAS, THREADS; ROWS: rows in flight per warp;
// PREFETCH: only make rows present: no output, the epoch stays, a miss that finds no slot is dropped.

constexpr int ITEMS = TOPK * QUERY_TOKENS;                    // positions of one batch row
constexpr int SHARE = (ITEMS + CTAS - 1) / CTAS;              // of which one block looks up
constexpr int PER_THREAD = (SHARE + THREADS - 1) / THREADS;
constexpr int WARPS = THREADS / 32;
constexpr int UNITS = ROW_BYTES / 16;
constexpr int HOT_BLOCKS = HOT_ROWS / BLOCK_TOKENS;
constexpr bool DEDUP = QUERY_TOKENS > 1 || PREFETCH;          // may a batch row name a position twice?
constexpr short ABSENT = -1, FETCHING = -2;                   // of slot_of
constexpr unsigned CALL_TICKS = 16;                           // what one call adds to clock[s][1]; CTAS divides it
constexpr int PREFETCHED = 1 << 30;                           // marks the stamp of a row that no call has used yet
constexpr int CANDIDATES = 4;                                 // slots examined per slot needed
constexpr int ROUNDS = PREFETCH ? HOT_ROWS / 16 + 8 : ITEMS + 256;  // looks of one warp, then the miss is given up
constexpr unsigned ALL = 0xffffffffu;

enum { ASKED, GPU_ROWS, HOT_HITS, MISSES, PREFETCHED_ROWS, PREFETCHED_USED, LOST, WAIT_NS };
typedef unsigned long long u64;

struct __align__(16) Vec { unsigned x, y, z, w; };

__device__ __forceinline__ Vec load_host(const char* p) {
  Vec v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

__device__ __forceinline__ u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// Lanes 0..need-1 of the warp find a slot each in `slots`; the rest of `slots` is -1. Second chance: the hand takes a slot
// whose stamp is 0, and sets to 0 the stamp of one that was last used in an earlier call.
__device__ void claim(int need, int* slots, int* stamp, unsigned* hand, int epoch, int lane, int warp) {
  slots[lane] = -1;
  __syncwarp();
  int got = 0, width = CANDIDATES;
  for (int round = 0; got < need && round < ROUNDS; ++round, width = min(2 * width, 32)) {
    const int n = min(32, width * (need - got));
    unsigned start = 0;
    if (lane == 0) start = atomicAdd(hand, (unsigned)n);
    start = __shfl_sync(ALL, start, 0);
    const int slot = (start + lane) % HOT_ROWS;
    const int seen = lane < n ? __ldcg(stamp + slot) : epoch;
    const unsigned open = __ballot_sync(ALL, seen == 0);
    // Warps that see the same open slots begin at different ones.
    const int count = max(__popc(open), 1), turn = warp + round;
    const int rank = (__popc(open & ((1u << lane) - 1)) + turn) % count;
    bool taken = false;
    if (seen == 0) {
      if (rank < need - got) taken = atomicCAS(stamp + slot, 0, PREFETCH ? epoch | PREFETCHED : epoch) == 0;
    } else if ((seen & ~PREFETCHED) != epoch) {
      atomicCAS(stamp + slot, seen, 0);
    }
    const unsigned winners = __ballot_sync(ALL, taken);
    if (taken) slots[got + __popc(winners & ((1u << lane) - 1))] = slot;
    got += __popc(winners);
  }
  __syncwarp();
}

extern "C" __global__ void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(THREADS)
swap_in(const int* __restrict__ topk,                // [R * QUERY_TOKENS, TOPK]
        const int* __restrict__ block_table,         // [R, table_stride]
        int table_stride,
        int* __restrict__ out,                       // [R * QUERY_TOKENS, TOPK]
        int* __restrict__ counts,                    // [R * QUERY_TOKENS] or null
        int stride_rows,
        const int* __restrict__ row_slot,            // [R]
        const int* __restrict__ page,                // [S, page_stride]
        int page_stride,
        const long long* __restrict__ page_addr,     // [M]
        const int* __restrict__ hot_blocks,          // [S, HOT_BLOCKS] of the layer's group
        char* cache, long long block_stride, long long layer_offset,
        short* slot_of, int* tag, int* stamp, unsigned* clock, u64* counters) {
  __shared__ int hot[HOT_BLOCKS];
  __shared__ int miss_row[SHARE], miss_item[SHARE];
  __shared__ const char* miss_addr[SHARE];
  __shared__ int pending_row[DEDUP ? SHARE : 1], pending_item[DEDUP ? SHARE : 1];
  __shared__ int victims[WARPS][32];
  __shared__ int misses, pendings, asked, gpu_rows, used_first, epoch_shared, valid[QUERY_TOKENS];

  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int request = blockIdx.x / CTAS, rank = blockIdx.x % CTAS;
  topk += (long long)request * ITEMS;
  out += (long long)request * ITEMS;
  const int first = rank * SHARE, last = min(first + SHARE, ITEMS);

  int pos[PER_THREAD];
#pragma unroll
  for (int j = 0; j < PER_THREAD; ++j) {
    const int item = first + j * THREADS + tid;
    pos[j] = item < last ? topk[item] : -1;
  }
  const int slot = row_slot[request];
  if (slot < 0) {                                    // a padding row: the same for the whole cluster
    for (int item = first + tid; !PREFETCH && item < last; item += THREADS) out[item] = -1;
    if (!PREFETCH && counts && rank == 0 && tid < QUERY_TOKENS) counts[request * QUERY_TOKENS + tid] = 0;
    return;
  }
  page += (long long)slot * page_stride;
  hot_blocks += slot * HOT_BLOCKS;
  tag += slot * HOT_ROWS;
  stamp += slot * HOT_ROWS;
  clock += slot * 2;
  counters += slot * 8;

  if (tid == 0) {
    misses = pendings = asked = gpu_rows = used_first = 0;
    const unsigned ticks = PREFETCH ? clock[1] : atomicAdd(clock + 1, CALL_TICKS / CTAS) + CALL_TICKS;
    epoch_shared = ticks / CALL_TICKS + 1;           // never 0; a prefetch sees that of the last call
  }
  if (tid < QUERY_TOKENS) valid[tid] = 0;
  for (int i = tid; i < HOT_BLOCKS; i += THREADS) hot[i] = hot_blocks[i];

  // 1. Look up. Every load of a stage is issued before the next stage needs one.
  int number[PER_THREAD], found[PER_THREAD];
  const char* addr[PER_THREAD];
#pragma unroll
  for (int j = 0; j < PER_THREAD; ++j) number[j] = pos[j] >= 0 ? page[pos[j] / BLOCK_TOKENS] : 0;
#pragma unroll
  for (int j = 0; j < PER_THREAD; ++j) {
    found[j] = ABSENT;
    if (pos[j] < 0) continue;
    if (number[j] == 0) {
      if (!PREFETCH) found[j] = block_table[(long long)request * table_stride + pos[j] / BLOCK_TOKENS];
    } else {
      found[j] = __ldcg(slot_of + number[j] * BLOCK_TOKENS + pos[j] % BLOCK_TOKENS);
      addr[j] = (const char*)page_addr[number[j]];
    }
  }
  __syncthreads();
  const int epoch = epoch_shared;
#pragma unroll
  for (int j = 0; j < PER_THREAD; ++j) {
    const int item = first + j * THREADS + tid, row = number[j] * BLOCK_TOKENS + pos[j] % BLOCK_TOKENS;
    const bool on_host = pos[j] >= 0 && number[j] != 0;
    bool miss = on_host && found[j] < 0, pending = false, used = false;
    if (DEDUP && miss) {
      const auto absent = (unsigned short)ABSENT, fetching = (unsigned short)FETCHING;
      miss = found[j] == ABSENT && atomicCAS((unsigned short*)slot_of + row, absent, fetching) == absent;
      pending = !miss;
    }
    int value = -1;
    if (on_host && found[j] >= 0) {
      used = !PREFETCH && (__ldcg(stamp + found[j]) & PREFETCHED);
      stamp[found[j]] = epoch;
      value = hot[found[j] / BLOCK_TOKENS] * stride_rows + found[j] % BLOCK_TOKENS;
    } else if (pos[j] >= 0 && !on_host) {
      value = found[j] * stride_rows + pos[j] % BLOCK_TOKENS;
    }
    if (!PREFETCH && item < last && !miss && !pending) out[item] = value;

    const unsigned missing = __ballot_sync(ALL, miss), asking = __ballot_sync(ALL, pos[j] >= 0);
    const unsigned here = __ballot_sync(ALL, pos[j] >= 0 && !on_host), early = __ballot_sync(ALL, used);
    int base = 0;
    if (lane == 0) {
      if (missing) base = atomicAdd(&misses, __popc(missing));
      if (asking) atomicAdd(&asked, __popc(asking));
      if (here) atomicAdd(&gpu_rows, __popc(here));
      if (early) atomicAdd(&used_first, __popc(early));
    }
    if (missing) base = __shfl_sync(ALL, base, 0);
    if (miss) {
      const int i = base + __popc(missing & ((1u << lane) - 1));
      miss_row[i] = row;
      miss_item[i] = item;
      miss_addr[i] = addr[j] + layer_offset + (pos[j] % BLOCK_TOKENS) * ROW_BYTES;
    }
    if (DEDUP && pending) {
      const int i = atomicAdd(&pendings, 1);
      pending_row[i] = row;
      pending_item[i] = item;
    }
  }
  if (!PREFETCH && counts) {
    for (int q = rank; q < QUERY_TOKENS; q += CTAS) {
      int n = 0;
      for (int i = tid; i < TOPK; i += THREADS) n += topk[q * TOPK + i] >= 0;
      n = __reduce_add_sync(ALL, n);
      if (lane == 0) atomicAdd(&valid[q], n);
    }
  }
  __syncthreads();
  const int n = misses;
  if (tid == 0 && !PREFETCH) {
    atomicAdd(counters + ASKED, (u64)asked);
    if (gpu_rows) atomicAdd(counters + GPU_ROWS, (u64)gpu_rows);
    atomicAdd(counters + HOT_HITS, (u64)(asked - gpu_rows - n));
    if (n) atomicAdd(counters + MISSES, (u64)n);
    if (used_first) atomicAdd(counters + PREFETCHED_USED, (u64)used_first);
  }
  if (!PREFETCH && counts && tid < QUERY_TOKENS && tid % CTAS == rank) counts[request * QUERY_TOKENS + tid] = valid[tid];

  // 2. Fetch. Miss l of a round is number base + l * WARPS + warp of the block's list.
  Vec data[ROWS][(UNITS + 7 + 31) / 32];
  int base = warp;
  int rows = max(0, min(ROWS, (n - base + WARPS - 1) / WARPS));
  const u64 started = n ? nanoseconds() : 0;
  auto fetch = [&]() {
#pragma unroll
    for (int l = 0; l < ROWS; ++l) {
      if (l >= rows) break;
      const char* from = miss_addr[base + l * WARPS];
      const int shift = ((long long)from >> 4) & 7;  // lane 0 starts at a 128-byte line: no line is asked for twice
#pragma unroll
      for (int v = 0; v < (UNITS + 7 + 31) / 32; ++v) {
        const int unit = v * 32 + lane - shift;
        if (unit >= 0 && unit < UNITS) data[l][v] = load_host(from + unit * 16);
      }
    }
  };
  fetch();
  cluster_arrive();
  const int pending_count = DEDUP && !PREFETCH ? pendings : 0;
  if (n == 0 && pending_count == 0) return;

  // 3. + 4.
  cluster_wait();
  int done = 0, lost = 0;
  while (rows > 0) {
    claim(rows, victims[warp], stamp, clock, epoch, lane, rank * WARPS + warp);
    const int mine = victims[warp][lane];
    if (lane < rows) {
      const int row = miss_row[base + lane * WARPS], item = miss_item[base + lane * WARPS];
      if (mine >= 0) {
        const int old = __ldcg(tag + mine);
        if (old >= 0) slot_of[old] = ABSENT;
        tag[mine] = row;
        slot_of[row] = (short)mine;
        if (!PREFETCH) out[item] = hot[mine / BLOCK_TOKENS] * stride_rows + mine % BLOCK_TOKENS;
      } else {
        if (DEDUP) slot_of[row] = ABSENT;
        if (!PREFETCH) out[item] = -1;
      }
    }
    const int placed = __popc(__ballot_sync(ALL, lane < rows && mine >= 0));
    done += placed;
    lost += rows - placed;
    auto place = [&](int h) { return cache + hot[h / BLOCK_TOKENS] * block_stride + (h % BLOCK_TOKENS) * ROW_BYTES; };
#pragma unroll
    for (int l = 0; l < ROWS; ++l) {
      if (l >= rows) break;
      const int h = victims[warp][l];
      if (h < 0) continue;
      const int shift = ((long long)miss_addr[base + l * WARPS] >> 4) & 7;
      char* to = place(h);
#pragma unroll
      for (int v = 0; v < (UNITS + 7 + 31) / 32; ++v) {
        const int unit = v * 32 + lane - shift;
        if (unit >= 0 && unit < UNITS) *(Vec*)(to + unit * 16) = data[l][v];
      }
    }
    __syncwarp();
    base += WARPS * ROWS;
    rows = max(0, min(ROWS, (n - base + WARPS - 1) / WARPS));
    if (rows > 0) fetch();
  }
  if (lane == 0) {
    if (PREFETCH && done) atomicAdd(counters + PREFETCHED_ROWS, (u64)done);
    if (!PREFETCH && lost) atomicAdd(counters + LOST, (u64)lost);
    if (!PREFETCH && n && rank == 0 && warp == 0) atomicAdd(counters + WAIT_NS, nanoseconds() - started);
  }

  // A position that another row of the request fetches: its slot is known once every block has claimed.
  if (DEDUP && !PREFETCH) {
    cluster_arrive();
    if (pending_count == 0) return;
    cluster_wait();
    for (int i = tid; i < pending_count; i += THREADS) {
      const int h = __ldcg(slot_of + pending_row[i]);
      out[pending_item[i]] = h < 0 ? -1 : hot[h / BLOCK_TOKENS] * stride_rows + h % BLOCK_TOKENS;
    }
  }
}
