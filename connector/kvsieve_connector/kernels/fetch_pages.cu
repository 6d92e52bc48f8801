// Pages from the host to a staging area, by few blocks: beside the kernels that compute. PAGE_BYTES, THREADS, UNROLL.

constexpr int UNITS = PAGE_BYTES / 16;

struct __align__(16) Vec { unsigned x, y, z, w; };

__device__ __forceinline__ Vec load_host(const char* p) {
  Vec v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

extern "C" __global__ void __launch_bounds__(THREADS)
fetch_pages(char* __restrict__ staging, long long staging_bytes, const long long* __restrict__ addresses, int pages) {
  const long long units = (long long)pages * UNITS, chunk = THREADS * UNROLL;
  for (long long first = blockIdx.x * chunk + threadIdx.x; first < units; first += gridDim.x * chunk) {
    Vec data[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const long long unit = first + i * THREADS;
      if (unit < units) data[i] = load_host((const char*)addresses[unit / UNITS] + unit % UNITS * 16);
    }
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const long long unit = first + i * THREADS;
      if (unit < units) *(Vec*)(staging + unit / UNITS * staging_bytes + unit % UNITS * 16) = data[i];
    }
  }
}
