// Monitor: what persists is a change, what does not is none; the plain plan is tried seldom, and taken where it is as
// fast.
#include "gradcast/monitor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
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

// The plain plan is slower, where nothing else is said.
double step_ns(bool plain) {
  return plain ? 1.3 * kStepNs : kStepNs;
}

struct Loop {
  int32_t rank_count = 3;
  MonitorOptions options{kBusyNs, kLinkNs};
  // The facts of a rank in an iteration, none where the step is 0; `plain`: it follows the plain plan.
  std::function<RankFacts(int64_t iteration, int32_t rank, bool plain)> facts;
};

struct Told {
  std::vector<bool> plain;  // by iteration
  int64_t measure_at = -1;  // the iteration after which it was asked for, the first time
  int64_t aside_at = -1;
  Change change;
  Comparison comparison;
  int32_t slowest_rank = -1;
};

// Plays iterations until a measurement is asked for.
Told run(const Loop& loop, int64_t iterations) {
  Monitor monitor(loop.rank_count, loop.options);
  Told told;
  bool plain = loop.options.begins_plain;
  for (int64_t i = 0; i < iterations; ++i) {
    told.plain.push_back(plain);
    if (i < kLate) {
      continue;
    }
    const int64_t known = i - kLate;
    std::vector<RankFacts> ranks;
    for (int32_t rank = 0; rank < loop.rank_count; ++rank) {
      ranks.push_back(loop.facts(known, rank, told.plain[known]));
    }
    if (ranks[0].step_ns == 0) {
      ranks.clear();
    }
    const Decision decision = monitor.on_iteration(told.plain[known], ranks);
    plain = decision.plain;
    told.aside_at = decision.stepped_aside ? i : told.aside_at;
    if (decision.change) {
      told.measure_at = i;
      told.change = *decision.change;
      break;
    }
  }
  told.comparison = monitor.comparison();
  told.slowest_rank = monitor.slowest_rank();
  return told;
}

// The plain plan takes `plain_share` times as long.
Loop steady(double plain_share) {
  return {.facts = [=](int64_t, int32_t, bool plain) {
    return RankFacts{plain ? plain_share * kStepNs : kStepNs, kBusyNs, kLinkNs};
  }};
}

int64_t plain_count(const Told& told) {
  return std::count(told.plain.begin(), told.plain.end(), true);
}

TEST(Monitor, NothingHappensWhereNothingChanges) {
  const Told told = run(steady(1.3), 4000);
  EXPECT_EQ(told.measure_at, -1);
  EXPECT_EQ(told.aside_at, -1);
  EXPECT_EQ(told.slowest_rank, -1);
}

TEST(Monitor, TrialsCostLessThanOnePercent) {
  const Told told = run(steady(1.5), 4000);
  EXPECT_GT(plain_count(told), 4);
  EXPECT_LT(0.5 * static_cast<double>(plain_count(told)) / 4000, 0.01);
  EXPECT_NEAR(told.comparison.plain_ns / told.comparison.plan_ns, 1.5, 1e-9);
}

TEST(Monitor, StepsAsideWhereThePlainPlanIsAsFast) {
  for (const double plain_share : {0.9, 1.0}) {
    const Told told = run(steady(plain_share), 100);
    ASSERT_GT(told.aside_at, 0) << plain_share;
    EXPECT_LT(told.aside_at, 60) << plain_share;
    for (size_t i = told.aside_at + 1; i < told.plain.size(); ++i) {
      EXPECT_TRUE(told.plain[i]) << i;
    }
    EXPECT_GE(told.comparison.plain_count, 12);
  }
}

TEST(Monitor, OneBadTrialIsNotEnough) {
  // The first four plain iterations met a free machine.
  Loop loop = steady(1.2);
  loop.facts = [count = 0](int64_t, int32_t rank, bool plain) mutable {
    count += plain && rank == 0 ? 1 : 0;
    return RankFacts{plain && count > 4 ? 1.4 * kStepNs : kStepNs, kBusyNs, kLinkNs};
  };
  EXPECT_EQ(run(loop, 300).aside_at, -1);
}

TEST(Monitor, WithoutAPlainPlanNothingIsTried) {
  Loop loop = steady(1);
  loop.options.has_plain = false;
  const Told told = run(loop, 500);
  EXPECT_EQ(plain_count(told), 0);
  EXPECT_EQ(told.aside_at, -1);
}

