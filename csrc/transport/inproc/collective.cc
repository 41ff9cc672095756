#include "collective.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace gradcast {
namespace {

template <typename Element>
std::vector<Element> packed(const Contribution& rank) {
  std::vector<Element> message;
  for (const Range& range : rank.ranges) {
    const size_t begin = message.size();
    message.resize(begin + static_cast<size_t>(range.size_bytes()) / sizeof(Element));
    std::memcpy(message.data() + begin, static_cast<const char*>(rank.buffer.data) + range.lo_bytes,
                static_cast<size_t>(range.size_bytes()));
  }
  return message;
}

template <typename Element>
void unpack(const std::vector<Element>& message, const Contribution& rank) {
  const Element* from = message.data();
  for (const Range& range : rank.ranges) {
    std::memcpy(static_cast<char*>(rank.buffer.data) + range.lo_bytes, from, static_cast<size_t>(range.size_bytes()));
    from += static_cast<size_t>(range.size_bytes()) / sizeof(Element);
  }
}

// The elements [first, last) of a message that belong to a rank.
struct Part {
  size_t first = 0;
  size_t last = 0;
};

Part part_of(size_t rank, size_t world_size, size_t element_count) {
  const size_t part_count = (element_count + world_size - 1) / world_size;
  return {std::min(rank * part_count, element_count), std::min((rank + 1) * part_count, element_count)};
}

template <typename Element>
std::vector<Element> sum_of(std::span<const Contribution> ranks) {
  std::vector<Element> sum = packed<Element>(ranks.front());
  for (const Contribution& rank : ranks.subspan(1)) {
    const std::vector<Element> message = packed<Element>(rank);
    std::transform(sum.begin(), sum.end(), message.begin(), sum.begin(), [](Element a, Element b) { return a + b; });
  }
  return sum;
}

template <typename Element>
void all_reduce(std::span<const Contribution> ranks) {
  const std::vector<Element> sum = sum_of<Element>(ranks);
  for (const Contribution& rank : ranks) {
    unpack(sum, rank);
  }
}

template <typename Element>
void reduce_scatter(std::span<const Contribution> ranks) {
  const std::vector<Element> sum = sum_of<Element>(ranks);
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    std::vector<Element> result(sum.size(), std::numeric_limits<Element>::quiet_NaN());
    const Part part = part_of(rank, ranks.size(), sum.size());
    std::copy(sum.begin() + part.first, sum.begin() + part.last, result.begin() + part.first);
    unpack(result, ranks[rank]);
  }
}

template <typename Element>
void all_gather(std::span<const Contribution> ranks) {
  std::vector<Element> result;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const std::vector<Element> message = packed<Element>(ranks[rank]);
    result.resize(message.size());
    const Part part = part_of(rank, ranks.size(), message.size());
    std::copy(message.begin() + part.first, message.begin() + part.last, result.begin() + part.first);
  }
  for (const Contribution& rank : ranks) {
    unpack(result, rank);
  }
}

template <typename Element>
void run(Op op, std::span<const Contribution> ranks) {
  switch (op) {
    case Op::kAllReduce:
      return all_reduce<Element>(ranks);
    case Op::kReduceScatter:
      return reduce_scatter<Element>(ranks);
    case Op::kAllGather:
      return all_gather<Element>(ranks);
  }
}

}  // namespace

int64_t element_bytes(InprocElement element) {
  return element == InprocElement::kFloat32 ? sizeof(float) : sizeof(double);
}

void run_collective(Op op, std::span<const Contribution> ranks) {
  if (ranks.front().buffer.element == InprocElement::kFloat32) {
    run<float>(op, ranks);
  } else {
    run<double>(op, ranks);
  }
}

}  // namespace gradcast
