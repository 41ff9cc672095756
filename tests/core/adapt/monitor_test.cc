// Monitor: what persists is a change, what does not is none; the baseline is tried seldom, and taken where it is as
// fast.
#include "gradcast/monitor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <functional>
#include <random>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/refusals.h"

namespace gradcast {
namespace {

constexpr double kBusyNs = 100e6;
constexpr double kLinkNs = 60e6;
constexpr double kStepNs = 110e6;
constexpr int64_t kLate = 2;  // facts become known so many iterations after theirs
constexpr int64_t kChangesAt = 50;

// By how much the usual times are multiplied; step 0: the iteration was interrupted, and nothing is known of it.
struct Factors {
  double step = 1;
  double busy = 1;
  double link = 1;
};

struct Loop {
  int32_t rank_count = 3;
  double baseline_share = 1.3;  // a baseline iteration takes so many times as long
  MonitorOptions options{kBusyNs, kLinkNs};
  std::function<Factors(int64_t iteration, int32_t rank, bool on_baseline)> factors = [](auto...) { return Factors{}; };
};

struct Told {
  std::vector<bool> on_baseline;  // by iteration
  int64_t measure_at = -1;        // the iteration after which it was asked for, the first time
  int64_t aside_at = -1;
  Change change;
  Comparison comparison;
  int32_t slowest_rank = -1;

