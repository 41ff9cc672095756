// Numbers on their way: fp32 gradients as 16-bit ones and back, with the average folded in, and a checksum of bytes.
//
// Each function exists twice: for memory of the host, which is the reference, and for memory of a device, as one kernel on a
// stream. Both give the same bits, but of a NaN, which stays one. Rounding is to the nearest, ties to even; what is too large
// becomes infinite.
//
// Thread safety: pure; any thread. The device functions return when the kernel has been queued.
#pragma once

#include <cstdint>

#ifdef GRADCAST_HAS_CUDA
#include <cuda_runtime_api.h>
#endif

namespace gradcast {

enum class WireFormat { kBf16, kFp16 };

// wire[i] = numbers[i] * factor, in 16 bits. `count` numbers; any alignment that the types allow; the arrays do not overlap.
void to_wire(uint16_t* wire, const float* numbers, int64_t count, float factor, WireFormat format);
// numbers[i] = wire[i] * factor.
void from_wire(float* numbers, const uint16_t* wire, int64_t count, float factor, WireFormat format);

// Equal bytes have equal sums; that two arrays of the same length differ and have the same is as likely as 2^-64. The order of
// summing does not count, so a device may do it in any.
uint64_t checksum(const void* data, int64_t size_bytes);

#ifdef GRADCAST_HAS_CUDA
cudaError_t to_wire(uint16_t* wire, const float* numbers, int64_t count, float factor, WireFormat format,
                    cudaStream_t stream);
cudaError_t from_wire(float* numbers, const uint16_t* wire, int64_t count, float factor, WireFormat format,
                      cudaStream_t stream);
// Adds the checksum to *sum, in the device's memory, which the caller has set to 0.
cudaError_t checksum(uint64_t* sum, const void* data, int64_t size_bytes, cudaStream_t stream);
// A kernel that does nothing for so long: compute, for who measures a network.
cudaError_t spin(int64_t duration_ns, cudaStream_t stream);
#endif

}  // namespace gradcast
