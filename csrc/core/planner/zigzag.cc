#include "planner/zigzag.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "gradcast/error.h"

namespace gradcast {
namespace {

// Deadlines are sums of a dozen doubles; a plan that meets them up to this share of T is one that meets them.
constexpr double kRounding = 1e-12;
constexpr int32_t kNone = -1;

// An interval [ready of `left`, deadline of `right`] and the move that made it.
struct Node {
  int32_t left;
  int32_t right;
  double bytes;  // that fit inside
  int32_t next;  // first tensor not wholly inside
  int32_t parent;
  Side side;
};

class Search {
 public:
  Search(const Chain& chain, double iteration_ns)
      : chain_(chain), slack_ns_(iteration_ns * (1 + kRounding) - chain.forward_ns) {}

  // The node with all bytes inside, after the fewest moves; kNone if there is none with at most `block_count_max`
  // blocks.
  int32_t run(int32_t block_count_max) {
    const double first_bytes = divisible_capacity_bytes(chain_.cost, deadline_ns(0) - chain_.ready_ns[0]);
    if (first_bytes <= 0 || block_count_max < 1) {
      return kNone;
    }
    std::vector<int32_t> front = {add(0, 0, first_bytes, 0, kNone, Side::kCentre)};
    for (int32_t block_count = 1;; ++block_count) {
      const int32_t done = fullest_done(front);
      if (done != kNone || block_count == block_count_max) {
        return done;
      }
      front = advance(front);
      if (front.empty()) {
        return kNone;
      }
    }
  }

  std::vector<TimeSlot> slots(int32_t last) const {
    std::vector<TimeSlot> backward;
    std::vector<TimeSlot> forward;
    for (int32_t at = last; at != kNone; at = nodes_[at].parent) {
      const TimeSlot slot = slot_of(at);
      (slot.side == Side::kBackward ? backward : forward).push_back(slot);
    }
    // The walk goes from the outermost slot inwards: time order for backward, the reverse for centre and forward.
    backward.insert(backward.end(), forward.rbegin(), forward.rend());
    return backward;
  }

 private:
  double deadline_ns(int32_t tensor) const { return slack_ns_ + chain_.need_ns[tensor]; }
  double total_bytes() const { return chain_.end_bytes.back(); }

  int32_t add(int32_t left, int32_t right, double bytes, int32_t next_from, int32_t parent, Side side) {
    const auto begin = chain_.end_bytes.begin();
    const auto next = std::upper_bound(begin + next_from, chain_.end_bytes.end(), bytes);
    nodes_.push_back({left, right, bytes, static_cast<int32_t>(next - begin), parent, side});
    return static_cast<int32_t>(nodes_.size()) - 1;
  }

  int32_t fullest_done(const std::vector<int32_t>& front) const {
    int32_t best = kNone;
    for (const int32_t at : front) {
      if (nodes_[at].next == chain_.tensor_count() && (best == kNone || nodes_[at].bytes > nodes_[best].bytes)) {
        best = at;
      }
    }
    return best;
  }

  // Both moves from every interval, less those that another interval of as many blocks contains: the larger one holds
  // more and reaches further, so nothing is lost.
  std::vector<int32_t> advance(const std::vector<int32_t>& front) {
    std::vector<int32_t> next;
    for (const int32_t at : front) {
      const Node node = nodes_[at];
      const int32_t k = node.next;
      const double left_bytes = divisible_capacity_bytes(chain_.cost, chain_.ready_ns[node.left] - chain_.ready_ns[k]);
      const double right_bytes = divisible_capacity_bytes(chain_.cost, chain_.need_ns[k] - chain_.need_ns[node.right]);
      if (left_bytes > 0) {
        next.push_back(add(k, node.right, node.bytes + left_bytes, k, at, Side::kBackward));
      }
      if (right_bytes > 0) {
        next.push_back(add(node.left, k, node.bytes + right_bytes, k, at, Side::kForward));
      }
    }
    std::sort(next.begin(), next.end(), [&](int32_t a, int32_t b) {
      return nodes_[a].left != nodes_[b].left ? nodes_[a].left > nodes_[b].left : nodes_[a].right > nodes_[b].right;
    });
    std::vector<int32_t> kept;
    for (const int32_t at : next) {
      if (kept.empty() || nodes_[at].right > nodes_[kept.back()].right) {
        kept.push_back(at);
      }
    }
    return kept;
  }

