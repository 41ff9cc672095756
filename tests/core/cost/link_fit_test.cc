// Fitting a cost to samples: what was put in comes out, noise and outliers do not, and the result is a valid cost.
#include "gradcast/link_fit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/refusals.h"

namespace gradcast {
namespace {

using Cost = std::function<double(double)>;  // time in ns of a size in bytes

constexpr FitMethod kMethods[] = {FitMethod::kRobust, FitMethod::kLeastSquares};

class LinkFitBy : public ::testing::TestWithParam<FitMethod> {};
INSTANTIATE_TEST_SUITE_P(EveryMethod, LinkFitBy, ::testing::ValuesIn(kMethods));

// 4 KB to 256 MB, two sizes per doubling.
std::vector<int64_t> usual_sizes() {
  std::vector<int64_t> sizes_bytes;
  for (int i = 0; i <= 32; ++i)
    sizes_bytes.push_back(static_cast<int64_t>(4096 * std::exp2(i / 2.0)));
  return sizes_bytes;
}

struct Disturbance {
  double noise = 0;          // relative standard deviation
  double outlier_share = 0;  // samples that take 2 to 10 times as long
  int samples_per_size = 1;
  uint64_t seed = 0;
};

std::vector<LinkSample> measured(const Cost& cost, const std::vector<int64_t>& sizes_bytes,
                                 const Disturbance& how = {}) {
  std::mt19937_64 random(how.seed);
  std::normal_distribution<double> normal(0, 1);
  std::uniform_real_distribution<double> uniform(0, 1);
  std::vector<LinkSample> samples;
  for (int64_t size_bytes : sizes_bytes) {
    for (int i = 0; i < how.samples_per_size; ++i) {
      double time_ns = cost(static_cast<double>(size_bytes)) * std::exp(how.noise * normal(random));
      if (uniform(random) < how.outlier_share) time_ns *= 2 + 8 * uniform(random);
      samples.push_back({size_bytes, time_ns});
    }
  }
  return samples;
}

// The largest relative error of a cost against the true one at the given sizes.
double error_against(const OpCost& cost, const Cost& truth, const std::vector<int64_t>& sizes_bytes) {
  double worst = 0;
  for (int64_t size_bytes : sizes_bytes) {
    worst = std::max(worst, std::abs(cost.cost_ns(size_bytes) / truth(static_cast<double>(size_bytes)) - 1));
  }
  return worst;
}

void expect_valid(const OpCost& cost, uint64_t seed = 0) {
  LinkModel link;
  link.all_reduce = cost;
  EXPECT_NO_THROW(check_link(link)) << "seed " << seed;
}

double one_line(double size_bytes) {
  return 50'000 + 0.8 * size_bytes;
}
// An eager protocol up to 256 KB, then a larger start-up and a better rate; no jump worth speaking of.
double two_lines(double size_bytes) {
  return size_bytes <= 262'144 ? 20'000 + size_bytes : 216'608 + 0.25 * size_bytes;
}

TEST_P(LinkFitBy, RecoversOneLineExactly) {
  const LinkFit fit = fit_op_cost(measured(one_line, usual_sizes()), {GetParam(), 3});
  ASSERT_EQ(fit.cost.pieces.size(), 1u);
  EXPECT_EQ(fit.cost.pieces[0].up_to_bytes, kUnboundedBytes);
  EXPECT_NEAR(fit.cost.pieces[0].alpha_ns, 50'000, 1e-3);
  EXPECT_NEAR(fit.cost.pieces[0].beta_ns_per_byte, 0.8, 1e-9);
  EXPECT_LT(fit.relative_error_max, 1e-9);
}

TEST_P(LinkFitBy, RecoversTwoPiecesExactly) {
  const LinkFit fit = fit_op_cost(measured(two_lines, usual_sizes()), {GetParam(), 3});
  ASSERT_EQ(fit.cost.pieces.size(), 2u);
  EXPECT_NEAR(fit.cost.pieces[0].alpha_ns, 20'000, 1e-3);
  EXPECT_NEAR(fit.cost.pieces[0].beta_ns_per_byte, 1, 1e-9);
  EXPECT_NEAR(fit.cost.pieces[1].alpha_ns, 216'608, 1e-3);
  EXPECT_NEAR(fit.cost.pieces[1].beta_ns_per_byte, 0.25, 1e-9);
  EXPECT_NEAR(static_cast<double>(fit.cost.pieces[0].up_to_bytes), 262'144, 1);
  EXPECT_LT(fit.relative_error_max, 1e-9);
  expect_valid(fit.cost);
}

// A jump upwards: nobody knows where between two sizes it is, and the cost must hold at every size measured.
TEST_P(LinkFitBy, RecoversAJump) {
  const auto truth = [](double x) { return x <= 300'000 ? 10'000 + 0.1 * x : 400'000 + 0.1 * x; };
  const LinkFit fit = fit_op_cost(measured(truth, usual_sizes()), {GetParam(), 3});
  ASSERT_EQ(fit.cost.pieces.size(), 2u);
  EXPECT_EQ(fit.cost.pieces[0].up_to_bytes, 262'144);
  EXPECT_LT(fit.relative_error_max, 1e-9);
}

// As few points as a fit of two pieces can have.
TEST_P(LinkFitBy, TwoPiecesOfThreeSizes) {
  const std::vector<int64_t> sizes_bytes{1'000, 2'000, 4'000, 1'000'000, 2'000'000, 4'000'000};
  const auto truth = [](double x) { return x < 1e5 ? 1'000 + x : 90'000 + 0.1 * x; };
  const LinkFit fit = fit_op_cost(measured(truth, sizes_bytes), {GetParam(), 3});
  ASSERT_EQ(fit.cost.pieces.size(), 2u);
  EXPECT_NEAR(fit.cost.pieces[1].beta_ns_per_byte, 0.1, 1e-9);
  // The lines cross where 1000 + x = 90000 + x / 10.
  EXPECT_EQ(fit.cost.pieces[0].up_to_bytes, 98'888);
}

TEST(LinkFit, MaxPiecesIsALimit) {
  const LinkFit fit = fit_op_cost(measured(two_lines, usual_sizes()), {FitMethod::kRobust, 1});
  EXPECT_EQ(fit.cost.pieces.size(), 1u);
  EXPECT_GT(fit.relative_error_max, 0.1);
}

// Small operations count as much as large ones: noise of 5 % at 256 MB is 10 ms, 200 times the alpha of 50 us.
TEST_P(LinkFitBy, SmallSizesAreNotDrownedByLargeOnes) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const auto samples = measured(one_line, usual_sizes(), {0.05, 0, 5, seed});
    const LinkFit fit = fit_op_cost(samples, {GetParam(), 1});
    EXPECT_LT(error_against(fit.cost, one_line, {1, 4096, 65'536}), 0.06) << "seed " << seed;
  }
}

// One noisy line is one piece: a breakpoint that noise made would be a false rule about sizes.
TEST_P(LinkFitBy, NoiseAloneMakesNoPieces) {
  for (double noise : {0.01, 0.05, 0.2}) {
    int several_count = 0;
    for (uint64_t seed = 0; seed < 100; ++seed) {
      const LinkFit fit = fit_op_cost(measured(one_line, usual_sizes(), {noise, 0, 5, seed}), {GetParam(), 3});
      several_count += fit.cost.pieces.size() > 1;
      EXPECT_LT(error_against(fit.cost, one_line, usual_sizes()), 3 * noise) << "seed " << seed;
      expect_valid(fit.cost, seed);
    }
    EXPECT_LE(several_count, 5) << "noise " << noise;
  }
}

TEST_P(LinkFitBy, FindsTwoPiecesUnderNoise) {
  int right_count = 0;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const LinkFit fit = fit_op_cost(measured(two_lines, usual_sizes(), {0.03, 0, 5, seed}), {GetParam(), 3});
    right_count += fit.cost.pieces.size() == 2 && error_against(fit.cost, two_lines, usual_sizes()) < 0.1;
  }
  EXPECT_GE(right_count, 95);
}

// Every fifth sample takes 2 to 10 times as long, one sample per size: nothing but the line itself tells which.
TEST(LinkFit, RobustFitIgnoresOutliers) {
  std::vector<double> robust_errors;
  std::vector<double> least_squares_errors;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const auto samples = measured(one_line, usual_sizes(), {0.01, 0.2, 1, seed});
    const auto error_of = [&](FitMethod method) {
      return error_against(fit_op_cost(samples, {method, 3}).cost, one_line, usual_sizes());
    };
    robust_errors.push_back(error_of(FitMethod::kRobust));
    least_squares_errors.push_back(error_of(FitMethod::kLeastSquares));
  }
  std::sort(robust_errors.begin(), robust_errors.end());
  std::sort(least_squares_errors.begin(), least_squares_errors.end());
  EXPECT_LT(robust_errors[50], 0.01);
  EXPECT_LT(robust_errors.back(), 0.05);
  EXPECT_GT(least_squares_errors[50], 0.02);
}

// With a start-up as long as 12 MB most sizes say nothing about beta, and outliers among them must not either.
TEST(LinkFit, RobustFitFindsBetaBesideALargeAlpha) {
  const auto truth = [](double x) { return 1e7 + 0.8 * x; };
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const LinkFit fit = fit_op_cost(measured(truth, usual_sizes(), {0.05, 0.2, 1, seed}), {FitMethod::kRobust, 1});
    EXPECT_NEAR(fit.cost.pieces[0].beta_ns_per_byte, 0.8, 0.12) << "seed " << seed;
  }
}

TEST(LinkFit, RobustFitFindsTwoPiecesAmongOutliers) {
  int right_count = 0;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    const LinkFit fit = fit_op_cost(measured(two_lines, usual_sizes(), {0.01, 0.2, 5, seed}), {});
    right_count += error_against(fit.cost, two_lines, usual_sizes()) < 0.05;
    EXPECT_LT(fit.relative_error_median, 0.03) << "seed " << seed;
    EXPECT_GT(fit.relative_error_max, 0.4) << "seed " << seed;  // the outliers are reported, not hidden
  }
  EXPECT_GE(right_count, 95);
}

// A library that gets faster above 64 KB. Until the upper line has reached the level at the breakpoint the fit stays
// there: 5000 + x is 70536 ns at 65536 bytes, 20000 + x / 4 is there at 202144 bytes.
TEST_P(LinkFitBy, AFallIsRaisedToALevel) {
  const auto truth = [](double x) { return x <= 65'536 ? 5'000 + x : 20'000 + 0.25 * x; };
  const LinkFit fit = fit_op_cost(measured(truth, usual_sizes()), {GetParam(), 3});
  expect_valid(fit.cost);
  ASSERT_EQ(fit.cost.pieces.size(), 3u);
  EXPECT_EQ(fit.cost.pieces[0].up_to_bytes, 65'536);
  EXPECT_EQ(fit.cost.pieces[1].up_to_bytes, 202'144);
  EXPECT_NEAR(fit.cost.pieces[1].alpha_ns, 70'536, 1e-3);
  EXPECT_EQ(fit.cost.pieces[1].beta_ns_per_byte, 0);
  EXPECT_NEAR(fit.cost.pieces[2].alpha_ns, 20'000, 1e-3);
  EXPECT_NEAR(fit.cost.pieces[2].beta_ns_per_byte, 0.25, 1e-9);
  // Where the upper line never reaches the level, the level is the last piece.
  const auto falls_for_good = [](double x) { return x <= 1e6 ? 5'000 + x : 20'000; };
  const OpCost level = fit_op_cost(measured(falls_for_good, usual_sizes()), {GetParam(), 3}).cost;
  expect_valid(level);
  EXPECT_EQ(level.pieces.back().beta_ns_per_byte, 0);
  EXPECT_EQ(level.pieces.back().up_to_bytes, kUnboundedBytes);
}

// Times that fall, and times proportional to a size less an offset, would give a negative beta and a negative alpha.
TEST_P(LinkFitBy, AlphaAndBetaAreNeverNegative) {
  const auto fit = [](const Cost& truth) { return fit_op_cost(measured(truth, usual_sizes()), {GetParam(), 1}).cost; };
  const OpCost level = fit([](double x) { return 1e6 / std::sqrt(x); });
  EXPECT_EQ(level.pieces[0].beta_ns_per_byte, 0);
  EXPECT_GT(level.pieces[0].alpha_ns, 0);
  expect_valid(level);
  const OpCost proportion = fit([](double x) { return std::max(1.0, x - 4'000); });
  EXPECT_EQ(proportion.pieces[0].alpha_ns, 0);
  EXPECT_GT(proportion.pieces[0].beta_ns_per_byte, 0);
  expect_valid(proportion);
}

// The constrained line is the best of all lines with alpha and beta of at least 0, by comparison with its neighbours.
TEST(LinkFit, LeastSquaresLineIsTheBestOfItsKind) {
  const auto squares_of = [](const std::vector<LinkSample>& samples, double alpha_ns, double beta) {
    double total = 0;
    for (const LinkSample& sample : samples) {
      total += std::pow((alpha_ns + beta * static_cast<double>(sample.size_bytes)) / sample.time_ns - 1, 2);
    }
    return total;
  };
  for (uint64_t seed = 0; seed < 300; ++seed) {
    std::mt19937_64 random(seed);
    std::uniform_real_distribution<double> uniform(0.1, 10);
    std::vector<LinkSample> samples;
    for (int64_t size_bytes = 1; size_bytes <= 6; ++size_bytes)
      samples.push_back({size_bytes, uniform(random)});
    const LinkPiece line = fit_op_cost(samples, {FitMethod::kLeastSquares, 1}).cost.pieces[0];
    const double best = squares_of(samples, line.alpha_ns, line.beta_ns_per_byte);
    for (double alpha_step : {-1e-3, 0.0, 1e-3}) {
      for (double beta_step : {-1e-3, 0.0, 1e-3}) {
        const double alpha_ns = std::max(0.0, line.alpha_ns + alpha_step);
        const double beta = std::max(0.0, line.beta_ns_per_byte + beta_step);
        EXPECT_LE(best, squares_of(samples, alpha_ns, beta) + 1e-12) << "seed " << seed;
      }
    }
  }
}

// More than 48 sizes are grouped, which must not bend an exact line, nor may the order of the samples count.
TEST_P(LinkFitBy, ManySizesInAnyOrder) {
  std::mt19937_64 random(7);
  std::uniform_real_distribution<double> exponent(12, 28);
  std::vector<int64_t> sizes_bytes;
  for (int i = 0; i < 5'000; ++i)
    sizes_bytes.push_back(static_cast<int64_t>(std::exp2(exponent(random))));
  const LinkFit exact = fit_op_cost(measured(one_line, sizes_bytes), {GetParam(), 3});
  ASSERT_EQ(exact.cost.pieces.size(), 1u);
  EXPECT_NEAR(exact.cost.pieces[0].alpha_ns, 50'000, 1e-2);
  EXPECT_NEAR(exact.cost.pieces[0].beta_ns_per_byte, 0.8, 1e-8);

  auto samples = measured(two_lines, sizes_bytes, {0.05, 0.1, 1, 3});
  const LinkFit fit = fit_op_cost(samples, {GetParam(), 3});
  std::shuffle(samples.begin(), samples.end(), random);
  EXPECT_EQ(fit_op_cost(samples, {GetParam(), 3}).cost, fit.cost);
}

// Whatever the samples, the result is a cost that check_link accepts.
TEST(LinkFit, EveryFitIsAValidCost) {
  for (uint64_t seed = 0; seed < 500; ++seed) {
    std::mt19937_64 random(seed);
    const auto uniform = [&random](double low, double high) {
      return std::uniform_real_distribution<double>(low, high)(random);
    };
    const int sample_count = std::uniform_int_distribution<int>(3, 40)(random);
    const double size_exponent_max = uniform(2, 53);
    std::vector<LinkSample> samples{{1, 5}, {2, 6}, {3, 7}};
    for (int i = 0; i < sample_count; ++i) {
      samples.push_back({static_cast<int64_t>(std::exp2(uniform(0, size_exponent_max))), std::exp2(uniform(-3, 53))});
    }
    // Groups of neighbouring sizes have means between bytes: two breakpoints may then fall on the same byte.
    for (int64_t size_bytes = 1; size_bytes <= 80 && seed % 10 == 0; ++size_bytes) {
      samples.push_back({size_bytes, std::exp2(uniform(0, 3)) * static_cast<double>(1 + size_bytes / 4)});
    }
    for (FitMethod method : kMethods) {
      const LinkFit fit = fit_op_cost(samples, {method, 8});
      expect_valid(fit.cost, seed);
      EXPECT_TRUE(std::isfinite(fit.relative_error_max)) << "seed " << seed;
      EXPECT_LE(fit.relative_error_median, fit.relative_error_max) << "seed " << seed;
    }
  }
}

// The quality is over the samples themselves, by hand: 10 + x at 1, 2, 3 bytes, and a fourth sample at 2 that is twice
// as slow. The robust line does not move, so the errors are 0, 0, 0 and one half.
TEST(LinkFit, ReportsItsQuality) {
  const std::vector<LinkSample> samples{{1, 11}, {2, 12}, {2, 24}, {3, 13}};
  const LinkFit fit = fit_op_cost(samples, {});
  EXPECT_NEAR(fit.relative_error_median, 0, 1e-12);
  EXPECT_NEAR(fit.relative_error_max, 0.5, 1e-12);
}

TEST(LinkFit, RefusesInASentence) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  const std::vector<std::pair<std::vector<LinkSample>, std::string>> cases = {
      {{}, "0 different sizes"},
      {{{1, 1}, {2, 2}, {2, 2}, {2, 3}}, "2 different sizes"},
      {{{1, 1}, {0, 2}, {3, 3}}, "samples[1].size_bytes is 0;"},
      {{{1, 1}, {2, 2}, {kBytesMax + 1, 3}}, "samples[2].size_bytes is"},
      {{{1, 0}, {2, 2}, {3, 3}}, "samples[0].time_ns is 0;"},
      {{{1, 1}, {2, nan}, {3, 3}}, "samples[1].time_ns is nan;"},
      {{{1, 1}, {2, 2}, {3, infinity}}, "samples[2].time_ns is inf;"}};
  for (const auto& [samples, text] : cases) {
    expect_refused([&, samples = samples] { fit_op_cost(samples, {}); }, ErrorCode::kInvalidLink, text);
  }
  for (const int32_t max_pieces : {0, -1, 9}) {
    expect_refused(
        [&] {
          fit_op_cost(measured(one_line, usual_sizes()), {FitMethod::kRobust, max_pieces});
        },
        ErrorCode::kInvalidOption, "max_pieces is");
  }
}

}  // namespace
}  // namespace gradcast
