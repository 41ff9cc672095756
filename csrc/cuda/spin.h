// A CUDA kernel that occupies a stream for a given time: the compute of gradcast-bench on a device.
//
// Thread safety: any thread.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace gradcast {

// Queues the kernel on `stream` and returns. `duration_ns` is in nanoseconds of the device's clock.
cudaError_t spin(int64_t duration_ns, cudaStream_t stream);

}  // namespace gradcast
