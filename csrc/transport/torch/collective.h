// Starts one operation on a process group: what travels in place does, anything else is packed, padded and unpacked here.
//
// Thread safety: pure; any thread. A group is called by one thread at a time.
#pragma once

#include <exception>
#include <functional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "gradcast/types.h"
#include "transport/torch/range_views.h"

namespace gradcast {

struct Collective {
  c10::intrusive_ptr<c10d::Work> work;
  // To be called when `work` has succeeded, for instance on the backend's thread. Empty where the bytes are in place already.
  std::function<void()> unpack;
  // On a device to be kept until `work` has been seen to end: a backend gives memory that it reads back as soon as some stream
  // waits for it, and that may not be the one on which the memory was allocated.
  std::vector<at::Tensor> read;
};

// What has gone wrong with a work whose end a stream has passed: nullptr where nothing has. A backend that gives an operation up
// lets streams go on. `is_nccl`: its watchdog tells a copy of the work, which shares the result with this one.
std::exception_ptr failure_of(c10d::Work& work, bool is_nccl);

// Throws what the backend throws, c10::Error for instance where it does not know the operation or the data type.
Collective start_collective(c10d::ProcessGroup& group, Op op, const Row& row);

// An all-reduce of fp32 numbers that travel as `wire` and are added up in fp32: all-to-all, sum, all-gather, as exchange.h does
// it with messages on the host. REQUIRES: works of this group let the current stream wait, not the host.
Collective start_exchange_on_stream(c10d::ProcessGroup& group, const Row& row, c10::ScalarType wire);

}  // namespace gradcast
