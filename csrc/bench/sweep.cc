#include "bench/sweep.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "bench/transport_driver.h"
#include "gradcast/error.h"
#include "platform/clock.h"
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

// Sums are checked in pieces of this size, since the sizes reach gigabytes.
constexpr int64_t kPieceElements = 1 << 18;

std::vector<int64_t> sizes_bytes(const SweepOptions& options) {
  std::vector<int64_t> sizes;
  for (auto bytes = static_cast<double>(options.bytes_min);
       bytes <= static_cast<double>(options.bytes_max) * (1 + 1e-9); bytes *= options.factor) {
    const int64_t element_count = std::max<int64_t>(1, std::llround(bytes / sizeof(float)));
    sizes.push_back(element_count * static_cast<int64_t>(sizeof(float)));
  }
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());  // of the smallest a step may be no element
  return sizes;
}

double percentile(const std::vector<double>& ascending, size_t percent) {
  return ascending[(ascending.size() * percent + 99) / 100 - 1];
}

// One operation after the other, each at the beginning of the network's buffer for them.
class Runner {
 public:
  Runner(Group& group, Network& network) : group_(group), network_(network), driver_(network) {}
  ~Runner() { driver_.close(); }

  double run_ns(Op op, int64_t size_bytes) {
    const int64_t begin_ns = steady_now_ns();
    driver_.start(ticket_, {{0, size_bytes}}, op, network_.sweep_buffer());
    const auto error = driver_.wait(ticket_, kPatienceNs);
    const int64_t end_ns = steady_now_ns();
    ++ticket_;
    driver_.forget_completed();
    if (!error || !error->empty()) {
      throw Error(
          ErrorCode::kCommunication,
          std::string(to_string(op)) + " of " + std::to_string(size_bytes) + " bytes " +
              (error ? "failed: " + *error : "has not ended after 60 s on rank " + std::to_string(group_.rank())));
    }
    return static_cast<double>(end_ns - begin_ns);
  }

  int64_t wrong_count(Op op, int64_t size_bytes) {
    const int64_t count = size_bytes / static_cast<int64_t>(sizeof(float));
    const Part own = part_of(group_.rank(), group_.world_size(), count);
    for_pieces({0, count}, [&](std::vector<float>& numbers, const Part& piece, void* place) {
      for (int64_t i = piece.first; i < piece.last; ++i) {
        const bool is_given = op != Op::kAllGather || (i >= own.first && i < own.last);
        numbers[i - piece.first] = is_given ? number(group_.rank(), i) : -1;
      }
      group_.copy(place, numbers.data(), bytes_of(piece));
    });
    run_ns(op, size_bytes);
    const auto part_count = part_of(0, group_.world_size(), count).count();
    int64_t wrong_count = 0;
    for_pieces(op == Op::kReduceScatter ? own : Part{0, count},
               [&](std::vector<float>& numbers, const Part& piece, const void* place) {
                 group_.copy(numbers.data(), place, bytes_of(piece));
                 for (int64_t i = piece.first; i < piece.last; ++i) {
                   const float expected = op == Op::kAllGather ? number(static_cast<int32_t>(i / part_count), i)
                                                               : sum_of_numbers(group_.world_size(), i);
                   wrong_count += numbers[i - piece.first] == expected ? 0 : 1;
                 }
               });
    return wrong_count;
  }

  SweepRow measured(Op op, int64_t size_bytes, const SweepOptions& options) {
    const auto wrong = static_cast<double>(wrong_count(op, size_bytes));
    for (int32_t i = 0; i < options.warmup_count; ++i) {
      run_ns(op, size_bytes);
    }
    group_.barrier();
    std::vector<double> times_ns;
    for (int32_t i = 0; i < options.iteration_count; ++i) {
      times_ns.push_back(run_ns(op, size_bytes));
    }
    std::ranges::sort(times_ns);
    const double mean_ns = std::accumulate(times_ns.begin(), times_ns.end(), 0.0) / options.iteration_count;
    SweepRow row{.op = op, .size_bytes = size_bytes, .low_ns = times_ns.front()};
    for (const std::vector<double>& rank :
         group_.gather({mean_ns, times_ns.front(), times_ns.back(), percentile(times_ns, 50), percentile(times_ns, 90),
                        percentile(times_ns, 99), wrong})) {
      row.time_ns += rank[0] / group_.world_size();
      row.low_ns = std::min(row.low_ns, rank[1]);
      row.high_ns = std::max(row.high_ns, rank[2]);
      row.p50_ns = std::max(row.p50_ns, rank[3]);
      row.p90_ns = std::max(row.p90_ns, rank[4]);
      row.p99_ns = std::max(row.p99_ns, rank[5]);
      row.error_count += std::llround(rank[6]);
    }
    return row;
  }

 private:
  static int64_t bytes_of(const Part& part) { return part.count() * static_cast<int64_t>(sizeof(float)); }

  // Calls `action` with memory of the host, elements, and their place in the network's buffer, until all are through.
  template <typename Action>
  void for_pieces(const Part& all, const Action& action) {
    std::vector<float> numbers(static_cast<size_t>(std::min(kPieceElements, all.count())));
    for (int64_t first = all.first; first < all.last; first += kPieceElements) {
      action(numbers, Part{first, std::min(first + kPieceElements, all.last)},
             static_cast<float*>(network_.sweep_memory()) + first);
    }
  }

  Group& group_;
  Network& network_;
  TransportDriver driver_;
  int64_t ticket_ = 0;
};

}  // namespace

double SweepRow::algorithm_bandwidth() const {
  return static_cast<double>(size_bytes) / time_ns;
}

double SweepRow::bus_bandwidth(int32_t world_size) const {
  const double share = (world_size - 1.0) / world_size;
  return algorithm_bandwidth() * (op == Op::kAllReduce ? 2 * share : share);
}

int64_t largest_bytes(const SweepOptions& options) {
  return sizes_bytes(options).back();
}

std::vector<SweepRow> sweep(Group& group, Network& network, const SweepOptions& options,
                            const std::function<void(const SweepRow&)>& tell) {
  Runner runner(group, network);
  std::vector<SweepRow> rows;
  for (const Op op : kOps) {
    for (const int64_t size_bytes : sizes_bytes(options)) {
      rows.push_back(runner.measured(op, size_bytes, options));
      tell(rows.back());
    }
  }
  return rows;
}

}  // namespace gradcast
