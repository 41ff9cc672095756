// A transport over NCCL, for gradients in the memory of one CUDA device. In builds with CUDA and NCCL (CMake target
// gradcast::nccl).
//
// NOT YET RUN ON A GPU: written against NCCL 2.19 and later, compiled and linked.
//
// It has a communicator and a stream of its own; the stream is of high priority, because a late block delays the next forward
// pass. A block waits on the device for the kernels that write it (on_written), never on the host. A thread named
// "gradcast-nccl" puts operations on the stream, looks for what has ended, and for errors of the communicator: NCCL does
// not begin some operations before all ranks have come to them, and nobody else waits for that.
//
// Thread safety: any thread, within the contract of gradcast/transport.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gradcast/transport.h"

namespace gradcast {

enum class DeviceElement { kFloat32, kFloat64, kFloat16, kBFloat16 };

// The memory of one gradient buffer on the device. It must stay until the transport is closed.
struct DeviceBuffer {
  void* data = nullptr;
  int64_t size_bytes = 0;  // a multiple of the element's size
  DeviceElement element = DeviceElement::kFloat32;
};

struct NcclOptions {
  // Best the thread's own (cudaSetDevice): CUDA takes memory on every device that it comes back to, used or not.
  int32_t device = 0;
  // Thread blocks that communication takes from compute at most; 0: as NCCL chooses.
  int32_t cta_count_max = 0;
  int64_t connect_timeout_ns = 120'000'000'000;
  // So long may an operation take once the device has written its bytes; then all fail, and the communicator is given up.
  int64_t operation_timeout_ns = 600'000'000'000;
};

class DeviceTransport : public Transport {
 public:
  // `stream` has been given the kernels that write this range; what is started later waits for them. Throws
  // Error{kInvalidOption} for a buffer that does not exist, Error{kCommunication} for what CUDA refuses.
  virtual void on_written(int32_t buffer, Range range, cudaStream_t stream) = 0;
  // What is put on `stream` after this runs behind the ends of the operations on this range, as far as they were `queued`
  // (CompletionSink) before: the host waits for Progress::kQueued only (Engine::wait). REQUIRES: of two operations that share
  // bytes, the second was started after the end of the first. Throws as on_written does.
  virtual void order_behind(int32_t buffer, Range range, cudaStream_t stream) = 0;
};

// Memory of the current device for a gradient buffer that NCCL can send from where it lies (ncclMemAlloc), or where that is
// not to be had, ordinary memory of the device. It frees itself; not zeroed. Throws Error{kCommunication}: no memory.
std::shared_ptr<void> allocate_for_nccl(int64_t size_bytes);

// Names a communicator: made on one rank and carried to all others, by the c10d store, by MPI, by any other way.
// Throws Error{kCommunication} for what NCCL refuses.
std::string new_nccl_id();

// Collective: every rank of the id's communicator calls it.
// Throws Error{kInvalidUse} without a device, for another NCCL than the id's, or two ranks on one device; Error{kInvalidOption}
// for a buffer that cuts an element; Error{kCommunication} for what CUDA or NCCL refuse, or where ranks do not come in time.
std::unique_ptr<DeviceTransport> make_nccl_transport(const std::string& id, int32_t rank, int32_t world_size,
                                                     std::vector<DeviceBuffer> buffers,
                                                     const NcclOptions& options = {});

}  // namespace gradcast