  int64_t baseline_count() const { return std::count(on_baseline.begin(), on_baseline.end(), true); }
  double ratio() const { return comparison.baseline_ns / comparison.plan_ns; }
};

// Plays iterations until a measurement is asked for.
Told run(const Loop& loop, int64_t iterations) {
  Monitor monitor(loop.rank_count, loop.options);
  Told told;
  bool on_baseline = loop.options.begins_on_baseline;
  for (int64_t i = 0; i < iterations && told.measure_at < 0; ++i) {
    told.on_baseline.push_back(on_baseline);
    const int64_t known = i - kLate;
    if (known < 0) {
      continue;
    }
    const bool was_on_baseline = told.on_baseline[known];
    std::vector<RankFacts> ranks;
    for (int32_t rank = 0; rank < loop.rank_count; ++rank) {
      const Factors by = loop.factors(known, rank, was_on_baseline);
      const double step_ns = by.step * kStepNs * (was_on_baseline ? loop.baseline_share : 1);
      ranks.push_back({step_ns, by.busy * kBusyNs, by.link * kLinkNs});
    }
    if (ranks[0].step_ns == 0) {
      ranks.clear();
    }
    const Decision decision = monitor.on_iteration(was_on_baseline, ranks);
    on_baseline = decision.on_baseline;
    told.aside_at = decision.stepped_aside ? i : told.aside_at;
    if (decision.change) {
      told.measure_at = i;
      told.change = *decision.change;
    }
  }
  told.comparison = monitor.comparison();
  told.slowest_rank = monitor.slowest_rank();
  return told;
}

TEST(Monitor, WhereNothingChangesTrialsCostLessThanOnePercent) {
  const Told told = run({.baseline_share = 1.5}, 4000);
  EXPECT_EQ(told.measure_at, -1);
  EXPECT_EQ(told.aside_at, -1);
  EXPECT_EQ(told.slowest_rank, -1);
  EXPECT_GT(told.baseline_count(), 4);
  EXPECT_LT(0.5 * static_cast<double>(told.baseline_count()) / 4000, 0.01);
  EXPECT_NEAR(told.ratio(), 1.5, 1e-9);
}

TEST(Monitor, StepsAsideWhereTheBaselineIsAsFast) {
  for (const double baseline_share : {0.9, 1.0}) {
    const Told told = run({.baseline_share = baseline_share}, 100);
    ASSERT_GT(told.aside_at, 0) << baseline_share;
    EXPECT_LT(told.aside_at, 60) << baseline_share;
    for (size_t i = told.aside_at + 1; i < told.on_baseline.size(); ++i) {
      EXPECT_TRUE(told.on_baseline[i]) << i;
    }
    EXPECT_GE(told.comparison.baseline_count, 12);
  }
}

TEST(Monitor, OneBadTrialIsNotEnough) {
  // The first four baseline iterations met a free machine.
  Loop loop{.baseline_share = 1.4};
  loop.factors = [count = 0](int64_t, int32_t rank, bool on_baseline) mutable {
    count += on_baseline && rank == 0 ? 1 : 0;
    return Factors{.step = on_baseline && count <= 4 ? 1 / 1.4 : 1};
  };
  EXPECT_EQ(run(loop, 300).aside_at, -1);
}

TEST(Monitor, WithoutABaselineNothingIsTriedAndItCanBeInForceFromTheStart) {
  for (const bool has_baseline : {false, true}) {
    const Told told = run({.baseline_share = 1, .options = {kBusyNs, kLinkNs, has_baseline, has_baseline}}, 500);
    EXPECT_EQ(told.baseline_count(), has_baseline ? 500 : 0);
    EXPECT_EQ(told.aside_at, -1);
    EXPECT_EQ(told.measure_at, -1);
  }
}

TEST(Monitor, AnInterruptedIterationIsLeftOut) {
  // Every third one is, as where several models take turns.
  for (const double baseline_share : {1.0, 1.3}) {
    Loop loop{.baseline_share = baseline_share};
    loop.factors = [](int64_t iteration, int32_t, bool) { return Factors{.step = iteration % 3 == 0 ? 0.0 : 1.0}; };
    const Told told = run(loop, 1500);
    EXPECT_EQ(told.measure_at, -1) << baseline_share;
    EXPECT_EQ(told.aside_at > 0, baseline_share == 1.0);
    EXPECT_GE(told.comparison.baseline_count, 3) << baseline_share;
    EXPECT_NEAR(told.ratio(), baseline_share, 1e-9);
  }
}

// From one iteration on the network is so many times as slow.
Loop with_network(double factor, int64_t changes_at = kChangesAt) {
  Loop loop;
  loop.factors = [=](int64_t iteration, auto...) { return Factors{.link = iteration >= changes_at ? factor : 1}; };
  return loop;
}

TEST(Monitor, ASlowerNetworkIsNoticed) {
  for (const double factor : {2.0, 0.5}) {
    const Told told = run(with_network(factor), 100);
    EXPECT_EQ(told.measure_at, kChangesAt + 5 + kLate) << factor;
    EXPECT_EQ(told.change.cause, Cause::kNetwork);
    EXPECT_DOUBLE_EQ(told.change.before_ns, kLinkNs);
    EXPECT_DOUBLE_EQ(told.change.after_ns, factor * kLinkNs);
  }
}

TEST(Monitor, HoldsStillWhereAskedTo) {
  Loop loop = with_network(2);
  loop.options.hold_iterations = 80;
  EXPECT_EQ(run(loop, 200).measure_at, 80 + kLate);
}

TEST(Monitor, AfterSteppingAsideAChangeIsStillNoticed) {
  Loop loop = with_network(3, 100);
  loop.baseline_share = 1;
  const Told told = run(loop, 200);
  EXPECT_GT(told.aside_at, 0);
  EXPECT_GT(told.measure_at, 100);
}

TEST(Monitor, ATrifleIsNoChange) {
  // The network takes three times as long, for what is 1 % of a step.
  const double trifle = 0.005 * kStepNs / kLinkNs;
  Loop loop{.options = {kBusyNs, 0.005 * kStepNs}};
  loop.factors = [=](int64_t iteration, auto...) {
    return Factors{.link = (iteration >= kChangesAt ? 3 : 1) * trifle};
  };
  EXPECT_EQ(run(loop, 200).measure_at, -1);
}

TEST(Monitor, APlanForOtherTimesIsNoticed) {
  // The network or compute became slower between the measurement and the plan's first iterations.
  for (const Cause cause : {Cause::kNetwork, Cause::kCompute}) {
    const bool network = cause == Cause::kNetwork;
    const Told told = run({.options = {network ? kBusyNs : kBusyNs / 2, network ? kLinkNs / 2 : kLinkNs}}, 100);
    EXPECT_GT(told.measure_at, 0);
    EXPECT_LT(told.measure_at, 30);
    EXPECT_EQ(told.change.cause, cause);
    EXPECT_DOUBLE_EQ(told.change.before_ns, (network ? kLinkNs : kBusyNs) / 2);
  }
}

TEST(Monitor, ASlowRankIsNamed) {
  Loop loop;
  // The others' blocks take longer, too, since they wait for it; its own do not.
  loop.factors = [](int64_t iteration, int32_t rank, bool) {
    return iteration < kChangesAt ? Factors{} : rank == 1 ? Factors{1.5, 1.5, 1} : Factors{1.5, 1, 2};
  };
  const Told told = run(loop, 100);
  EXPECT_GT(told.measure_at, kChangesAt);
  EXPECT_EQ(told.change.cause, Cause::kCompute);
  EXPECT_EQ(told.change.rank, 1);
  EXPECT_EQ(told.slowest_rank, 1);
}

TEST(Monitor, TheSlowerOfTwoRanksIsNamed) {
  for (const double factor : {1.2, 1.05}) {
    Loop loop{.rank_count = 2};
    loop.factors = [=](int64_t, int32_t rank, bool) { return Factors{.busy = rank == 1 ? factor : 1}; };
    EXPECT_EQ(run(loop, 100).slowest_rank, factor > 1.1 ? 1 : -1);
  }
}

TEST(Monitor, ALargerBatchIsNobodysFault) {
  Loop loop;
  loop.factors = [](int64_t iteration, auto...) { return Factors{.busy = iteration >= kChangesAt ? 2.0 : 1.0}; };
  const Told told = run(loop, 100);
  EXPECT_EQ(told.change.cause, Cause::kCompute);
  EXPECT_EQ(told.change.rank, -1);
}

TEST(Monitor, AFewBadIterationsAreNoChange) {
  Loop loop;
  loop.factors = [](int64_t iteration, auto...) {
    const double factor = iteration % 50 < 5 ? 5 : 1;  // an evaluation, a checkpoint
    return Factors{factor, factor, factor};
  };
  EXPECT_EQ(run(loop, 2000).measure_at, -1);
}

TEST(Monitor, NoiseIsNoChange) {
  // As on a busy machine of two cores: 8 % of scatter, and one iteration in twenty takes up to twice as long.
  for (uint32_t seed = 1; seed <= 100; ++seed) {
    std::mt19937 random(seed);
    Loop loop;
    loop.factors = [&](auto...) {
      const double outlier = random() % 20 == 0 ? std::uniform_real_distribution<>(1, 2)(random) : 1;
      const auto noisy = [&] { return outlier * std::normal_distribution<>(1, 0.08)(random); };
      return Factors{noisy(), noisy(), noisy()};
    };
    const Told told = run(loop, 2000);
    EXPECT_EQ(told.measure_at, -1) << "seed " << seed;
    EXPECT_EQ(told.aside_at, -1) << "seed " << seed;
  }
}

// The record of a training on hosts of the laboratory: by iteration, whether it was a baseline one, and the facts of two
// ranks.
std::vector<std::pair<bool, std::vector<RankFacts>>> recorded() {
  std::ifstream file(GRADCAST_TESTS_DIR "/core/recorded_facts.csv");
  std::vector<std::pair<bool, std::vector<RankFacts>>> iterations;
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with('#')) {
      continue;
    }
    std::replace(line.begin(), line.end(), ',', ' ');
    std::istringstream words(line);
    bool on_baseline = false;
    words >> on_baseline;
    std::vector<RankFacts> ranks(2);
    for (RankFacts& rank : ranks) {
      words >> rank.step_ns >> rank.busy_ns >> rank.link_ns;
      rank = {1e3 * rank.step_ns, 1e3 * rank.busy_ns, 1e3 * rank.link_ns};
    }
    EXPECT_TRUE(words) << line;
    iterations.emplace_back(on_baseline, ranks);
  }
  return iterations;
}

