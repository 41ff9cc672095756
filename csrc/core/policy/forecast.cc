#include "policy/forecast.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "gradcast/error.h"
#include "planner/beam.h"
#include "planner/local_search.h"
#include "planner/refill.h"
#include "planner/relaxation.h"
#include "planner/whole_tensors.h"
#include "planner/zigzag.h"
#include "policy/bytescheduler.h"
#include "policy/dcredit.h"
#include "policy/ddp.h"
#include "policy/dear.h"
#include "policy/fifo.h"
#include "policy/mgwfbp.h"
#include "policy/p3.h"
#include "policy/prophet.h"
#include "policy/usbyte.h"
#include "problem.h"

namespace gradcast {
namespace {

// The value of an exact plan may be above T* by this much: far below what anybody can measure, and enough that a block is not
// spent on rounding.
constexpr double kExactTolerance = 1e-7;
// What cutting at whole elements may cost an exact plan.
constexpr double kElementTolerance = 1e-6;
// Partial plans that the beam keeps: wide enough that 10,000 seeds of up to five tensors stay within 5 % of exhaustive search.
constexpr double kBeamWidth = 64;
// A plan this close to the bound needs no search.
constexpr double kGoodEnough = 1.0002;

struct Candidate {
  std::vector<Block> blocks;
  double iteration_ns = std::numeric_limits<double>::infinity();
};

// The fastest plan seen so far.
class Fastest {
 public:
  explicit Fastest(const Problem& problem) : problem_(problem) {}

  void consider(std::vector<Block> blocks) {
    GC_CHECK(!blocks.empty());
    const double candidate_ns = iteration_ns(problem_, blocks);
    if (candidate_ns < best_.iteration_ns) {
      best_ = {std::move(blocks), candidate_ns};
    }
  }
  const Candidate& best() const { return best_; }
  double iteration_ns_min() const { return best_.iteration_ns; }

