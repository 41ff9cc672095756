#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "cost/pieces.h"
#include "gradcast/error.h"
#include "planner/search.h"
#include "planner/zigzag.h"

namespace gradcast {
namespace {

constexpr int32_t kNone = -1;
// Time already spent counts less than lateness: a state far ahead in time has also sent more. The value is that of the
// experiments in docs/internals/planner.md.
constexpr double kTimeWeight = 0.3;

// A few tensors rarely want more blocks than this, and a wrong turn must end somewhere.
constexpr int32_t kBlocksMax = 40;

using Left = std::array<int64_t, kBeamTensorsMax>;

struct State {
  double time_ns = 0;  // the link is free from here
  Left left_bytes{};
  double score = 0;
  int32_t parent = kNone;
  Block block;  // that led here
};

class Beam {
 public:
  // Stops, without a plan, when `extensions_left` is used up.
  Beam(const Problem& problem, double iteration_ns, int32_t width, int64_t& extensions_left)
      : problem_(problem),
        extensions_left_(extensions_left),
        iteration_ns_(iteration_ns),
        width_(width),
        alpha_ns_(problem.link.all_reduce.alpha_ns_min()),
        beta_ns_per_byte_(problem.link.all_reduce.beta_ns_per_byte_min()) {}

  std::vector<Block> run() {
    State start;
    std::copy(problem_.bytes.begin(), problem_.bytes.end(), start.left_bytes.begin());
    states_.push_back(start);
    std::vector<int32_t> front = {0};
    for (int32_t depth = 0; depth < kBlocksMax && !front.empty() && extensions_left_ > 0; ++depth) {
      found_.clear();
      for (const int32_t at : front) {
        if (expand(at)) {
          return blocks_to(found_.back(), at);
        }
      }
      front = keep_best();
    }
    return {};
  }

 private:
  double deadline_ns(int32_t tensor) const { return problem_.deadline_ns(tensor, iteration_ns_); }

  // Adds all successors of a state to found_. True if the last one added has everything sent.
  bool expand(int32_t at) {
    const State state = states_[at];
    for (int32_t buffer = 0; buffer < problem_.buffer_count(); ++buffer) {
      for (const double now_ns : starts_ns(state, buffer)) {
        for (const int32_t first : first_tensors(state, buffer, now_ns)) {
          const Choice choice{buffer, first, now_ns};
          for (const int64_t size_bytes : sizes_bytes(state, choice)) {
            if (send(state, at, choice, size_bytes)) {
              return true;
            }
          }
        }
      }
    }
    return false;
  }

  template <typename Use>
  void for_each_left(const State& state, Use use) const {
    for (int32_t i = 0; i < problem_.tensor_count(); ++i) {
      if (state.left_bytes[i] > 0) {
        use(i);
      }
    }
  }

  // A block's content: the most urgent bytes of `buffer` that are ready at now_ns, from tensor `first` on.
  struct Choice {
    int32_t buffer;
    int32_t first;
    double now_ns;
  };

  bool offers(const Choice& choice, int32_t tensor) const {
    return tensor >= choice.first && problem_.buffer[tensor] == choice.buffer &&
           problem_.ready_ns[tensor] <= choice.now_ns;
  }

  // The most urgent first is best, unless packing separate ranges costs a copy: then any tensor may begin a block.
  std::vector<int32_t> first_tensors(const State& state, int32_t buffer, double now_ns) const {
    std::vector<int32_t> firsts = {0};
    if (problem_.link.pack_ns_per_byte > 0) {
      for_each_left(state, [&](int32_t i) {
        if (i > 0 && offers({buffer, 0, now_ns}, i)) {
          firsts.push_back(i);
        }
      });
    }
    return firsts;
  }

  // Now, or when another tensor of the buffer joins.
  std::vector<double> starts_ns(const State& state, int32_t buffer) const {
    std::vector<double> starts;
    for_each_left(state, [&](int32_t i) {
      if (problem_.buffer[i] == buffer) {
        starts.push_back(std::max(state.time_ns, problem_.ready_ns[i]));
      }
    });
    return distinct(std::move(starts));
  }

  // Sizes that end a tensor, or make the block end when a tensor becomes ready or must have arrived, or fill a piece of
  // the cost.
  std::vector<int64_t> sizes_bytes(const State& state, const Choice& choice) const {
    std::vector<int64_t> sizes;
    int64_t available_bytes = 0;
    for_each_left(state, [&](int32_t i) {
      if (offers(choice, i)) {
        available_bytes += state.left_bytes[i];
        sizes.push_back(available_bytes);
      }
    });
    const auto end_at = [&](double end_ns) {
      sizes.push_back(
          static_cast<int64_t>(std::min(divisible_capacity_bytes(problem_.link.all_reduce, end_ns - choice.now_ns),
                                        static_cast<double>(available_bytes))));
    };
    for_each_left(state, [&](int32_t i) {
      end_at(problem_.ready_ns[i]);
      end_at(deadline_ns(i));
    });
    for (const LinkPiece& piece : problem_.link.all_reduce.pieces) {
      sizes.push_back(std::min(piece.up_to_bytes, available_bytes));
    }
    const int64_t element_bytes = problem_.buffers[choice.buffer].element_bytes;
    for (int64_t& size : sizes) {
      size = size / element_bytes * element_bytes;
    }
    std::erase_if(sizes, [](int64_t size) { return size <= 0; });
    return distinct(std::move(sizes));
  }

