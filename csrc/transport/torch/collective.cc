#include "transport/torch/collective.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "transport/common/parts.h"

namespace gradcast {

namespace {

using Work = c10::intrusive_ptr<c10d::Work>;

template <typename Options>
Options options_for(RunsOn runs_on) {
  Options options;
  options.asyncOp = runs_on == RunsOn::kOwnStream;
  return options;
}

// torch 2.15 has new names for two collectives and warns of the old ones.
template <typename Group>
Work scatter(Group& group, at::Tensor& output, at::Tensor& input, RunsOn runs_on) {
  const auto options = options_for<c10d::ReduceScatterOptions>(runs_on);
  if constexpr (requires { group.reduce_scatter_single(output, input, options); }) {
    return group.reduce_scatter_single(output, input, options);
  } else {
    return group._reduce_scatter_base(output, input, options);
  }
}

template <typename Group>
Work gather_parts(Group& group, at::Tensor& output, at::Tensor& input, RunsOn runs_on = RunsOn::kOwnStream) {
  const auto options = options_for<c10d::AllgatherOptions>(runs_on);
  if constexpr (requires { group.all_gather_single(output, input, options); }) {
    return group.all_gather_single(output, input, options);
  } else {
    return group._allgather_base(output, input, options);
  }
}

template <typename Group>
Work all_to_all(Group& group, at::Tensor& output, at::Tensor& input, RunsOn runs_on) {
  const auto options = options_for<c10d::AllToAllOptions>(runs_on);
  std::vector<int64_t> equal_parts;  // empty means that
  if constexpr (requires { group.all_to_all_single(output, input, equal_parts, equal_parts, options); }) {
    return group.all_to_all_single(output, input, equal_parts, equal_parts, options);
  } else {
    return group.alltoall_base(output, input, equal_parts, equal_parts, options);
  }
}

// The block as world_size parts of equal size, the last ones padded, and this rank's own one.
struct Parts {
  Parts(const c10d::ProcessGroup& group, int64_t element_count)
      : size(part_size(element_count, group.getSize())),
        padded_size(size * group.getSize()),
        own(part_of(group.getRank(), group.getSize(), element_count)),
        rank(group.getRank()) {}

  // A view of this rank's part of the padded block.
  at::Tensor own_of(const at::Tensor& block) const { return block.narrow(0, rank * size, size); }