TEST(Monitor, ThePlainPlanCanBeInForceFromTheStart) {
  Loop loop = steady(1);
  loop.options.begins_plain = true;
  const Told told = run(loop, 500);
  EXPECT_EQ(plain_count(told), 500);
  EXPECT_EQ(told.aside_at, -1);
  EXPECT_EQ(told.measure_at, -1);
}

TEST(Monitor, AnInterruptedIterationIsLeftOut) {
  // Every third one is, as where several models take turns.
  for (const double plain_share : {1.0, 1.3}) {
    Loop loop = steady(plain_share);
    loop.facts = [facts = loop.facts](int64_t iteration, int32_t rank, bool plain) {
      return iteration % 3 == 0 ? RankFacts{} : facts(iteration, rank, plain);
    };
    const Told told = run(loop, 1500);
    EXPECT_EQ(told.measure_at, -1) << plain_share;
    EXPECT_EQ(told.aside_at > 0, plain_share == 1.0);
    EXPECT_GE(told.comparison.plain_count, 3) << plain_share;
    EXPECT_NEAR(told.comparison.plain_ns / told.comparison.plan_ns, plain_share, 1e-9);
  }
}

TEST(Monitor, ASlowerNetworkIsNoticed) {
  for (const double factor : {2.0, 0.5}) {
    Loop loop = steady(1.3);
    loop.facts = [=](int64_t iteration, int32_t, bool plain) {
      return RankFacts{step_ns(plain), kBusyNs, iteration >= 50 ? factor * kLinkNs : kLinkNs};
    };
    const Told told = run(loop, 100);
    EXPECT_EQ(told.measure_at, 50 + 5 + kLate) << factor;
    EXPECT_EQ(told.change.cause, Cause::kNetwork);
    EXPECT_DOUBLE_EQ(told.change.before_ns, kLinkNs);
    EXPECT_DOUBLE_EQ(told.change.after_ns, factor * kLinkNs);
  }
}

TEST(Monitor, ASlowRankIsNamed) {
  Loop loop = steady(1.3);
  // The others' blocks take longer, too, since they wait for it; its own do not.
  loop.facts = [](int64_t iteration, int32_t rank, bool plain) {
    const bool slow = iteration >= 50;
    return RankFacts{(slow ? 1.5 : 1) * step_ns(plain), slow && rank == 1 ? 1.5 * kBusyNs : kBusyNs,
                     slow && rank != 1 ? 2 * kLinkNs : kLinkNs};
  };
  const Told told = run(loop, 100);
  EXPECT_GT(told.measure_at, 50);
  EXPECT_EQ(told.change.cause, Cause::kCompute);
  EXPECT_EQ(told.change.rank, 1);
  EXPECT_EQ(told.slowest_rank, 1);
}

TEST(Monitor, TheSlowerOfTwoRanksIsNamed) {
  for (const double factor : {1.2, 1.05}) {
    Loop loop = steady(1.3);
    loop.rank_count = 2;
    loop.facts = [=](int64_t, int32_t rank, bool plain) {
      return RankFacts{step_ns(plain), (rank == 1 ? factor : 1) * kBusyNs, kLinkNs};
    };
    EXPECT_EQ(run(loop, 100).slowest_rank, factor > 1.1 ? 1 : -1);
  }
}

TEST(Monitor, ALargerBatchIsNobodysFault) {
  Loop loop = steady(1.3);
  loop.facts = [](int64_t iteration, int32_t, bool plain) {
    return RankFacts{step_ns(plain), iteration >= 50 ? 2 * kBusyNs : kBusyNs, kLinkNs};
  };
  const Told told = run(loop, 100);
  EXPECT_EQ(told.change.cause, Cause::kCompute);
  EXPECT_EQ(told.change.rank, -1);
}

TEST(Monitor, AFewBadIterationsAreNoChange) {
  Loop loop = steady(1.3);
  loop.facts = [](int64_t iteration, int32_t, bool plain) {
    const double factor = iteration % 50 < 5 ? 5 : 1;  // an evaluation, a checkpoint
    return RankFacts{(plain ? 1.3 : 1) * factor * kStepNs, factor * kBusyNs, factor * kLinkNs};
  };
  EXPECT_EQ(run(loop, 2000).measure_at, -1);
}

