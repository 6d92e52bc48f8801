// Swap-in of one layer: top-k positions -> row indices of the layer's paged cache, fetching from the host what is missing.
// One cluster of CTAS blocks per batch row, one launch. swap_in.py gives the constants; swap_in_reference.py is the semantics.
//
//   1. Look up: page 0 -> the GPU block; a hot row -> stamp it as used in this call; else a miss, listed in shared memory.
//   2. Fetch: the misses' rows start on their way from the host, before it is known where they go.
//   3. Cluster barrier: every row that this call uses is stamped.
//   4. Claim: each miss takes a slot from the clock hand, never one stamped in this call; the fetched rows are stored there.
//
// With PEERS > 1 ranks that hold the same rows and run the same calls, 2. to 4. are of the misses that this rank owns; then
//
//   5. Publish: nothing in this request's hot buffer moves until its next call; the others are told so.
//   6. Read: a miss that another rank owns comes from that rank's hot buffer; from the host if it is late, or has not got it.
//
// TOPK, QUERY_TOKENS, HOT_ROWS, ROW_BYTES, BLOCK_TOKENS; CTAS, THREADS; ROWS: rows in flight per warp;
// PREFETCH: only make rows present: no output, the epoch stays, a miss that finds no slot is dropped. PEERS: 1 then.

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

enum { ASKED, GPU_ROWS, HOT_HITS, MISSES, PREFETCHED_ROWS, PREFETCHED_USED, LOST, WAIT_NS, PEER_ROWS, LATE_ROWS, COUNTERS };
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

#if PEERS > 1
constexpr int BACKOFF = 31;                                   // halvings after which a late rank is not waited for

struct Place { const char* cache; const unsigned short* slot_of; u64* flags; };  // of one rank, as seen from this one

// Which rank fetches a page row from the host: neighbouring rows are spread evenly. tables.py has the same.
__device__ __forceinline__ int owner(int row) { return __umulhi((unsigned)row * 0x9E3779B1u, PEERS); }

__device__ __forceinline__ void store_release(u64* p, u64 v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" :: "l"(p), "l"(v) : "memory");
}