  int64_t size;
  int64_t padded_size;
  Part own;
  int64_t rank;
};

// Several ranges are summed in a packed copy.
Collective all_reduce(c10d::ProcessGroup& group, const RangeViews& views, RunsOn runs_on) {
  const int64_t size = views.element_count();
  std::vector<at::Tensor> message = {views.in_place() ? views.front() : views.read(0, size, size)};
  Collective started{group.allreduce(message, options_for<c10d::AllreduceOptions>(runs_on)), nullptr, message};
  if (!views.in_place()) started.unpack = [views, size, sum = message[0]] { views.write(0, size, sum); };
  return started;
}

std::string backend_of(c10d::ProcessGroup& group, const RangeViews& views) {
  return group.getBackend(views.front().device().type())->getBackendName();
}

// WORKAROUND(torch 2.11 to 2.15, Gloo): its reduce-scatter is an all-reduce of a copy, and the work that it returns
// gets on only while a thread waits in it, without end. An all-reduce leaves all that is asked for and completes by
// itself.
bool only_pretends_to_scatter(c10d::ProcessGroup& group, const RangeViews& views) {
  return backend_of(group, views) == "gloo";
}

// Whether this rank's part may lie inside the block, as NCCL documents for its reduce-scatter and all-gather.
bool shares_memory(c10d::ProcessGroup& group, const RangeViews& views) {
  return backend_of(group, views) == "nccl";
}

// The sum of this rank's part goes to a tensor of its own where the backend cannot put it into its place.
Collective reduce_scatter(c10d::ProcessGroup& group, const RangeViews& views, RunsOn runs_on) {
  if (only_pretends_to_scatter(group, views)) return all_reduce(group, views, runs_on);
  const int64_t size = views.element_count();
  const Parts parts(group, size);
  const bool fits = views.in_place() && parts.padded_size == size;
  at::Tensor input = fits ? views.front() : views.read(0, size, parts.padded_size);
  const bool shares = shares_memory(group, views);
  at::Tensor output = shares ? parts.own_of(input) : at::empty({parts.size}, input.options());
  Work work = scatter(group, output, input, runs_on);
  if (shares && fits) return {std::move(work), nullptr, {input}};
  return {
      std::move(work), [views, parts, output] { views.write(parts.own.first, parts.own.count(), output); }, {input}};
}

// Sends a copy of this rank's part, unless the backend can read it where the gathered block will lie.
Collective all_gather(c10d::ProcessGroup& group, const RangeViews& views, RunsOn runs_on) {
  const int64_t size = views.element_count();
  const Parts parts(group, size);
  const bool fits = views.in_place() && parts.padded_size == size;
  at::Tensor input = fits && shares_memory(group, views) ? parts.own_of(views.front())
                                                         : views.read(parts.own.first, parts.own.count(), parts.size);
  at::Tensor output = fits ? views.front() : at::empty({parts.padded_size}, input.options());
  Collective started{gather_parts(group, output, input, runs_on), nullptr, {input}};
  if (!fits) started.unpack = [views, size, output] { views.write(0, size, output); };
  return started;
}

}  // namespace

std::exception_ptr failure_of(c10d::Work& work, bool is_nccl) {
  try {
    static_cast<void>(work.isCompleted());  // looks, and tells exception() what it has seen
    if (work.exception() || !is_nccl) return work.exception();
    const auto result = work.getFutureResult();
    const bool is_known = result != nullptr && result->completed() && !result->hasError();
    if (!is_known || result->constValue().toInt() == static_cast<int64_t>(c10d::WorkResult::SUCCESS)) return nullptr;
    throw std::runtime_error("NCCL gave it up: it took too long, or a connection is lost");
  } catch (...) {
    return std::current_exception();
  }
}

Collective start_collective(c10d::ProcessGroup& group, Op op, const RangeViews& views, RunsOn runs_on) {
  switch (op) {
    case Op::kAllReduce:
      return all_reduce(group, views, runs_on);
    case Op::kReduceScatter:
      return reduce_scatter(group, views, runs_on);
    case Op::kAllGather:
      return all_gather(group, views, runs_on);
  }
  TORCH_CHECK(false, "unknown kind of operation ", static_cast<int>(op));
}

Collective start_wire_all_reduce_on_stream(c10d::ProcessGroup& group, const RangeViews& views, c10::ScalarType wire,
                                           RunsOn runs_on) {
  const int64_t size = views.element_count();
  const Parts parts(group, size);
  at::Tensor sent = at::zeros({parts.padded_size}, views.front().options().dtype(wire));
  views.read_into(sent, 0, size);
  at::Tensor received = at::empty_like(sent);
  all_to_all(group, received, sent, runs_on)->wait();  // the stream waits, not the host
  at::Tensor sum = received.view({group.getSize(), parts.size}).sum(0, /*keepdim=*/false, at::kFloat).to(wire);
  at::Tensor sums = at::empty_like(sent);
  Work work = gather_parts(group, sums, sum, runs_on);
  return {std::move(work), [views, size, sums] { views.write(0, size, sums); }, {sum}};
}

c10::intrusive_ptr<c10d::Work> all_gather_flat(c10d::ProcessGroup& group, at::Tensor& everyone, at::Tensor& own) {
  return gather_parts(group, everyone, own);
}

void connect(c10d::ProcessGroup& group, at::Device device, const Message& message) {
  const at::NoGradGuard no_grad;
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(message.type));
  const int64_t count = std::max<int64_t>(1, message.size_bytes / element_bytes);
  const std::vector<Range> whole = {{0, count * element_bytes}};
  const RangeViews views(at::zeros({count}, at::TensorOptions(message.type).device(device)), whole);
  const Collective started = message.wire ? start_wire_all_reduce_on_stream(group, views, *message.wire)
                                          : start_collective(group, message.op, views);
  started.work->wait();
}

}  // namespace gradcast
