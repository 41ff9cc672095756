#include "bench/sweep.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "bench/transport_driver.h"
#include "gradcast/error.h"
#include "platform/clock.h"
#include "transport/common/host_memory.h"
#include "transport/common/parts.h"

namespace gradcast {
namespace {

constexpr int64_t kPatienceNs = 60'000'000'000;

// Small whole numbers, whose sums are exact in any order.
float number(int32_t rank, int64_t element) {
  return static_cast<float>(element % 13 + rank);
}

float sum_of_numbers(int64_t world_size, int64_t element) {
  return static_cast<float>(world_size * (element % 13) + world_size * (world_size - 1) / 2);
}

// One operation after the other over one buffer.
class Runner {
 public:
  Runner(Group& group, Op op, int64_t size_bytes)
      : group_(group),
        op_(op),
        numbers_(static_cast<size_t>(size_bytes) / sizeof(float)),
        memory_(group.allocate(size_bytes)),
        transport_(group.make_transport({{memory_.get(), size_bytes, Element::kFloat32}})),
        driver_(*transport_) {}
  ~Runner() { driver_.close(); }

  int64_t size_bytes() const { return static_cast<int64_t>(numbers_.size() * sizeof(float)); }

  double run_ns() {
    const int64_t begin_ns = steady_now_ns();
    driver_.start(ticket_, {{0, size_bytes()}}, op_, 0);
    const auto error = driver_.wait(ticket_, kPatienceNs);
    const int64_t end_ns = steady_now_ns();
    ++ticket_;
    driver_.forget_completed();
    if (!error || !error->empty()) {
      throw Error(
          ErrorCode::kCommunication,
          std::string(to_string(op_)) + " of " + std::to_string(size_bytes()) + " bytes " +
              (error ? "failed: " + *error : "has not ended after 60 s on rank " + std::to_string(group_.rank())));
    }
    return static_cast<double>(end_ns - begin_ns);
  }

  int64_t wrong_count() {
    const auto count = static_cast<int64_t>(numbers_.size());
    const Part own = part_of(group_.rank(), group_.world_size(), count);
    for (int64_t i = 0; i < count; ++i) {
      const bool is_given = op_ != Op::kAllGather || (i >= own.first && i < own.last);
      numbers_[i] = is_given ? number(group_.rank(), i) : -1;
    }
    group_.copy(memory_.get(), numbers_.data(), size_bytes());
    run_ns();
    group_.copy(numbers_.data(), memory_.get(), size_bytes());
    int64_t wrong_count = 0;
    for (int64_t i = op_ == Op::kReduceScatter ? own.first : 0; i < (op_ == Op::kReduceScatter ? own.last : count);
         ++i) {
      wrong_count += numbers_[i] == expected(i) ? 0 : 1;
    }
    return wrong_count;
  }

 private:
  float expected(int64_t element) const {
    const int32_t world_size = group_.world_size();
    if (op_ == Op::kAllGather) {
      const auto part = part_of(0, world_size, static_cast<int64_t>(numbers_.size())).count();
      return number(static_cast<int32_t>(element / part), element);
    }
    return sum_of_numbers(world_size, element);
  }

  Group& group_;
  const Op op_;
  std::vector<float> numbers_;
  const std::shared_ptr<void> memory_;
  const std::unique_ptr<Transport> transport_;
  TransportDriver driver_;
  int64_t ticket_ = 0;
};

SweepRow measured(Group& group, Op op, int64_t size_bytes, int32_t iteration_count) {
  Runner runner(group, op, size_bytes);
  const auto wrong_count = static_cast<double>(runner.wrong_count());
  for (int32_t i = 0; i < iteration_count / 4; ++i) {
    runner.run_ns();
  }
  group.barrier();
  std::vector<double> times_ns;
  for (int32_t i = 0; i < iteration_count; ++i) {
    times_ns.push_back(runner.run_ns());
  }
  const auto [low, high] = std::ranges::minmax(times_ns);
  const double sum_ns = std::accumulate(times_ns.begin(), times_ns.end(), 0.0);
  SweepRow row{op, runner.size_bytes(), 0, low, high, 0};
  for (const std::vector<double>& rank : group.gather({sum_ns, low, high, wrong_count})) {
    row.time_ns += rank[0] / (iteration_count * static_cast<double>(group.world_size()));
    row.low_ns = std::min(row.low_ns, rank[1]);
    row.high_ns = std::max(row.high_ns, rank[2]);
    row.error_count += std::llround(rank[3]);
  }
  return row;
}

}  // namespace

double SweepRow::algorithm_bandwidth() const {
  return static_cast<double>(size_bytes) / time_ns;
}

double SweepRow::bus_bandwidth(int32_t world_size) const {
  const double share = (world_size - 1.0) / world_size;
  return algorithm_bandwidth() * (op == Op::kAllReduce ? 2 * share : share);
}

std::vector<SweepRow> sweep(Group& group, Op op, const SweepOptions& options,
                            const std::function<void(const SweepRow&)>& tell) {
  std::vector<SweepRow> rows;
  auto bytes = static_cast<double>(options.bytes_min);
  while (bytes <= static_cast<double>(options.bytes_max) * (1 + 1e-9)) {
    const int64_t element_count = std::max<int64_t>(1, std::llround(bytes / sizeof(float)));
    const int64_t size_bytes = element_count * static_cast<int64_t>(sizeof(float));
    bytes *= options.factor;
    if (!rows.empty() && rows.back().size_bytes == size_bytes) continue;  // of the smallest a step may be no element
    rows.push_back(measured(group, op, size_bytes, options.iteration_count));
    tell(rows.back());
  }
  return rows;
}

}  // namespace gradcast
