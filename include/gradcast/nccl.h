// A transport over NCCL, for gradients in the memory of one CUDA device. Part of builds with CUDA and NCCL (CMake
// target gradcast::nccl).
//
// It has run with one rank only, on an H100 with NCCL 2.28. Written against NCCL 2.19 and later.
//
// The transport has its own communicator and its own stream of high priority, because a late block delays the next
// forward pass. The kernels that write a block must have ended when it is started. A thread named "gradcast-nccl" puts
// operations on the stream and polls for their ends and for errors of the communicator. It may block there, because NCCL
// does not begin some operations before all ranks have come to them.
//
// Thread safety: any thread, within the contract of gradcast/transport.h.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gradcast/transport.h"

namespace gradcast {

struct NcclOptions {
  // Should be the calling thread's current device (cudaSetDevice): CUDA takes memory on every device that a thread
  // returns to.
  int32_t device = 0;
  int64_t connect_timeout_ns = 120'000'000'000;
  // The longest that an operation may take. Then all operations fail, and the communicator is aborted.
  int64_t operation_timeout_ns = 600'000'000'000;
  // If set, called with the time of each operation on the transport's stream, between two events, before its completion.
  std::function<void(int64_t time_ns)> on_stream_time = nullptr;
};

// Memory of the current device, not zeroed, from which NCCL can send without a copy (ncclMemAlloc); ordinary device
// memory if that is not available. Throws Error{kCommunication} if the device has no memory left.
std::shared_ptr<void> allocate_for_nccl(int64_t size_bytes);

// Version of the NCCL that is loaded: "2.28.9". Throws Error{kCommunication} for a failure of NCCL.
std::string nccl_version_text();

// Names a new communicator. One rank calls this and sends the id to all others, for instance by MPI.
// Throws Error{kCommunication} for a failure of NCCL.
std::string new_nccl_id();

// Collective: every rank of the id's communicator calls it. `buffers` lie in the memory of the device. Throws Error{kInvalidUse} if there is no such device, if
// the id was made by another version of NCCL, or if two ranks share a device; Error{kInvalidOption} for a buffer that
// cuts an element; Error{kCommunication} for a failure of CUDA or NCCL, or if not all ranks connect in time.
std::unique_ptr<Transport> make_nccl_transport(const std::string& id, int32_t rank, int32_t world_size,
                                               std::vector<HostBuffer> buffers, const NcclOptions& options = {});

}  // namespace gradcast
