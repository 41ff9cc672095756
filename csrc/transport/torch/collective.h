// Starts one operation on a process group. A single range that divides evenly is sent from where it lies; anything else
// is packed, padded and unpacked here.
//
// Thread safety: pure; any thread. A group is called by one thread at a time.
#pragma once

#include <c10/core/ScalarType.h>

#include <exception>
#include <functional>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "gradcast/types.h"
#include "transport/torch/range_views.h"

namespace gradcast {

struct Collective {
  c10::intrusive_ptr<c10d::Work> work;
  // To be called once `work` has succeeded, on any thread. Empty if the bytes are in place already.
  std::function<void()> unpack;
  // On a device: to be kept until `work` has ended. A backend releases memory that it reads as soon as some stream
  // waits for the work, and that may be another stream than the one on which the memory was allocated.
  std::vector<at::Tensor> read;
};

// The failure of a work whose end a stream has passed, or nullptr. The stream alone does not show it, because a backend
// that gives an operation up lets streams go on. `is_nccl`: NCCL's watchdog reports to a copy of the work, which shares
// the result with this one.
std::exception_ptr failure_of(c10d::Work& work, bool is_nccl);

// NCCL's stream for an operation: its communicator's own, which waits for the current one, or the current stream itself,
// which needs neither that wait nor its events (torch's async_op=False). Other backends know no difference.
enum class RunsOn : bool { kOwnStream, kCurrentStream };

// Throws what the backend throws, for instance c10::Error for an operation or data type that it does not support.
Collective start_collective(c10d::ProcessGroup& group, Op op, const RangeViews& views,
                            RunsOn runs_on = RunsOn::kOwnStream);

// An all-reduce of fp32 numbers that are sent as `wire` and summed in fp32: all-to-all, sum, all-gather. It is the
// counterpart of wire_all_reduce.h, which uses messages on the host. REQUIRES: a wait for works of this group lets the
// current stream wait, not the host.
Collective start_wire_all_reduce_on_stream(c10d::ProcessGroup& group, const RangeViews& views, c10::ScalarType wire,
                                           RunsOn runs_on = RunsOn::kOwnStream);

// Every rank's `own`, in rank order, into `everyone`, which has room for that.
c10::intrusive_ptr<c10d::Work> all_gather_flat(c10d::ProcessGroup& group, at::Tensor& everyone, at::Tensor& own);

// A block on its way. `wire`: of start_wire_all_reduce_on_stream.
struct Message {
  Op op = Op::kAllReduce;
  c10::ScalarType type = c10::kFloat;
  int64_t size_bytes = 0;
  std::optional<c10::ScalarType> wire{};
};
// Sends zeros like this message, in memory of their own. Collective; REQUIRES: nothing else of the group is in flight.
void connect(c10d::ProcessGroup& group, at::Device device, const Message& message);

}  // namespace gradcast