 private:
  const Problem& problem_;
  Candidate best_;
};

std::vector<Slot> best_slots(const Chain& chain, double block_tolerance) {
  constexpr int32_t kNoLimit = std::numeric_limits<int32_t>::max();
  constexpr double kBisectionWidth = 1e-10;
  const ChainOptimum best = optimum(chain);
  const double allowed_ns = best.reached_ns * (1 + std::max(block_tolerance, kExactTolerance));
  std::vector<Slot> fewest = *zigzag(chain, allowed_ns, kNoLimit);
  // The best plan with that few blocks.
  const auto block_count = static_cast<int32_t>(fewest.size());
  double low_ns = best.bound_ns;
  double high_ns = allowed_ns;
  while (high_ns - low_ns > kBisectionWidth * high_ns) {
    const double middle_ns = low_ns + (high_ns - low_ns) / 2;
    if (auto slots = zigzag(chain, middle_ns, block_count)) {
      high_ns = middle_ns;
      fewest = std::move(*slots);
    } else {
      low_ns = middle_ns;
    }
  }
  return fewest;
}

// dear is the one policy with other operations than all-reduce, so the one that can be faster than an exact plan.
bool dear_may_win(const Problem& problem, double best_ns) {
  const bool available = problem.link.reduce_scatter.available() && problem.link.all_gather.available();
  return available && problem.mode == Mode::kOverlap && bound(problem, true).best_ns < best_ns * (1 - 1e-9);
}

// What zigzag is told about the link, where the truth is not one line and one block at a time.
struct Assumption {
  OpCost cost;
  double block_bytes_max;  // larger blocks are cut into pieces of this size
};

// The link's own cost; where it is not linear also its pieces, its supporting lines, and for each breakpoint the rate of
// blocks of just that size; with several blocks in flight also a part of alpha, since the rest hides behind the block before.
std::vector<Assumption> assumptions_of(const Problem& problem) {
  constexpr double kNoLimit = std::numeric_limits<double>::infinity();
  const auto line = [](double alpha_ns, double beta_ns_per_byte) {
    return OpCost{{{kUnboundedBytes, alpha_ns, beta_ns_per_byte}}};
  };
  const OpCost& cost = problem.link.all_reduce;
  std::vector<Assumption> assumptions = {{cost, kNoLimit}};
  if (!cost.linear()) {
    for (const LinkPiece& piece : cost.pieces) {
      assumptions.push_back({line(piece.alpha_ns, piece.beta_ns_per_byte), kNoLimit});
      if (piece.up_to_bytes < problem.total_bytes) {  // openings_of limits how many blocks that makes
        const auto size_bytes = static_cast<double>(piece.up_to_bytes);
        assumptions.push_back({line(0, cost.cost_ns(piece.up_to_bytes) / size_bytes), size_bytes});
      }
    }
    for (const LinkLine& minorant : minorants(cost, problem.total_bytes)) {
      assumptions.push_back({line(minorant.alpha_ns, minorant.beta_ns_per_byte), kNoLimit});
    }
  }
  if (problem.in_flight > 1) {
    for (const double waste : {0.5, 0.2, 0.05, 0.01, 0.001}) {
      OpCost part = cost;
      for (LinkPiece& piece : part.pieces) {
        piece.alpha_ns *= waste;
      }
      assumptions.push_back({part, kNoLimit});
    }
  }
  return assumptions;
}

// Openings from which the search starts: zigzag's slots on enlarged windows. Plans on shrunk windows are considered at once.
std::vector<std::vector<Opening>> zigzag_openings(const Problem& problem, Fastest& fastest) {
  std::vector<std::vector<Opening>> starts;
  for (const Order& order : candidate_orders(problem)) {
    for (const Assumption& assumption : assumptions_of(problem)) {
      Chain enlarged = enlarged_chain(problem, order, assumption.cost);
      if (problem.in_flight > 1) {
        for (double& ready_ns : enlarged.ready_ns) {
          ready_ns += assumption.cost.alpha_ns_min();
        }
      }
      const std::vector<Slot> slots = best_slots(enlarged, 0);
      starts.push_back(openings_of(slots, assumption.block_bytes_max));
      fastest.consider(blocks_of(problem, order, slots));
      const Chain shrunk = shrunk_chain(problem, order, assumption.cost);
      fastest.consider(blocks_of(problem, order, best_slots(shrunk, 0)));
    }
  }
  return starts;
}

// Every other policy with its defaults. Those that would cut the profile into more than a million blocks are left out: they
// refuse.
void consider_literature(const Problem& problem, Fastest& fastest) {
  const auto consider = [&](const std::function<std::vector<Block>()>& policy) {
    try {
      fastest.consider(policy());
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kInvalidOption) {
        throw;
      }
    }
  };
  consider([&] { return fifo(problem, {}); });
  consider([&] { return ddp(problem, {}); });
  consider([&] { return mgwfbp(problem, {}); });
  consider([&] { return p3(problem, {}); });
  consider([&] { return bytescheduler(problem, {}); });
  consider([&] { return prophet(problem, {}); });
  consider([&] { return dcredit(problem, {}); });
  consider([&] { return usbyte(problem, {}); });
  if (dear_may_win(problem, fastest.iteration_ns_min())) {
    consider([&] { return dear(problem, {}); });
  }
}

bool all_reduce_only(const std::vector<Block>& blocks) {
  return std::all_of(blocks.begin(), blocks.end(), [](const Block& block) { return block.op == Op::kAllReduce; });
}

// Improves the most promising starts, each by its share of the effort.
void search(const Problem& problem, double bound_ns, double effort, std::vector<std::vector<Opening>> starts,
            Fastest& fastest) {
  constexpr double kVisits = 4e5;  // of tensors and blocks, in all: about 40 ms
  constexpr double kEvaluationsMax = 200;
  constexpr size_t kStarts = 3;
  Refill refill(problem);
  std::stable_sort(starts.begin(), starts.end(),
                   [&](const auto& a, const auto& b) { return refill.iteration_ns(a) < refill.iteration_ns(b); });
  starts.resize(std::min(starts.size(), kStarts));
  for (auto& start : starts) {
    if (fastest.iteration_ns_min() <= bound_ns * kGoodEnough) {
      return;
    }
    const auto visits = static_cast<double>(problem.bytes.size() + start.size());
    const double evaluations = effort * std::min(kEvaluationsMax, kVisits / kStarts / visits);
    const LocalSearchOptions options{static_cast<int64_t>(evaluations), bound_ns};
    fastest.consider(refill.blocks(local_search(problem, refill, std::move(start), options)));
  }
}

// The beam grows with the cube of the tensors: three loops over events, starts and what is left.
int32_t beam_width(const Problem& problem, double effort) {
  const double size = std::max(1.0, static_cast<double>(problem.tensor_count()) / 5);
  return static_cast<int32_t>(std::clamp(kBeamWidth * effort / (size * size * size), 1.0, 1000.0));
}

Candidate general_plan(const Problem& problem, const ForecastOptions& options, double bound_ns) {
  Fastest fastest(problem);
  std::vector<std::vector<Opening>> starts = zigzag_openings(problem, fastest);
  consider_literature(problem, fastest);
  if (all_reduce_only(fastest.best().blocks)) {
    starts.push_back(openings_of(problem, fastest.best().blocks));
  }
  search(problem, bound_ns, options.effort, std::move(starts), fastest);
  const bool small = problem.tensor_count() <= kBeamTensorsMax && problem.in_flight == 1;
  if (small && options.effort > 0 && fastest.iteration_ns_min() > bound_ns * kGoodEnough) {
    BeamOptions beam;
    beam.width = beam_width(problem, options.effort);
    beam.extensions_max = static_cast<int64_t>(static_cast<double>(beam.extensions_max) * options.effort);
    beam.bound_ns = bound_ns;
    beam.best_ns = fastest.iteration_ns_min();
    std::vector<Block> found = beam_search(problem, beam);
    if (!found.empty()) {
      fastest.consider(std::move(found));
    }
  }
  return fastest.best();
}

Candidate exact_plan(const Problem& problem, double block_tolerance) {
  const Order order = candidate_orders(problem)[0];
  const Chain chain = enlarged_chain(problem, order, problem.link.all_reduce);
  Fastest fastest(problem);
  fastest.consider(blocks_of(problem, order, best_slots(chain, block_tolerance)));
  if (dear_may_win(problem, fastest.iteration_ns_min())) {
    fastest.consider(dear(problem, {}));
  }
  return fastest.best();
}

Candidate plan_for(const Problem& problem, const ForecastOptions& options) {
  if (options.whole_tensors) {
    Candidate whole{whole_tensor_blocks(problem), 0};
    whole.iteration_ns = iteration_ns(problem, whole.blocks);
    return whole;
  }
  const Bound proven = bound(problem, false);
  if (proven.exact) {
    Candidate exact = exact_plan(problem, options.block_tolerance);
    // Cuts fall on whole elements. That costs nothing measurable unless a profile has only a handful of them.
    if (exact.iteration_ns <= proven.best_ns * (1 + options.block_tolerance + kElementTolerance) ||
        !all_reduce_only(exact.blocks)) {
      return exact;
    }
  }
  return general_plan(problem, options, proven.best_ns);
}

// A plan per corner of the range of costs; the one whose worst ratio to the corners' own plans is smallest.
Candidate robust_plan(const Problem& problem, const ForecastOptions& options) {
  std::vector<Problem> corners;
  std::vector<Candidate> plans;
  const double u = options.uncertainty;
  for (const double alpha_factor : {1.0, 1 - u, 1 + u}) {
    for (const double beta_factor : {1.0, 1 - u, 1 + u}) {
      corners.push_back(problem);
      corners.back().link = scaled(problem.link, alpha_factor, beta_factor);
      plans.push_back(plan_for(corners.back(), options));
    }
  }
  const auto worst_ratio = [&](const Candidate& plan) {
    double ratio = 1;
    for (size_t corner = 0; corner < corners.size(); ++corner) {
      ratio = std::max(ratio, iteration_ns(corners[corner], plan.blocks) / plans[corner].iteration_ns);
    }
    return ratio;
  };
  std::vector<double> ratios;
  std::transform(plans.begin(), plans.end(), std::back_inserter(ratios), worst_ratio);
  return plans[std::min_element(ratios.begin(), ratios.end()) - ratios.begin()];
}

}  // namespace

std::vector<Block> forecast(const Problem& problem, const ForecastOptions& options) {
  if (options.whole_tensors && problem.mode != Mode::kHook) {
    throw Error(ErrorCode::kInvalidOption,
                "whole_tensors is for hook mode: in overlap mode nothing limits blocks to whole tensors");
  }
  return (options.uncertainty > 0 ? robust_plan(problem, options) : plan_for(problem, options)).blocks;
}

}  // namespace gradcast
