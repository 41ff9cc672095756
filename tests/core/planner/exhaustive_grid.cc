#include "tests/core/planner/exhaustive_grid.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace gradcast {
namespace {

void add_tensor(Grid& grid, const Tensor& tensor, std::vector<int64_t>& buffer_bytes) {
  if (tensor.bytes % grid.unit_bytes != 0 || tensor.bytes < 1 || grid.unit_bytes % tensor.element_bytes != 0) {
    throw std::invalid_argument("a tensor is not a multiple of the unit, or the unit cuts an element");
  }
  const auto units = static_cast<int32_t>(tensor.bytes / grid.unit_bytes);
  grid.units.push_back(units);
  grid.first_unit.push_back(grid.unit_count);
  grid.buffer.push_back(tensor.buffer);
  grid.ready_ns.push_back(tensor.ready_ns);
  grid.buffer_count = std::max(grid.buffer_count, tensor.buffer + 1);
  buffer_bytes.resize(std::max(buffer_bytes.size(), static_cast<size_t>(grid.buffer_count)), 0);
  for (int32_t u = 0; u < units; ++u) {
    grid.offset_bytes.push_back(buffer_bytes[tensor.buffer]);
    grid.tensor.push_back(grid.tensor_count() - 1);
    buffer_bytes[tensor.buffer] += grid.unit_bytes;
  }
  grid.unit_count += units;
}

}  // namespace

const LinkPiece& applying_piece(const std::vector<LinkPiece>& pieces, int64_t size_bytes) {
  for (const LinkPiece& piece : pieces) {
    if (size_bytes <= piece.up_to_bytes) {
      return piece;
    }
  }
  throw std::invalid_argument("no piece of the link holds the size");
}

double grid_cost_ns(const std::vector<LinkPiece>& pieces, int64_t size_bytes, double pack_ns_per_byte) {
  const LinkPiece& piece = applying_piece(pieces, size_bytes);
  return piece.alpha_ns + (piece.beta_ns_per_byte + pack_ns_per_byte) * static_cast<double>(size_bytes);
}

Grid make_grid(const Profile& profile, const LinkModel& link, const ExhaustiveOptions& options) {
  Grid grid;
  grid.unit_bytes = options.unit_bytes;
  grid.backward_ns = profile.backward_ns;
  std::vector<int64_t> buffer_bytes;
  double updates_ns = 0;
  const Tensor* previous = nullptr;
  for (const Tensor& tensor : profile.tensors) {
    if (previous != nullptr && (tensor.need_ns < previous->need_ns ||
                                (tensor.need_ns == previous->need_ns && tensor.ready_ns > previous->ready_ns))) {
      throw std::invalid_argument("the tensors are not in urgency order");
    }
    previous = &tensor;
    add_tensor(grid, tensor, buffer_bytes);
    grid.need_ns.push_back(options.mode == Mode::kOverlap ? tensor.need_ns + updates_ns : 0);
    updates_ns += tensor.update_ns;
  }
  grid.forward_ns = profile.forward_ns + updates_ns;
  grid.packing_costs = link.pack_ns_per_byte > 0;
  grid.in_flight = options.in_flight;
  grid.cost_ns = {0};
  for (int64_t units = 1; units <= grid.unit_count; ++units) {
    grid.cost_ns.push_back(grid_cost_ns(link.all_reduce.pieces, units * grid.unit_bytes, 0));
  }
  return grid;
}

Block grid_block(const Grid& grid, const std::vector<int32_t>& units) {
  Block block;
  for (const int32_t unit : units) {
    block.buffer = grid.buffer[grid.tensor[unit]];
    const int64_t lo_bytes = grid.offset_bytes[unit];
    if (block.ranges.empty() || block.ranges.back().hi_bytes != lo_bytes) {
      block.ranges.push_back({lo_bytes, lo_bytes});
    }
    block.ranges.back().hi_bytes += grid.unit_bytes;
  }
  return block;
}

double best_whole_tensor_buckets_ns(const Profile& profile, const LinkModel& link) {
  const auto count = static_cast<int32_t>(profile.tensors.size());
  std::vector<int32_t> order(count);
  for (int32_t i = 0; i < count; ++i) {
    order[i] = count - 1 - i;
    if (profile.tensors[i].buffer != profile.tensors[0].buffer || count > 20) {
      throw std::invalid_argument("one buffer and at most 20 tensors are expected");
    }
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return profile.tensors[a].ready_ns < profile.tensors[b].ready_ns; });
  double updates_ns = 0;
  for (const Tensor& tensor : profile.tensors) {
    updates_ns += tensor.update_ns;
  }
  double best_finish_ns = std::numeric_limits<double>::infinity();
  // Bit i of `cuts`: a bucket ends behind the i-th tensor of `order`.
  for (int64_t cuts = 0; cuts < int64_t{1} << (count - 1); ++cuts) {
    double finish_ns = 0;
    std::vector<int32_t> bucket;
    for (int32_t i = 0; i < count; ++i) {
      bucket.push_back(order[i]);
      if (i + 1 < count && (cuts >> i & 1) == 0) {
        continue;
      }
      // Packed where the tensors are not neighbours in the buffer.
      std::sort(bucket.begin(), bucket.end());
      const bool packed = bucket.back() - bucket.front() + 1 != static_cast<int32_t>(bucket.size());
      int64_t size_bytes = 0;
      double ready_ns = 0;
      for (const int32_t tensor : bucket) {
        size_bytes += profile.tensors[tensor].bytes;
        ready_ns = std::max(ready_ns, profile.tensors[tensor].ready_ns);
      }
      finish_ns = std::max(finish_ns, ready_ns) +
                  grid_cost_ns(link.all_reduce.pieces, size_bytes, packed ? link.pack_ns_per_byte : 0);
      bucket.clear();
    }
    best_finish_ns = std::min(best_finish_ns, finish_ns);
  }
  return std::max(profile.backward_ns, best_finish_ns) + profile.forward_ns + updates_ns;
}

}  // namespace gradcast