TEST(Monitor, NoiseIsNoChange) {
  // As on a busy machine of two cores: 8 % of scatter, and one iteration in twenty takes up to twice as long.
  for (uint32_t seed = 1; seed <= 100; ++seed) {
    std::mt19937 random(seed);
    Loop loop = steady(1.3);
    loop.facts = [&](int64_t, int32_t, bool plain) {
      const double outlier = random() % 20 == 0 ? std::uniform_real_distribution<>(1, 2)(random) : 1;
      const auto noisy = [&](double value) { return value * outlier * std::normal_distribution<>(1, 0.08)(random); };
      return RankFacts{noisy(plain ? 1.3 * kStepNs : kStepNs), noisy(kBusyNs), noisy(kLinkNs)};
    };
    const Told told = run(loop, 2000);
    EXPECT_EQ(told.measure_at, -1) << "seed " << seed;
    EXPECT_EQ(told.aside_at, -1) << "seed " << seed;
  }
}

// The record of a training on hosts of the laboratory: by iteration, whether it was a plain one, and the facts of two
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
    bool plain = false;
    words >> plain;
    std::vector<RankFacts> ranks(2);
    for (RankFacts& rank : ranks) {
      words >> rank.step_ns >> rank.busy_ns >> rank.link_ns;
      rank = {1e3 * rank.step_ns, 1e3 * rank.busy_ns, 1e3 * rank.link_ns};
    }
    EXPECT_TRUE(words) << line;
    iterations.emplace_back(plain, ranks);
  }
  return iterations;
}

TEST(Monitor, RecordedNoiseIsNoChange) {
  const auto iterations = recorded();
  ASSERT_GT(iterations.size(), 400U);
  Monitor monitor(2, {});
  for (const auto& [plain, ranks] : iterations) {
    const Decision decision = monitor.on_iteration(plain, ranks);
    EXPECT_FALSE(decision.change);
    EXPECT_FALSE(decision.stepped_aside);
  }
  EXPECT_GT(monitor.comparison().plain_count, 0);
}

TEST(Monitor, InRecordedNoiseAChangeIsNoticed) {
  // The same, but from some iteration on the network takes 30 % longer, or one rank's compute does.
  constexpr size_t kChangesAt = 200;
  for (const bool network : {true, false}) {
    Monitor monitor(2, {});
    size_t noticed_at = 0;
    const auto iterations = recorded();
    for (size_t i = 0; i < iterations.size() && noticed_at == 0; ++i) {
      std::vector<RankFacts> ranks = iterations[i].second;
      if (i >= kChangesAt) {
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
    EXPECT_GE(noticed_at, kChangesAt);
    EXPECT_LT(noticed_at, kChangesAt + 12);
  }
}

TEST(Monitor, ATrifleIsNoChange) {
  // The network takes three times as long, for what is 1 % of a step.
  Loop loop = steady(1.3);
  loop.options.link_ns = 0.005 * kStepNs;
  loop.facts = [](int64_t iteration, int32_t, bool plain) {
    return RankFacts{step_ns(plain), kBusyNs, (iteration >= 50 ? 0.015 : 0.005) * kStepNs};
  };
  EXPECT_EQ(run(loop, 200).measure_at, -1);
}

TEST(Monitor, APlanForAnotherNetworkIsNoticed) {
  // The network became slower between the measurement and the plan's first iterations.
  Loop loop = steady(1.3);
  loop.options.link_ns = kLinkNs / 2;
  const Told told = run(loop, 100);
  EXPECT_GT(told.measure_at, 0);
  EXPECT_LT(told.measure_at, 30);
  EXPECT_DOUBLE_EQ(told.change.before_ns, kLinkNs / 2);
}

TEST(Monitor, HoldsStillWhereAskedTo) {
  Loop loop = steady(1.3);
  loop.options.hold_iterations = 80;
  loop.facts = [](int64_t iteration, int32_t, bool plain) {
    return RankFacts{step_ns(plain), kBusyNs, iteration >= 50 ? 2 * kLinkNs : kLinkNs};
  };
  EXPECT_EQ(run(loop, 200).measure_at, 80 + kLate);
}

TEST(Monitor, AfterSteppingAsideAChangeIsStillNoticed) {
  Loop loop = steady(1);
  loop.facts = [](int64_t iteration, int32_t, bool) {
    return RankFacts{kStepNs, kBusyNs, iteration >= 100 ? 3 * kLinkNs : kLinkNs};
  };
  const Told told = run(loop, 200);
  EXPECT_GT(told.aside_at, 0);
  EXPECT_GT(told.measure_at, 100);
}

TEST(Monitor, RefusesFactsOfOtherRanks) {
  Monitor monitor(2, {});
  const std::vector<RankFacts> one(1);
  expect_refused([&] { monitor.on_iteration(false, one); }, ErrorCode::kInvalidOption, "2 ranks");
}

}  // namespace
}  // namespace gradcast
