#include "transport/inproc/collective.h"

#include <algorithm>
#include <limits>

#include "transport/common/host_memory.h"
#include "transport/common/parts.h"

namespace gradcast {
namespace {

template <typename Number>
std::vector<Number> packed(const Contribution& rank) {
  int64_t size_bytes = 0;
  for (const Range& range : rank.ranges) {
    size_bytes += range.size_bytes();
  }
  std::vector<Number> message(static_cast<size_t>(size_bytes) / sizeof(Number));
  pack(message.data(), rank.buffer, rank.ranges);
  return message;
}

// Copies a rank's part of one message to its place in another.
template <typename Number>
void copy_part(const std::vector<Number>& from, std::vector<Number>& to, size_t rank, size_t world_size) {
  const Part part =
      part_of(static_cast<int32_t>(rank), static_cast<int32_t>(world_size), static_cast<int64_t>(from.size()));
  std::copy(from.begin() + part.first, from.begin() + part.last, to.begin() + part.first);
}

template <typename Number>
std::vector<Number> sum_of(std::span<const Contribution> ranks) {
  std::vector<Number> sum = packed<Number>(ranks.front());
  for (const Contribution& rank : ranks.subspan(1)) {
    const std::vector<Number> message = packed<Number>(rank);
    std::transform(sum.begin(), sum.end(), message.begin(), sum.begin(), [](Number a, Number b) { return a + b; });
  }
  return sum;
}

template <typename Number>
void all_reduce(std::span<const Contribution> ranks) {
  const std::vector<Number> sum = sum_of<Number>(ranks);
  for (const Contribution& rank : ranks) {
    unpack(rank.buffer, rank.ranges, sum.data());
  }
}

template <typename Number>
void reduce_scatter(std::span<const Contribution> ranks) {
  const std::vector<Number> sum = sum_of<Number>(ranks);
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    std::vector<Number> result(sum.size(), std::numeric_limits<Number>::quiet_NaN());
    copy_part(sum, result, rank, ranks.size());
    unpack(ranks[rank].buffer, ranks[rank].ranges, result.data());
  }
}

template <typename Number>
void all_gather(std::span<const Contribution> ranks) {
  std::vector<Number> result;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const std::vector<Number> message = packed<Number>(ranks[rank]);
    result.resize(message.size());
    copy_part(message, result, rank, ranks.size());
  }
  for (const Contribution& rank : ranks) {
    unpack(rank.buffer, rank.ranges, result.data());
  }
}

template <typename Number>
void run(Op op, std::span<const Contribution> ranks) {
  switch (op) {
    case Op::kAllReduce:
      return all_reduce<Number>(ranks);
    case Op::kReduceScatter:
      return reduce_scatter<Number>(ranks);
    case Op::kAllGather:
      return all_gather<Number>(ranks);
  }
}

}  // namespace

void run_collective(Op op, std::span<const Contribution> ranks) {
  if (ranks.front().buffer.element == Element::kFloat32) {
    run<float>(op, ranks);
  } else {
    run<double>(op, ranks);
  }
}

}  // namespace gradcast