__device__ __forceinline__ u64 load_acquire(const u64* p) {
  u64 v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ short load_slot(const unsigned short* p) {
  unsigned short v;
  asm volatile("ld.relaxed.sys.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
  return (short)v;
}

// Of a peer or of the host. Not by the non-coherent path: what a peer wrote is ordered by load_acquire only.
__device__ __forceinline__ Vec load_row(const char* p) {
  Vec v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
#endif

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
        short* slot_of, int* tag, int* stamp, unsigned* clock, u64* counters
#if PEERS > 1
        , int me, const Place* __restrict__ places,  // [PEERS], of this layer
        u64* flags,                                  // [S, PEERS] what each rank has published of the layer; it writes here
        const u64* __restrict__ mark,                // [1] of the tables, the lower half 0
        volatile int* silent,                        // [PEERS] times that a rank was late, since it last was not
        u64 patience                                 // nanoseconds to wait for a rank
#endif
        ) {
  __shared__ int hot[HOT_BLOCKS];
  __shared__ int miss_row[SHARE], miss_item[SHARE];
  __shared__ const char* miss_addr[SHARE];
  __shared__ int pending_row[DEDUP ? SHARE : 1], pending_item[DEDUP ? SHARE : 1];
  __shared__ int victims[WARPS][32];
  __shared__ int misses, pendings, asked, gpu_rows, used_first, epoch_shared, valid[QUERY_TOKENS];
#if PEERS > 1
  __shared__ Place peers[PEERS];
  __shared__ int theirs;                             // misses that others own, listed from the end
  __shared__ unsigned owners, present;               // ranks that own some of them; those of them that have published
#endif

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
  counters += slot * COUNTERS;
#if PEERS > 1
  flags += slot * PEERS;
  if (tid < PEERS) peers[tid] = places[tid];
  if (tid == 0) theirs = owners = present = 0;
#endif

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
#if PEERS > 1
    const bool other = miss && owner(row) != me;
    const unsigned others = __ballot_sync(ALL, other);
    if (others) {
      int base = 0;
      if (lane == 0) base = atomicAdd(&theirs, __popc(others));
      base = __shfl_sync(ALL, base, 0);
      if (other) {
        const int i = SHARE - 1 - (base + __popc(others & ((1u << lane) - 1)));
        miss_row[i] = row;
        miss_item[i] = item;
        miss_addr[i] = addr[j] + layer_offset + (pos[j] % BLOCK_TOKENS) * ROW_BYTES;
        atomicOr(&owners, 1u << owner(row));
        miss = false;
      }
    }
#endif

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
#if PEERS > 1
  const int m = theirs, missed = n + m;
#else
  const int missed = n;
#endif
  if (tid == 0 && !PREFETCH) {
    atomicAdd(counters + ASKED, (u64)asked);
    if (gpu_rows) atomicAdd(counters + GPU_ROWS, (u64)gpu_rows);
    atomicAdd(counters + HOT_HITS, (u64)(asked - gpu_rows - missed));
    if (missed) atomicAdd(counters + MISSES, (u64)missed);
    if (used_first) atomicAdd(counters + PREFETCHED_USED, (u64)used_first);
  }
  if (!PREFETCH && counts && tid < QUERY_TOKENS && tid % CTAS == rank) counts[request * QUERY_TOKENS + tid] = valid[tid];

  // 2. Fetch. Miss l of a round is number base + l * WARPS + warp of the block's list.
  Vec data[ROWS][(UNITS + 7 + 31) / 32];
  int base = warp;
  int rows = max(0, min(ROWS, (n - base + WARPS - 1) / WARPS));
  const u64 started = missed ? nanoseconds() : 0;
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
  if (PEERS == 1 && n == 0 && pending_count == 0) return;

  // 3. + 4.
  cluster_wait();
  int done = 0, lost = 0;
  auto settle = [&](int i, int mine) {               // miss i of the list has slot `mine`, or none
    const int row = miss_row[i], item = miss_item[i];
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
  };
  auto place = [&](int h) { return cache + hot[h / BLOCK_TOKENS] * block_stride + (h % BLOCK_TOKENS) * ROW_BYTES; };
#if PEERS > 1
  for (int b = warp; b < m; b += WARPS * 32) {       // while the first rows are on their way
    const int need = min(32, (m - b + WARPS - 1) / WARPS);
    claim(need, victims[warp], stamp, clock, epoch, lane, rank * WARPS + warp);
    const int mine = victims[warp][lane];
    if (lane < need) {
      const int i = SHARE - 1 - (b + lane * WARPS);
      settle(i, mine);
      miss_item[i] = mine;                           // read again in 6., by the same lane
    }
    lost += __popc(__ballot_sync(ALL, lane < need && mine < 0));
    __syncwarp();
  }
#endif
  while (rows > 0) {
    claim(rows, victims[warp], stamp, clock, epoch, lane, rank * WARPS + warp);
    const int mine = victims[warp][lane];
    if (lane < rows) settle(base + lane * WARPS, mine);
    const int placed = __popc(__ballot_sync(ALL, lane < rows && mine >= 0));
    done += placed;
    lost += rows - placed;
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
    if (PEERS == 1 && !PREFETCH && n && rank == 0 && warp == 0) atomicAdd(counters + WAIT_NS, nanoseconds() - started);
  }

#if PEERS > 1
  // 5. Every block has claimed, also for what others own, and the rows that this rank owns are in its hot buffer.
  cluster_arrive();
  if (rank != 0 && m == 0 && pending_count == 0) return;
  cluster_wait();
  const u64 call = *mark | (unsigned)epoch;
  if (rank == 0 && tid < PEERS && tid != me) store_release(peers[tid].flags + slot * PEERS + me, call);
  for (int i = tid; i < pending_count; i += THREADS) {
    const int h = __ldcg(slot_of + pending_row[i]);
    out[pending_item[i]] = h < 0 ? -1 : hot[h / BLOCK_TOKENS] * stride_rows + h % BLOCK_TOKENS;
  }

  // 6. Each block waits for those whose rows it misses. A rank that keeps being late is waited for half as long each time.
  if (m > 0) {
    if (tid < PEERS && (owners >> tid & 1)) {
      const int before = silent[tid];
      const u64 since = nanoseconds(), limit = before < BACKOFF ? patience >> before : 0;
      bool there = load_acquire(flags + tid) == call;
      while (!there && nanoseconds() - since < limit) there = load_acquire(flags + tid) == call;
      if (there) atomicOr(&present, 1u << tid);
      if (!there) silent[tid] = min(before + 1, BACKOFF);
      else if (before) silent[tid] = 0;
    }
    __syncthreads();
    int peer_rows = 0, late_rows = 0;
    for (int b = warp; b < m; b += WARPS * 32) {
      const int count = min(32, (m - b + WARPS - 1) / WARPS);
      const char* from = nullptr;
      int to = -1;
      bool late = false, found = false;
      if (lane < count) {
        const int i = SHARE - 1 - (b + lane * WARPS), row = miss_row[i], whose = owner(row);
        to = miss_item[i];
        from = miss_addr[i];
        late = !(present >> whose & 1);
        const int h = late ? ABSENT : load_slot(peers[whose].slot_of + row);
        found = h >= 0 && h < HOT_ROWS;
        // Its hot buffer has the same blocks as this one, in a cache of the same shape.
        if (found) from = peers[whose].cache + hot[h / BLOCK_TOKENS] * block_stride + (h % BLOCK_TOKENS) * ROW_BYTES;
      }
      peer_rows += __popc(__ballot_sync(ALL, found));
      late_rows += __popc(__ballot_sync(ALL, late));
      for (int l0 = 0; l0 < count; l0 += ROWS) {
#pragma unroll
        for (int l = 0; l < ROWS; ++l) {
          if (l0 + l >= count) break;
          const char* row = (const char*)__shfl_sync(ALL, (u64)from, l0 + l);
          const int shift = ((long long)row >> 4) & 7;
#pragma unroll
          for (int v = 0; v < (UNITS + 7 + 31) / 32; ++v) {
            const int unit = v * 32 + lane - shift;
            if (unit >= 0 && unit < UNITS) data[l][v] = load_row(row + unit * 16);
          }
        }
#pragma unroll
        for (int l = 0; l < ROWS; ++l) {
          if (l0 + l >= count) break;
          const int shift = ((long long)__shfl_sync(ALL, (u64)from, l0 + l) >> 4) & 7;
          const int h = __shfl_sync(ALL, to, l0 + l);
          if (h < 0) continue;
          char* target = place(h);
#pragma unroll
          for (int v = 0; v < (UNITS + 7 + 31) / 32; ++v) {
            const int unit = v * 32 + lane - shift;
            if (unit >= 0 && unit < UNITS) *(Vec*)(target + unit * 16) = data[l][v];
          }
        }
      }
    }
    if (lane == 0) {
      if (peer_rows) atomicAdd(counters + PEER_ROWS, (u64)peer_rows);
      if (late_rows) atomicAdd(counters + LATE_ROWS, (u64)late_rows);
    }
  }
  if (missed && rank == 0 && tid == 0) atomicAdd(counters + WAIT_NS, nanoseconds() - started);
  return;
#endif

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
