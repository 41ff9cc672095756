// Compiled for sm_80, sm_90, sm_100 and as PTX; run on an H100.
#include "cuda/spin.h"

namespace gradcast {
namespace {

__global__ void spin_kernel(int64_t duration_ns) {
  const auto now_ns = [] {
    uint64_t time_ns = 0;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time_ns));
    return static_cast<int64_t>(time_ns);
  };
  const int64_t begin_ns = now_ns();
  while (now_ns() - begin_ns < duration_ns) {
    __nanosleep(500);
  }
}

}  // namespace

cudaError_t spin(int64_t duration_ns, cudaStream_t stream) {
  spin_kernel<<<1, 1, 0, stream>>>(duration_ns);
  return cudaGetLastError();
}

}  // namespace gradcast
