#include "transport/torch/collective.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <stdexcept>
#include <utility>
#include <vector>

namespace gradcast {

namespace {

using Work = c10::intrusive_ptr<c10d::Work>;

// torch 2.15 has new names for two collectives and warns of the old ones.
template <typename Group>
Work scatter(Group& group, at::Tensor& output, at::Tensor& input) {
  if constexpr (requires { group.reduce_scatter_single(output, input); }) {
    return group.reduce_scatter_single(output, input);
  } else {
    return group._reduce_scatter_base(output, input);
  }
}

template <typename Group>
Work gather(Group& group, at::Tensor& output, at::Tensor& input) {
  if constexpr (requires { group.all_gather_single(output, input); }) {
    return group.all_gather_single(output, input);
  } else {
    return group._allgather_base(output, input);
  }
}

template <typename Group>
Work exchange(Group& group, at::Tensor& output, at::Tensor& input) {
  std::vector<int64_t> equal_parts;  // empty means that
  if constexpr (requires { group.all_to_all_single(output, input, equal_parts, equal_parts); }) {
    return group.all_to_all_single(output, input, equal_parts, equal_parts);
  } else {
    return group.alltoall_base(output, input, equal_parts, equal_parts);
  }
}

// The row as world_size parts of equal size, the last ones filled up; one of them is this rank's.
struct Parts {
  Parts(const c10d::ProcessGroup& group, int64_t element_count)
      : part_size((element_count + group.getSize() - 1) / group.getSize()),
        padded_size(part_size * group.getSize()),
        own_first(std::min(group.getRank() * part_size, element_count)),
        own_count(std::min(part_size, element_count - own_first)) {}

  int64_t part_size;
  int64_t padded_size;
  int64_t own_first;
  int64_t own_count;
};

Collective all_reduce(c10d::ProcessGroup& group, const Row& row) {
  const int64_t size = row.element_count();
  std::vector<at::Tensor> message = {row.in_place() ? row.view() : row.read(0, size, size)};
  Collective started{group.allreduce(message), nullptr, message};
  if (!row.in_place()) started.unpack = [row, size, sum = message[0]] { row.write(0, size, sum); };
  return started;
}

// WORKAROUND(torch 2.11 to 2.15, Gloo): its reduce-scatter is an all-reduce of a copy, and the work that it returns gets on
// only while a thread waits in it, without end. An all-reduce leaves all that is asked for and completes by itself.
bool only_pretends_to_scatter(c10d::ProcessGroup& group, const Row& row) {
  return group.getBackend(row.view().device().type())->getBackendName() == "gloo";
}

Collective reduce_scatter(c10d::ProcessGroup& group, const Row& row) {
  if (only_pretends_to_scatter(group, row)) return all_reduce(group, row);
  const int64_t size = row.element_count();
  const Parts parts(group, size);
  const bool fits = row.in_place() && parts.padded_size == size;
  at::Tensor input = fits ? row.view() : row.read(0, size, parts.padded_size);
  at::Tensor output = at::empty({parts.part_size}, input.options());
  Work work = scatter(group, output, input);
  return {std::move(work), [row, parts, output] { row.write(parts.own_first, parts.own_count, output); }, {input}};
}

Collective all_gather(c10d::ProcessGroup& group, const Row& row) {
  const int64_t size = row.element_count();
  const Parts parts(group, size);
  const bool fits = row.in_place() && parts.padded_size == size;
  at::Tensor input = row.read(parts.own_first, parts.own_count, parts.part_size);
  at::Tensor output = fits ? row.view() : at::empty({parts.padded_size}, input.options());
  Collective started{gather(group, output, input), nullptr, {input}};
  if (!fits) started.unpack = [row, size, output] { row.write(0, size, output); };
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

Collective start_collective(c10d::ProcessGroup& group, Op op, const Row& row) {
  switch (op) {
    case Op::kAllReduce:
      return all_reduce(group, row);
    case Op::kReduceScatter:
      return reduce_scatter(group, row);
    case Op::kAllGather:
      return all_gather(group, row);
  }
  TORCH_CHECK(false, "unknown kind of operation ", static_cast<int>(op));
}

Collective start_exchange_on_stream(c10d::ProcessGroup& group, const Row& row, c10::ScalarType wire) {
  const int64_t size = row.element_count();
  const Parts parts(group, size);
  at::Tensor sent = at::zeros({parts.padded_size}, row.view().options().dtype(wire));
  row.read_into(sent, 0, size);
  at::Tensor received = at::empty_like(sent);
  exchange(group, received, sent)->wait();  // the stream waits, not the host
  at::Tensor sum = received.view({group.getSize(), parts.part_size}).sum(0, /*keepdim=*/false, at::kFloat).to(wire);
  at::Tensor sums = at::empty_like(sent);
  Work work = gather(group, sums, sum);
  return {std::move(work), [row, size, sums] { row.write(0, size, sums); }, {sum}};
}

}  // namespace gradcast