TEST(Monitor, RecordedNoiseIsNoChange) {
  const auto iterations = recorded();
  ASSERT_GT(iterations.size(), 400U);
  Monitor monitor(2, {});
  for (const auto& [on_baseline, ranks] : iterations) {
    const Decision decision = monitor.on_iteration(on_baseline, ranks);
    EXPECT_FALSE(decision.change);
    EXPECT_FALSE(decision.stepped_aside);
  }
  EXPECT_GT(monitor.comparison().baseline_count, 0);
}

TEST(Monitor, InRecordedNoiseAChangeIsNoticed) {
  // The same, but from some iteration on the network takes 30 % longer, or one rank's compute does.
  constexpr size_t kSlowerFrom = 200;
  for (const bool network : {true, false}) {
    Monitor monitor(2, {});
    size_t noticed_at = 0;
    const auto iterations = recorded();
    for (size_t i = 0; i < iterations.size() && noticed_at == 0; ++i) {
      std::vector<RankFacts> ranks = iterations[i].second;
      if (i >= kSlowerFrom) {
        ranks[0].link_ns *= network ? 1.3 : 1;
        ranks[1].link_ns *= network ? 1.3 : 1;
        ranks[1].busy_ns *= network ? 1 : 1.3;
      }
      const Decision decision = monitor.on_iteration(iterations[i].first, ranks);
      if (decision.change) {
        noticed_at = i;
        EXPECT_EQ(decision.change->cause, network ? Cause::kNetwork : Cause::kCompute);
        EXPECT_EQ(decision.change->rank, network ? -1 : 1);
      }
    }
    EXPECT_GE(noticed_at, kSlowerFrom);
    EXPECT_LT(noticed_at, kSlowerFrom + 12);
  }
}

TEST(Monitor, RefusesFactsOfOtherRanks) {
  Monitor monitor(2, {});
  const std::vector<RankFacts> one(1);
  expect_refused([&] { monitor.on_iteration(false, one); }, ErrorCode::kInvalidOption, "2 ranks");
}

}  // namespace
}  // namespace gradcast
