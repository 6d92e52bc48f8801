// Many pieces from one address to another, host or device, 16 bytes a thread. A block takes one piece at a time. THREADS, UNROLL.

struct __align__(16) Vec { unsigned x, y, z, w; };

__device__ __forceinline__ Vec load(const char* p) {
  Vec v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

extern "C" __global__ void __launch_bounds__(THREADS)
copy_blocks(const long long* __restrict__ src, const long long* __restrict__ dst, const long long* __restrict__ bytes, int pieces) {
  for (int piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
    const char* from = (const char*)src[piece];
    char* to = (char*)dst[piece];
    const int units = (int)(bytes[piece] / 16);
    for (int first = threadIdx.x; first < units; first += THREADS * UNROLL) {
      Vec data[UNROLL];
#pragma unroll
      for (int i = 0; i < UNROLL; ++i)
        if (first + i * THREADS < units) data[i] = load(from + (first + i * THREADS) * 16ll);
#pragma unroll
      for (int i = 0; i < UNROLL; ++i)
        if (first + i * THREADS < units) *(Vec*)(to + (first + i * THREADS) * 16ll) = data[i];
    }
  }
}