  bool send(const State& from, int32_t parent, const Choice& choice, int64_t size_bytes) {
    --extensions_left_;
    State state;
    state.left_bytes = from.left_bytes;
    state.parent = parent;
    state.block.buffer = choice.buffer;
    double start_ns = from.time_ns;
    int64_t room_bytes = size_bytes;
    for (int32_t i = 0; i < problem_.tensor_count() && room_bytes > 0; ++i) {
      if (state.left_bytes[i] == 0 || !offers(choice, i)) {
        continue;
      }
      const int64_t take_bytes = std::min(room_bytes, state.left_bytes[i]);
      const int64_t lo_bytes = problem_.offset_bytes[i] + problem_.bytes[i] - state.left_bytes[i];
      state.block.ranges.push_back({lo_bytes, lo_bytes + take_bytes});
      state.left_bytes[i] -= take_bytes;
      room_bytes -= take_bytes;
      start_ns = std::max(start_ns, problem_.ready_ns[i]);
    }
    state.block.ranges = joined(std::move(state.block.ranges));
    state.time_ns = start_ns + block_cost(problem_.link, state.block).total_ns();
    for (int32_t i = 0; i < problem_.tensor_count(); ++i) {
      if (state.left_bytes[i] < from.left_bytes[i] && state.time_ns > deadline_ns(i)) {
        return false;
      }
    }
    double left_bytes = 0;
    for_each_left(state, [&](int32_t i) { left_bytes += static_cast<double>(state.left_bytes[i]); });
    if (left_bytes > 0) {
      const double lateness_ns = lateness_of_rest_ns(state);
      if (lateness_ns > 0) {
        return false;
      }
      state.score = lateness_ns + kTimeWeight * (state.time_ns + beta_ns_per_byte_ * left_bytes);
    }
    found_.push_back(std::move(state));
    return left_bytes == 0;
  }

  // Lateness of the remaining bytes with free preemption and one alpha: positive means that no plan
  // from here meets every deadline.
  double lateness_of_rest_ns(const State& state) const {
    Left left_bytes = state.left_bytes;
    double clock_ns = state.time_ns;
    double lateness_ns = -kTimeMaxNs;
    while (true) {
      int32_t urgent = kNone;
      double next_ready_ns = kTimeMaxNs * 2;
      for (int32_t i = 0; i < problem_.tensor_count(); ++i) {
        if (left_bytes[i] == 0) {
          continue;
        }
        if (problem_.ready_ns[i] > clock_ns) {
          next_ready_ns = std::min(next_ready_ns, problem_.ready_ns[i]);
        } else if (urgent == kNone) {
          urgent = i;
        }
      }
      if (urgent == kNone && next_ready_ns > kTimeMaxNs) {
        return lateness_ns;
      }
      if (urgent == kNone) {
        clock_ns = next_ready_ns;
        continue;
      }
      const double rest_ns = beta_ns_per_byte_ * static_cast<double>(left_bytes[urgent]);
      if (clock_ns + rest_ns > next_ready_ns && beta_ns_per_byte_ > 0) {
        // Rounded up, so that the bound stays one and the loop ends.
        const auto sent_bytes = static_cast<int64_t>(std::ceil((next_ready_ns - clock_ns) / beta_ns_per_byte_));
        left_bytes[urgent] = std::max<int64_t>(left_bytes[urgent] - sent_bytes, 0);
        clock_ns = next_ready_ns;
        continue;
      }
      clock_ns += rest_ns;
      left_bytes[urgent] = 0;
      lateness_ns = std::max(lateness_ns, clock_ns + alpha_ns_ - deadline_ns(urgent));
    }
  }

  std::vector<int32_t> keep_best() {
    std::stable_sort(found_.begin(), found_.end(), [](const State& a, const State& b) { return a.score < b.score; });
    std::vector<int32_t> front;
    for (State& state : found_) {
      const bool seen = std::any_of(front.begin(), front.end(), [&](int32_t at) {
        return states_[at].left_bytes == state.left_bytes && states_[at].time_ns <= state.time_ns;
      });
      if (seen) {
        continue;
      }
      front.push_back(static_cast<int32_t>(states_.size()));
      states_.push_back(std::move(state));
      if (static_cast<int32_t>(front.size()) == width_) {
        break;
      }
    }
    return front;
  }

  std::vector<Block> blocks_to(const State& last, int32_t parent) const {
    std::vector<Block> blocks = {last.block};
    for (int32_t at = parent; states_[at].parent != kNone; at = states_[at].parent) {
      blocks.push_back(states_[at].block);
    }
    std::reverse(blocks.begin(), blocks.end());
    return blocks;
  }

  const Problem& problem_;
  int64_t& extensions_left_;
  double iteration_ns_;
  int32_t width_;
  double alpha_ns_;
  double beta_ns_per_byte_;
  std::vector<State> states_;
  std::vector<State> found_;
};

}  // namespace

std::vector<Block> beam_search(const Problem& problem, const BeamOptions& options) {
  GC_CHECK(problem.tensor_count() <= kBeamTensorsMax && problem.in_flight == 1);
  constexpr int kBisections = 10;
  constexpr double kCloseEnough = 1.0005;
  std::vector<Block> best;
  double low_ns = options.bound_ns;
  double high_ns = options.best_ns;
  int64_t extensions_left = options.extensions_max;
  for (int i = 0; i < kBisections && high_ns > low_ns * kCloseEnough && extensions_left > 0; ++i) {
    const double middle_ns = low_ns + (high_ns - low_ns) / 2;
    std::vector<Block> blocks = Beam(problem, middle_ns, options.width, extensions_left).run();
    if (blocks.empty()) {
      low_ns = middle_ns;
      continue;
    }
    for (Block& block : blocks) {
      block.reason = "found by search: most urgent bytes, sized to meet the deadlines that follow";
    }
    high_ns = std::min(middle_ns, iteration_ns(problem, blocks));
    best = std::move(blocks);
  }
  return best;
}

}  // namespace gradcast