  TimeSlot slot_of(int32_t at) const {
    const Node& node = nodes_[at];
    const double lo_bytes = node.parent == kNone ? 0 : nodes_[node.parent].bytes;
    const double hi_bytes = std::min(node.bytes, total_bytes());
    switch (node.side) {
      case Side::kBackward: {
        const double end_ns = chain_.ready_ns[nodes_[node.parent].left];
        return {node.side, node.left, chain_.ready_ns[node.left], end_ns, lo_bytes, hi_bytes};
      }
      case Side::kForward: {
        const double start_ns = deadline_ns(nodes_[node.parent].right);
        return {node.side, node.right, start_ns, deadline_ns(node.right), lo_bytes, hi_bytes};
      }
      case Side::kCentre:
        break;
    }
    return {node.side, 0, chain_.ready_ns[0], deadline_ns(0), lo_bytes, hi_bytes};
  }

  const Chain& chain_;
  double slack_ns_;
  std::vector<Node> nodes_;
};

}  // namespace

double divisible_capacity_bytes(const OpCost& cost, double duration_ns) {
  double best_bytes = 0;
  double from_bytes = 0;
  for (const LinkPiece& piece : cost.pieces) {
    const double room_ns = duration_ns - piece.alpha_ns;
    const auto up_to_bytes = static_cast<double>(piece.up_to_bytes);
    double bytes = 0;
    if (room_ns >= 0) {  // 0 as well: where bytes cost nothing, no time is enough
      bytes = piece.beta_ns_per_byte > 0 ? std::min(room_ns / piece.beta_ns_per_byte, up_to_bytes) : up_to_bytes;
    }
    if (bytes > from_bytes) {
      best_bytes = bytes;
    }
    from_bytes = up_to_bytes;
  }
  return best_bytes;
}

double plain_bound_ns(const Chain& chain) {
  const double alpha_ns = chain.cost.alpha_ns_min();
  const double beta_ns_per_byte = chain.cost.beta_ns_per_byte_min();
  double bound_ns = chain.backward_ns + chain.forward_ns;
  for (int32_t i = 0; i < chain.tensor_count(); ++i) {
    const double tail_ns = chain.forward_ns - chain.need_ns[i];
    bound_ns = std::max(bound_ns, chain.ready_ns[i] + alpha_ns + beta_ns_per_byte * chain.end_bytes[i] + tail_ns);
  }
  return bound_ns;
}

std::optional<std::vector<TimeSlot>> zigzag(const Chain& chain, double iteration_ns, int32_t block_count_max) {
  GC_CHECK(chain.tensor_count() > 0);
  Search search(chain, iteration_ns);
  const int32_t done = search.run(block_count_max);
  if (done == kNone) {
    return std::nullopt;
  }
  return search.slots(done);
}

bool reachable(const Chain& chain, double iteration_ns) {
  return Search(chain, iteration_ns).run(std::numeric_limits<int32_t>::max()) != kNone;
}

ChainOptimum optimum(const Chain& chain) {
  const double low_ns = plain_bound_ns(chain);
  if (reachable(chain, low_ns)) {
    return {low_ns, low_ns};
  }
  // One block of everything, after the last gradient, always works.
  const double tail_ns = chain.forward_ns - chain.need_ns[0];
  const LinkPiece& whole = chain.cost.piece(static_cast<int64_t>(std::ceil(chain.end_bytes.back())));
  const double one_block_ns = whole.alpha_ns + whole.beta_ns_per_byte * chain.end_bytes.back();
  const double high_ns = std::max(chain.backward_ns + chain.forward_ns, chain.ready_ns[0] + one_block_ns + tail_ns);
  const Bracket bracket = bisect(low_ns, high_ns, [&](double iteration_ns) { return reachable(chain, iteration_ns); });
  return {bracket.refused, bracket.accepted};
}

}  // namespace gradcast
