#include "planner/forecast.h"

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "cost/pieces.h"
#include "gradcast/error.h"
#include "planner/window_chains.h"
#include "planner/zigzag.h"
#include "policies/published.h"

namespace gradcast {
namespace {

// The value of an exact plan may be above T* by this much: far below what anybody can measure, and enough that a block
// is not spent on rounding.
constexpr double kExactTolerance = 1e-7;
// Allowed loss of an exact plan by cuts at whole elements.
constexpr double kElementTolerance = 8e-7;

// Where parts and blocks cost more than the network's time: what the plans of fewer blocks, of which one may be faster,
// may lose on the network.
constexpr double kFewerBlocksTolerances[] = {0.02, 0.05, 0.1, 0.2, 0.4};

// The fewest blocks within the tolerance of `optimum_ns`, and with that many the best plan. REQUIRES: a linear cost.
std::vector<TimeSlot> fewest_slots(const Chain& chain, double optimum_ns, double block_tolerance) {
  const double allowed_ns = optimum_ns * (1 + std::max(block_tolerance, kExactTolerance));
  const auto fewest = zigzag(chain, allowed_ns, std::numeric_limits<int32_t>::max());
  GC_CHECK(fewest.has_value());
  const auto block_count = static_cast<int32_t>(fewest->size());
  const Bracket best = bisect(optimum_ns * (1 - kExactTolerance), allowed_ns, [&](double iteration_ns) {
    return zigzag(chain, iteration_ns, block_count).has_value();
  });
  return *zigzag(chain, best.accepted, block_count);
}

// The best plan of a problem that has_exact_plan(); nothing if whole elements are so coarse that it is not one.
Candidate exact_plan(const Problem& problem, double block_tolerance) {
  const Order order = candidate_orders(problem)[0];
  const Chain chain = enlarged_chain(problem, order, problem.link.all_reduce);
  const double optimum_ns = optimum(chain).reached_ns;
  Fastest fastest(problem);
  fastest.consider(blocks_of(problem, order, fewest_slots(chain, optimum_ns, block_tolerance)));
  const double allowed_ns = optimum_ns * (1 + std::max(block_tolerance, kExactTolerance) + kElementTolerance);
  if (fastest.iteration_ns() > allowed_ns) {
    return {};
  }
  // dear is the one policy with other operations than all-reduce, so the one that can be faster.
  const double compute_ns = problem.backward_ns + problem.forward_ns;
  if (fastest.iteration_ns() > compute_ns && problem.mode == Mode::kOverlap && problem.link.can_scatter_gather()) {
    fastest.consider(dear(problem, {}));
  }
  return fastest.best();
}

// Positions [first, last) in ready order.
struct Bucket {
  size_t first;
  size_t last;
};

// Buckets of whole tensors in time order that all end by `end_ns`; none if that cannot be. Filled from the last one
// backwards, each with as many tensors of one buffer as fit between the moment its latest tensor is ready and the start
// of the bucket after it.
std::vector<Bucket> fill(const Problem& problem, const std::vector<int32_t>& order, double end_ns) {
  std::vector<Bucket> buckets;
  size_t last = order.size();
  while (last > 0) {
    const double ready_ns = problem.ready_ns[order[last - 1]];
    const int32_t buffer = problem.buffer[order[last - 1]];
    size_t first = last;
    int64_t size_bytes = 0;
    double cost_ns = 0;
    while (first > 0 && problem.buffer[order[first - 1]] == buffer) {
      const int64_t grown_bytes = size_bytes + problem.bytes[order[first - 1]];
      const double grown_ns = problem.link.all_reduce.cost_ns(grown_bytes);
      if (ready_ns + grown_ns > end_ns) {
        break;
      }
      size_bytes = grown_bytes;
      cost_ns = grown_ns;
      --first;
    }
    if (first == last) {
      return {};
    }
    buckets.push_back({first, last});
    end_ns -= cost_ns;
    last = first;
  }
  std::reverse(buckets.begin(), buckets.end());
  return buckets;
}

// The best plan of whole tensors in ready order where the cost is linear, there is one buffer and packing is free, by
// the same exchange as zigzag. Elsewhere a good one, or no blocks at all where filling from the end fails.
std::vector<Block> whole_tensor_blocks(const Problem& problem) {
  const std::vector<int32_t> order = by_ready(problem);
  // A bucket per tensor, one after another, ends here at the latest.
  double high_ns = problem.backward_ns;
  for (const int32_t tensor : order) {
    high_ns += problem.link.all_reduce.cost_ns(problem.bytes[tensor]);
  }
  const Bracket end_ns = bisect(0, high_ns, [&](double ns) { return !fill(problem, order, ns).empty(); });
  std::vector<Block> blocks;
  for (const Bucket& bucket : fill(problem, order, end_ns.accepted)) {
    std::vector<Piece> pieces;
    for (size_t at = bucket.first; at < bucket.last; ++at) {
      pieces.push_back({order[at], 0, problem.bytes[order[at]]});
    }
    const std::string reason = "whole tensors in ready order: " + std::to_string(pieces.size());
    blocks.push_back(joint_blocks(problem, pieces, reason).front());
  }
  return blocks;
}

// The plans that DDP's buckets can express: whole tensors in the order of readiness.
Candidate whole_tensor_plan(const Problem& problem) {
  Fastest fastest(problem);
  fastest.consider(whole_tensor_blocks(problem));
  // Only where the cost bends, buffers mix or packing costs can these be faster.
  fastest.consider(ddp(problem, {}));
  fastest.consider(mgwfbp(problem, {}));
  fastest.consider(fifo(problem, {}));
  return fastest.best();
}

Candidate plan_for(const Problem& problem, const ForecastOptions& options, double effort) {
  if (options.whole_tensors) {
    return whole_tensor_plan(problem);
  }
  if (has_exact_plan(problem)) {
    Candidate exact = exact_plan(problem, options.block_tolerance);
    if (!exact.blocks.empty()) {
      return exact;
    }
  }
  return general_plan(problem, effort, options.block_tolerance);
}

// A plan per corner of the range of costs; the one whose worst ratio to the corners' own plans is smallest.
Candidate robust_plan(const Problem& problem, const ForecastOptions& options) {
  std::vector<Problem> corners;
  std::vector<Candidate> plans;
  const double factors[] = {1, 1 - options.uncertainty, 1 + options.uncertainty};
  for (const double alpha_factor : factors) {
    for (const double beta_factor : factors) {
      corners.push_back(problem);
      corners.back().link = scaled(problem.link, alpha_factor, beta_factor);
      plans.push_back(plan_for(corners.back(), options, options.effort / 9));
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

Candidate network_plan(const Problem& problem, const ForecastOptions& options) {
  return options.uncertainty > 0 ? robust_plan(problem, options) : plan_for(problem, options, options.effort);
}

}  // namespace

std::vector<Block> forecast(const Problem& problem, const ForecastOptions& options) {
  if (options.whole_tensors && problem.mode != Mode::kHook) {
    throw Error(ErrorCode::kInvalidOption,
                "whole_tensors is for hook mode: in overlap mode nothing limits blocks to whole tensors");
  }
  const Problem network = without_host(problem);
  Fastest fastest(problem);
  fastest.consider(network_plan(network, options).blocks);
  for (const double tolerance : kFewerBlocksTolerances) {
    if (!problem.has_part_costs() || tolerance <= options.block_tolerance) continue;
    ForecastOptions fewer = options;
    fewer.block_tolerance = tolerance;
    fewer.effort /= static_cast<double>(std::size(kFewerBlocksTolerances));
    fastest.consider(network_plan(network, fewer).blocks);
  }
  return fastest.best().blocks;
}

}  // namespace gradcast
