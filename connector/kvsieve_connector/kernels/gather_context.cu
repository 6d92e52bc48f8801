// The whole context of one layer, token by token, as bf16 rows of 576: what a prefill attends to.
//
// Grid (x, requests). A warp takes TOKENS tokens at a time, all loads first.
// ROW_BYTES 656: 512 e4m3 in 4 tiles of 128, 4 fp32 scales, 64 bf16; ROW_BYTES 1152: 576 bf16. BLOCK_TOKENS, THREADS, TOKENS.

constexpr bool FP8 = ROW_BYTES == 656;
constexpr int WARPS = THREADS / 32;
constexpr int DST_BYTES = 576 * 2;

struct __align__(16) Vec { unsigned x, y, z, w; };

__device__ __forceinline__ Vec load(const char* p) {  // rows are read once: do not keep them
  Vec v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

// Two e4m3 (the low half of v) times scale, as two bf16: e4m3 -> fp16 is exact, the product is rounded once in fp32, once to bf16.
__device__ __forceinline__ unsigned convert(unsigned v, float scale) {
  unsigned halves, result;
  float low, high;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((unsigned short)v));
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(low), "=f"(high) : "r"(halves));
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high * scale), "f"(low * scale));
  return result;
}

__device__ __forceinline__ Vec convert(unsigned a, unsigned b, float scale) {
  return {convert(a, scale), convert(a >> 16, scale), convert(b, scale), convert(b >> 16, scale)};
}

extern "C" __global__ void __launch_bounds__(THREADS)
gather_context(char* __restrict__ dst,                         // bf16 [N, 576]
               const char* __restrict__ cache, long long block_stride, long long layer_offset,
               const int* __restrict__ block_table, int table_stride,
               const int* __restrict__ slots,                  // [n]
               const int* __restrict__ starts, const int* __restrict__ lengths,
               const int* __restrict__ page, int page_stride,  // [S, page_stride]
               const long long* __restrict__ page_addr,
               const int* __restrict__ staged, int staged_stride,  // [n, staged_stride] or null
               const char* __restrict__ staging, long long staging_bytes) {
  const int lane = threadIdx.x % 32, request = blockIdx.y;
  const int length = lengths[request], slot = slots[request];
  dst += (long long)starts[request] * DST_BYTES;
  block_table += (long long)request * table_stride;
  staged += (long long)request * staged_stride;
  page += (long long)slot * page_stride;

  const int step = gridDim.x * WARPS * TOKENS;
  for (int first = (blockIdx.x * WARPS + threadIdx.x / 32) * TOKENS; first < length; first += step) {
    const char* from[TOKENS];
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
      const int token = min(first + i, length - 1), block = token / BLOCK_TOKENS;
      const char* base;
      const int number = slot < 0 ? 0 : page[block];
      const int copy = number == 0 || staging_bytes == 0 ? -1 : staged[block];
      if (number == 0) base = cache + block_table[block] * block_stride;
      else if (copy >= 0) base = staging + copy * staging_bytes;
      else base = (const char*)page_addr[number] + layer_offset;
      from[i] = base + (token % BLOCK_TOKENS) * ROW_BYTES;
    }
    Vec a[TOKENS], b[TOKENS], c[TOKENS];  // bytes [0, 512), [512, 1024) or the scales, the rest
    float scale[TOKENS];
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
      a[i] = load(from[i] + lane * 16);
      if (FP8) {
        asm volatile("ld.global.f32 %0, [%1];" : "=f"(scale[i]) : "l"(from[i] + 512 + lane / 8 * 4));
        if (lane < 8) c[i] = load(from[i] + 528 + lane * 16);
      } else {
        b[i] = load(from[i] + 512 + lane * 16);
        if (lane < 8) c[i] = load(from[i] + 1024 + lane * 16);
      }
    }
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
      if (first + i >= length) break;
      char* to = dst + (long long)(first + i) * DST_BYTES;
      if (FP8) {
        *(Vec*)(to + lane * 32) = convert(a[i].x, a[i].y, scale[i]);
        *(Vec*)(to + lane * 32 + 16) = convert(a[i].z, a[i].w, scale[i]);
      } else {
        *(Vec*)(to + lane * 16) = a[i];
        *(Vec*)(to + 512 + lane * 16) = b[i];
      }
      if (lane < 8) *(Vec*)(to + 1024 + lane * 16) = c[i];
    }
  }
}
