// Summaries of blocks' keys, of all layers. Grid (blocks, layers, KV heads). DIM, BLOCK_TOKENS, PIECE_BYTES; THREADS;
// SELECTOR: 0 quest-bounds, 1 mean-key, 2 mean-outlier, 3 part-means; VECTORS of a summary; FP16, else bf16.
// dense/selectors.py is the semantics.

constexpr int WIDTH = VECTORS * DIM;
constexpr int ROW = DIM * 2, UNITS = ROW / 16;                // bytes of a token's key, and loads
constexpr int WARPS = THREADS / 32;
constexpr unsigned ALL = 0xffffffffu;
typedef unsigned short u16;

#define INFINITY __int_as_float(0x7f800000)                   // NVRTC has none

struct __align__(16) Vec { unsigned x, y, z, w; };

__device__ __forceinline__ Vec load(const char* p) {
  Vec v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

__device__ __forceinline__ float number(u16 bits) {
#if FP16
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
  return f;
#else
  return __uint_as_float((unsigned)bits << 16);
#endif
}

__device__ __forceinline__ u16 rounded(float f) {
  u16 bits;
#if FP16
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(f));
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(f));
#endif
  return bits;
}

extern "C" __global__ void __launch_bounds__(THREADS)
summarise(const long long* __restrict__ source,    // [n] address of the block's slot in the arena; -1 - id in the pool
          const int* __restrict__ page,            // [n]
          const long long* __restrict__ pool,      // [L] address of the layer's first block
          long long block_stride,
          const long long* __restrict__ offset,    // [L] of the layer in a slot
          u16* __restrict__ summaries, int pages) {  // [L, HEADS, pages, WIDTH]
  __shared__ __align__(16) u16 keys[BLOCK_TOKENS][DIM];
  __shared__ float mean[DIM], furthest[BLOCK_TOKENS];
  __shared__ int outlier;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int block = blockIdx.x, layer = blockIdx.y, head = blockIdx.z;
  const long long where = source[block];
  const char* from = where >= 0 ? (const char*)(where + offset[layer]) : (const char*)(pool[layer] + (-1 - where) * block_stride);
  from += head * PIECE_BYTES;
  for (int i = tid; i < BLOCK_TOKENS * UNITS; i += THREADS)   // a token has its key and its value
    reinterpret_cast<Vec*>(keys)[i] = load(from + (i / UNITS) * (PIECE_BYTES / BLOCK_TOKENS) + i % UNITS * 16);
  __syncthreads();
  u16* to = summaries + (((long long)layer * gridDim.z + head) * pages + page[block]) * WIDTH;
  if (SELECTOR == 3) {
    for (int i = tid; i < WIDTH; i += THREADS) {
      constexpr int TOKENS = BLOCK_TOKENS / VECTORS;          // of a part
      float sum = 0.f;
      for (int t = 0; t < TOKENS; ++t) sum += number(keys[i / DIM * TOKENS + t][i % DIM]);
      to[i] = rounded(sum / TOKENS);
    }
    return;
  }
  for (int d = tid; d < DIM; d += THREADS) {
    float sum = 0.f, low = INFINITY, high = -INFINITY;
    for (int t = 0; t < BLOCK_TOKENS; ++t) {
      const float k = number(keys[t][d]);
      sum += k;
      low = fminf(low, k);
      high = fmaxf(high, k);
    }
    mean[d] = sum / BLOCK_TOKENS;
    to[d] = rounded(SELECTOR == 0 ? low : mean[d]);
    if (SELECTOR == 0) to[DIM + d] = rounded(high);
  }
  if (SELECTOR != 2) return;
  __syncthreads();
  for (int t = warp; t < BLOCK_TOKENS; t += WARPS) {
    float most = 0.f;
    for (int d = lane; d < DIM; d += 32) most = fmaxf(most, fabsf(number(keys[t][d]) - mean[d]));
#pragma unroll
    for (int step = 16; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(ALL, most, step));
    if (lane == 0) furthest[t] = most;
  }
  __syncthreads();
  if (tid == 0) {
    int best = 0;
    for (int t = 1; t < BLOCK_TOKENS; ++t) if (furthest[t] > furthest[best]) best = t;
    outlier = best;
  }
  __syncthreads();
  for (int d = tid; d < DIM; d += THREADS) to[DIM + d] = keys[outlier][d];
}
