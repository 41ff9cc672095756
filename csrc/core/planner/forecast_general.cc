// The part of forecast where no proof applies.
#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "cost/pieces.h"
#include "planner/forecast.h"
#include "planner/search.h"
#include "planner/window_chains.h"
#include "planner/window_filler.h"
#include "planner/zigzag.h"
#include "policies/online.h"
#include "policies/published.h"

namespace gradcast {
namespace {

constexpr int32_t kNoLimit = std::numeric_limits<int32_t>::max();
// A plan this close to the bound needs no search.
constexpr double kGoodEnough = 1.0002;
// Partial plans that the beam keeps: wide enough that 10,000 seeds of up to five tensors stay within 5 % of exhaustive
// search.
constexpr double kBeamWidth = 64;

// Approximates a piecewise link, or several blocks in flight, by one line for zigzag.
struct Assumption {
  OpCost cost;
  double block_bytes_max;  // larger blocks are cut into pieces of this size
};

// The link's own cost; where it is not linear also its pieces, its supporting lines, and for each breakpoint the rate
// of blocks of just that size; with several blocks in flight also a part of alpha, since the rest hides behind the
// block before.
std::vector<Assumption> assumptions_of(const Problem& problem) {
  constexpr double kNoLimit = std::numeric_limits<double>::infinity();
  const OpCost& cost = problem.link.all_reduce;
  std::vector<Assumption> assumptions = {{cost, kNoLimit}};
  if (!cost.linear()) {
    for (const LinkPiece& piece : cost.pieces) {
      assumptions.push_back({linear_cost({piece.alpha_ns, piece.beta_ns_per_byte}), kNoLimit});
      if (piece.up_to_bytes < problem.total_bytes) {  // send_windows_of limits how many blocks that makes
        const auto size_bytes = static_cast<double>(piece.up_to_bytes);
        assumptions.push_back({linear_cost({0, cost.cost_ns(piece.up_to_bytes) / size_bytes}), size_bytes});
      }
    }
    for (const LinkLine& minorant : minorants(cost, problem.total_bytes)) {
      assumptions.push_back({linear_cost(minorant), kNoLimit});
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

// Send windows from which the search starts: zigzag's slots on enlarged windows, as the assumption has them.
std::vector<SendWindow> enlarged_send_windows(const Problem& problem, const Order& order,
                                              const Assumption& assumption) {
  Chain chain = enlarged_chain(problem, order, assumption.cost);
  if (problem.in_flight > 1) {
    // A block's bytes begin one alpha after its launch, while those before it are on the wire.
    for (double& ready_ns : chain.ready_ns) {
      ready_ns += assumption.cost.alpha_ns_min();
    }
  }
  const auto slots = zigzag(chain, optimum(chain).reached_ns, kNoLimit);
  return slots ? send_windows_of(*slots, assumption.block_bytes_max) : std::vector<SendWindow>{};
}

std::vector<Block> shrunk_blocks(const Problem& problem, const Order& order, const Assumption& assumption) {
  const Chain chain = shrunk_chain(problem, order, assumption.cost);
  const auto slots = zigzag(chain, optimum(chain).reached_ns, kNoLimit);
  return slots ? blocks_of(problem, order, *slots) : std::vector<Block>{};
}

// True if p3 cannot be faster than best_ns: its many start-ups alone, one after another, take longer. Cutting a large
// profile into hundreds of thousands of slices only to find that out would take longer than everything else.
bool p3_is_hopeless(const Problem& problem, double best_ns) {
  const double slices = slice_count(problem, P3Options{}.slice_elements);
  const OpCost& cost = problem.link.all_reduce;
  const double wire_ns = cost.beta_ns_per_byte_min() * static_cast<double>(problem.total_bytes);
  const double start_ups_ns = problem.in_flight == 1 ? slices * cost.alpha_ns_min() : 0;
  const double first_ns = *std::min_element(problem.ready_ns.begin(), problem.ready_ns.end());
  return slices > kBlockCountMax || first_ns + start_ups_ns + wire_ns > best_ns;
}

// Every other policy with its defaults, but for those that refuse a profile of terabytes: they would cut it too finely.
void consider_literature(const Problem& problem, Fastest& fastest) {
  fastest.consider(ddp(problem, {}));
  fastest.consider(mgwfbp(problem, {}));
  fastest.consider(fifo(problem, {}));
  fastest.consider(fsdp(problem, {}));
  if (unit_count(problem, ProphetOptions{}.partition_bytes) <= kBlockCountMax) {
    fastest.consider(bytescheduler(problem, {}));
    fastest.consider(prophet(problem, {}));
  }
  fastest.consider(dcredit(problem, {}));
  fastest.consider(usbyte(problem, {}));
  if (problem.mode == Mode::kOverlap && problem.link.can_scatter_gather()) {
    fastest.consider(dear(problem, {}));
  }
  if (!p3_is_hopeless(problem, fastest.iteration_ns())) {
    fastest.consider(p3(problem, {}));
  }
}

bool all_reduce_only(const std::vector<Block>& blocks) {
  return std::all_of(blocks.begin(), blocks.end(), [](const Block& block) { return block.op == Op::kAllReduce; });
}

// The starts with the lowest iteration times, at most `count` of them.
std::vector<std::vector<SendWindow>> most_promising(WindowFiller& filler, std::vector<std::vector<SendWindow>> starts,
                                                    size_t count) {
  std::vector<std::pair<double, size_t>> ranking;
  for (size_t i = 0; i < starts.size(); ++i) {
    ranking.emplace_back(filler.iteration_ns(starts[i]), i);
  }
  std::sort(ranking.begin(), ranking.end());
  ranking.resize(std::min(ranking.size(), count));
  std::vector<std::vector<SendWindow>> best;
  for (const auto& [time_ns, index] : ranking) {
    best.push_back(std::move(starts[index]));
  }
  return best;
}

// Few enough tensors for the beam.
bool is_small(const Problem& problem) {
  return problem.tensor_count() <= kBeamTensorsMax && problem.in_flight == 1;
}

// Improves the most promising starts, each by its share of the effort.
void search(const Problem& problem, WindowFiller& filler, double bound_ns, double effort,
            std::vector<std::vector<SendWindow>> starts, Fastest& fastest) {
  constexpr double kVisits = 4e5;  // of tensors and blocks, in all: about 40 ms
  // Few tensors are quick to try, and strongly bent costs have narrow optima.
  const double evaluations_max = is_small(problem) ? 2000 : 200;
  constexpr size_t kStarts = 3;
  for (auto& start : most_promising(filler, std::move(starts), kStarts)) {
    if (fastest.iteration_ns() <= bound_ns * kGoodEnough) {
      return;
    }
    const auto visits = static_cast<double>(problem.bytes.size() + start.size());
    const double evaluations = effort * std::min(evaluations_max, kVisits / kStarts / visits);
    const LocalSearchOptions options{static_cast<int64_t>(evaluations), bound_ns};
    fastest.consider(filler.blocks(local_search(problem, filler, std::move(start), options)));
  }
}

void beam(const Problem& problem, double bound_ns, double effort, Fastest& fastest) {
  if (!is_small(problem) || effort == 0 || fastest.iteration_ns() <= bound_ns * kGoodEnough) {
    return;
  }
  // The beam grows with the cube of the tensors: three loops over events, starts and what is left.
  const double size = std::max(1.0, static_cast<double>(problem.tensor_count()) / 5);
  BeamOptions options;
  options.width = static_cast<int32_t>(std::clamp(kBeamWidth * effort / (size * size * size), 1.0, 1000.0));
  options.extensions_max = static_cast<int64_t>(static_cast<double>(options.extensions_max) * effort);
  options.bound_ns = bound_ns;
  options.best_ns = fastest.iteration_ns();
  fastest.consider(beam_search(problem, options));
}

// Shares of what may be lost: a merge that costs much must not spend what many cheap ones would need.
constexpr double kShares[] = {0, 0.1, 0.25, 0.5, 1};

bool can_join(const Block& a, const Block& b) {
  return a.op == Op::kAllReduce && b.op == Op::kAllReduce && a.buffer == b.buffer;
}

Block joint(const Block& earlier, const Block& later) {
  Block block = later;  // it waits for what the later one waits for, so its reason holds
  block.ranges.insert(block.ranges.end(), earlier.ranges.begin(), earlier.ranges.end());
  block.ranges = joined(std::move(block.ranges));
  return block;
}

// The same bytes with neighbours of one buffer joined, as many as keep play's iteration time within `allowed_ns`: first
// those that cost nothing, then those that cost more. Not the fewest that there are. Only all-reduces are joined.
//
// Each block costs more than its model says, now and then: a thread that has to be woken, a packet that comes late. A
// plan that is nearly as fast with fewer blocks pays for that less often.
std::vector<Block> merged(const Problem& problem, std::vector<Block> blocks, double allowed_ns, int64_t evaluations) {
  const double best_ns = iteration_ns(problem, blocks);
  for (const double share : kShares) {
    const double limit_ns = best_ns + share * (allowed_ns - best_ns);
    for (size_t i = 0; i + 1 < blocks.size() && evaluations > 0;) {
      if (!can_join(blocks[i], blocks[i + 1])) {
        ++i;
        continue;
      }
      --evaluations;
      Block earlier = std::exchange(blocks[i], joint(blocks[i], blocks[i + 1]));
      Block later = std::move(blocks[i + 1]);
      const auto place = blocks.begin() + static_cast<std::ptrdiff_t>(i);
      blocks.erase(place + 1);
      if (iteration_ns(problem, blocks) > limit_ns) {
        *place = std::move(earlier);
        blocks.insert(place + 1, std::move(later));
        ++i;
      }
    }
  }
  return blocks;
}

Candidate with_fewer_blocks(const Problem& problem, const Candidate& best, double block_tolerance) {
  constexpr double kVisits = 4e6;  // of tensors and blocks, in all: below half a second
  if (block_tolerance == 0) {
    return best;
  }
  const auto visits = static_cast<double>(problem.bytes.size() + best.blocks.size());
  std::vector<Block> blocks =
      merged(problem, best.blocks, best.iteration_ns * (1 + block_tolerance), static_cast<int64_t>(kVisits / visits));
  const double blocks_ns = iteration_ns(problem, blocks);
  return {std::move(blocks), blocks_ns};
}

}  // namespace

Candidate general_plan(const Problem& problem, double effort, double block_tolerance) {
  Fastest fastest(problem);
  WindowFiller filler(problem);
  std::vector<std::vector<SendWindow>> starts;
  for (const Order& order : candidate_orders(problem)) {
    for (const Assumption& assumption : assumptions_of(problem)) {
      starts.push_back(enlarged_send_windows(problem, order, assumption));
      fastest.consider(filler.blocks(starts.back()));
      fastest.consider(shrunk_blocks(problem, order, assumption));
    }
  }
  if (effort > 0) {
    consider_literature(problem, fastest);
    if (all_reduce_only(fastest.best().blocks)) {
      starts.push_back(send_windows_of(problem, fastest.best().blocks));
    }
    const double bound_ns = bound(problem, false).best_ns;
    search(problem, filler, bound_ns, effort, std::move(starts), fastest);
    beam(problem, bound_ns, effort, fastest);
  }
  return with_fewer_blocks(problem, fastest.best(), block_tolerance);
}

}  // namespace gradcast
