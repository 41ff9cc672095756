// Explains a run in which nothing can happen any more. One operation is explained once, however many ranks wait in it.
#include "tests/sim/simulator/report.h"

#include <algorithm>
#include <map>

#include "gradcast/error.h"
#include "gradcast/text.h"

namespace gradcast::sim {
namespace {

// A report is for people: with thousands of ranks, a few names and a count say as much as all.
constexpr size_t kNamedRanksMax = 8;

// The ranks that have not done their part of one operation.
struct Missing {
  std::vector<int32_t> ranks;  // the first few
  int32_t count = 0;
  std::string text;
};

Missing missing_at(int64_t operation, const std::vector<Rank>& ranks, const Network& network) {
  Missing missing;
  const int32_t failed_by_rank = network.at(operation).failed_by_rank;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const auto index = static_cast<int32_t>(i);
    if (index != failed_by_rank && ranks[i].launched_count() > operation) {
      continue;
    }
    if (missing.ranks.size() < kNamedRanksMax) {
      missing.ranks.push_back(index);
      missing.text += (missing.count == 0 ? "rank " : ", rank ") + std::to_string(index);
      missing.text += ranks[i].has_left ? ", which has left" : "";
    }
    ++missing.count;
  }
  const auto unnamed_count = static_cast<size_t>(missing.count) - missing.ranks.size();
  missing.text += unnamed_count == 0 ? "" : " and " + std::to_string(unnamed_count) + " more";
  return missing;
}

class Reporter {
 public:
  Reporter(const std::vector<Rank>& ranks, const Network& network, const PlanSchedule& schedule)
      : ranks_(ranks), network_(network), schedule_(schedule) {}

  SimStandstill report(int32_t index) {
    const Rank& rank = ranks_[index];
    const FollowedPlan& plan = *schedule_.all()[rank.plan].followed;
    SimStandstill still;
    still.rank = index;
    still.iteration = rank.iteration;
    still.block = rank.checker.oldest_unfinished();
    still.text = "rank " + std::to_string(index) + ", iteration " + std::to_string(rank.iteration) + ": " +
                 block_text(plan, still.block);
    if (still.block >= rank.checker.launched_count()) {
      name_gradient(rank, plan, still);
      return still;
    }
    const Missing& missing = missing_in(rank.first_operation + still.block);
    still.wait = missing.count > 0 ? SimStandstill::Wait::kRanks : SimStandstill::Wait::kCompletion;
    still.missing_ranks = missing.ranks;
    still.missing_count = missing.count;
    still.text += missing.count > 0 ? " waits for " + missing.text : " has ended, and this rank was not told";
    return still;
  }

 private:
  static void name_gradient(const Rank& rank, const FollowedPlan& plan, SimStandstill& still) {
    const std::vector<int32_t>& tensors = plan.block_tensors[still.block];
    const auto missing = std::ranges::find_if(tensors, [&](int32_t tensor) { return !rank.checker.is_ready(tensor); });
    GC_CHECK(missing != tensors.end());  // or the follower did not start what it could
    still.wait = SimStandstill::Wait::kGradient;
    still.tensor = *missing;
    still.text += " waits for the gradient of " + plan.tensor_names[*missing];
  }

  // Thousands of ranks wait for few operations.
  const Missing& missing_in(int64_t operation) {
    const auto found = known_.find(operation);
    return found != known_.end() ? found->second
                                 : known_.emplace(operation, missing_at(operation, ranks_, network_)).first->second;
  }

  const std::vector<Rank>& ranks_;
  const Network& network_;
  const PlanSchedule& schedule_;
  std::map<int64_t, Missing> known_;
};

}  // namespace

std::string block_text(const FollowedPlan& plan, int32_t block) {
  const std::vector<int32_t>& tensors = plan.block_tensors[block];
  std::string names = plan.tensor_names[tensors.front()];
  names += tensors.size() == 1 ? "" : " … " + plan.tensor_names[tensors.back()];
  const Op op = plan.plan.blocks[block].op;
  return "block " + std::to_string(block + 1) + " of " + std::to_string(plan.block_count()) + " (" +
         (op == Op::kAllReduce ? "" : std::string(to_string(op)) + " of ") + names + ", " +
         bytes_text(plan.plan.blocks[block].size_bytes()) + ")";
}

std::vector<SimStandstill> standstills(const std::vector<Rank>& ranks, const Network& network,
                                       const PlanSchedule& schedule) {
  Reporter reporter(ranks, network, schedule);
  std::vector<SimStandstill> found;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (!ranks[i].has_finished && !ranks[i].has_left) {
      found.push_back(reporter.report(static_cast<int32_t>(i)));
    }
  }
  return found;
}

}  // namespace gradcast::sim
