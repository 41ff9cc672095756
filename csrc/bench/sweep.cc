#include "bench/sweep.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "bench/transport_driver.h"
#include "gradcast/error.h"
#include "platform/clock.h"
#include "transport/common/host_memory.h"
#include "transport/common/numbers.h"
#include "transport/common/parts.h"

namespace gradcast {
namespace {

constexpr int64_t kPatienceNs = 60'000'000'000;

// Small whole numbers, whose sums are exact in any order, also in bfloat16, which has none above 256 without gaps: at most
// 16 ranks give an element of a sum another number than 0.
class Numbers {
 public:
  Numbers(int32_t rank, int32_t world_size)
      : rank_(rank), world_size_(world_size), groups_((world_size + 15) / 16), place_(rank / groups_) {}

  float given(Op op, int64_t element) const {
    const bool is_given = op == Op::kAllGather || rank_ % groups_ == element % groups_;
    return is_given ? static_cast<float>(1 + element % 7 + place_) : 0;
  }
  float sum(int64_t element) const {
    const int64_t count = (world_size_ - element % groups_ + groups_ - 1) / groups_;
    return static_cast<float>(count * (1 + element % 7) + count * (count - 1) / 2);
  }

 private:
  int32_t rank_;
  int32_t world_size_;
  int32_t groups_;
  int32_t place_;  // among the ranks that give the same elements
};

// Numbers are written and checked in pieces of so many, since the sizes reach gigabytes.
constexpr int64_t kPieceElements = 1 << 18;

std::vector<int64_t> sizes_bytes(const SweepOptions& options) {
  std::vector<int64_t> sizes;
  for (auto bytes = static_cast<double>(options.bytes_min);
       bytes <= static_cast<double>(options.bytes_max) * (1 + 1e-9); bytes *= options.factor) {
    const int64_t each_bytes = element_bytes(options.element);
    sizes.push_back(each_bytes * std::max<int64_t>(1, std::llround(bytes / static_cast<double>(each_bytes))));
  }
  sizes.erase(std::unique(sizes.begin(), sizes.end()), sizes.end());  // of the smallest a step may be no element
  return sizes;
}

double percentile(const std::vector<double>& ascending, size_t percent) {
  return ascending[(ascending.size() * percent + 99) / 100 - 1];
}

// One operation after the other, each at the beginning of the network's memory for them.
class Runner {
 public:
  Runner(Group& group, Network& network) : group_(group), memory_(network.sweep()), driver_(network) {}
  ~Runner() { driver_.close(); }

  double run_ns(const SweepRow& row) {
    const int64_t begin_ns = steady_now_ns();
    driver_.start(ticket_, {{0, row.size_bytes}}, row.op, memory_.buffer + (row.in_place ? 0 : 1));
    const auto error = driver_.wait(ticket_, kPatienceNs);
    const int64_t end_ns = steady_now_ns();
    ++ticket_;
    driver_.forget_completed();
    if (!error || !error->empty()) {
      throw Error(
          ErrorCode::kCommunication,
          std::string(to_string(row.op)) + " of " + std::to_string(row.size_bytes) + " bytes " +
              (error ? "failed: " + *error : "has not ended after 60 s on rank " + std::to_string(group_.rank())));
    }
    return static_cast<double>(end_ns - begin_ns);
  }

  int64_t wrong_count(const SweepRow& row) {
    const Part all{0, row.size_bytes / element_bytes(row.element)};
    const Part own = part_of(group_.rank(), group_.world_size(), all.count());
    const Numbers numbers(group_.rank(), group_.world_size());
    if (!row.in_place || row.op == Op::kAllGather) {  // else nothing is left of what was there before
      write(all, memory_.data, [](int64_t) { return -1.0F; });
    }
    write(row.op == Op::kAllGather ? own : all, row.in_place ? memory_.data : memory_.source,
          [&](int64_t i) { return numbers.given(row.op, i); });
    run_ns(row);
    const int64_t part_count = part_size(all.count(), group_.world_size());
    return wrong_count(row.op == Op::kReduceScatter ? own : all, memory_.data, [&](int64_t i) {
      return row.op == Op::kAllGather
                 ? Numbers(static_cast<int32_t>(i / part_count), group_.world_size()).given(row.op, i)
                 : numbers.sum(i);
    });
  }

  // Fills in the times and errors of a row.
  void measure(SweepRow& row, const SweepOptions& options) {
    const auto wrong = static_cast<double>(wrong_count(row));
    for (int32_t i = 0; i < options.warmup_count; ++i) {
      run_ns(row);
    }
    group_.barrier();
    std::vector<double> times_ns;
    double stream_ns = 0;
    for (int32_t i = 0; i < options.iteration_count; ++i) {
      times_ns.push_back(run_ns(row));
      stream_ns += group_.stream_ns().value_or(0) / options.iteration_count;
    }
    std::ranges::sort(times_ns);
    const double mean_ns = std::accumulate(times_ns.begin(), times_ns.end(), 0.0) / options.iteration_count;
    row.low_ns = times_ns.front();
    row.stream_ns = group_.stream_ns() ? std::optional(0.0) : std::nullopt;
    for (const std::vector<double>& rank :
         group_.gather({mean_ns, times_ns.front(), times_ns.back(), percentile(times_ns, 50), percentile(times_ns, 90),
                        percentile(times_ns, 99), wrong, stream_ns})) {
      row.time_ns += rank[0] / group_.world_size();
      row.low_ns = std::min(row.low_ns, rank[1]);
      row.high_ns = std::max(row.high_ns, rank[2]);
      row.p50_ns = std::max(row.p50_ns, rank[3]);
      row.p90_ns = std::max(row.p90_ns, rank[4]);
      row.p99_ns = std::max(row.p99_ns, rank[5]);
      row.error_count += std::llround(rank[6]);
      if (row.stream_ns) *row.stream_ns += rank[7] / group_.world_size();
    }
  }

 private:
  // Gives each element of the memory the number of its index.
  template <typename NumberOf>
  void write(const Part& all, void* memory, const NumberOf& number_of) {
    for_pieces(all, memory, [&]<typename Number>(std::vector<Number>& numbers, const Part& piece, Number* place) {
      for (int64_t i = piece.first; i < piece.last; ++i) {
        numbers[i - piece.first] = static_cast<Number>(number_of(i));
      }
      group_.copy(place, numbers.data(), piece.count() * static_cast<int64_t>(sizeof(Number)));
    });
  }

  // The number of elements that are not the sum.
  template <typename NumberOf>
  int64_t wrong_count(const Part& all, void* memory, const NumberOf& number_of) {
    int64_t wrong_count = 0;
    for_pieces(all, memory, [&]<typename Number>(std::vector<Number>& numbers, const Part& piece, Number* place) {
      group_.copy(numbers.data(), place, piece.count() * static_cast<int64_t>(sizeof(Number)));
      for (int64_t i = piece.first; i < piece.last; ++i) {
        wrong_count += static_cast<float>(numbers[i - piece.first]) == number_of(i) ? 0 : 1;
      }
    });
    return wrong_count;
  }

  // Calls `action` with memory of the host, elements, and their place in the network's memory, until all are through.
  template <typename Action>
  void for_pieces(const Part& all, void* memory, const Action& action) {
    with_number(memory_.element, [&]<typename Number>(Number) {
      std::vector<Number> numbers(static_cast<size_t>(std::min(kPieceElements, all.count())));
      for (int64_t first = all.first; first < all.last; first += kPieceElements) {
        action(numbers, Part{first, std::min(first + kPieceElements, all.last)}, static_cast<Number*>(memory) + first);
      }
    });
  }

  Group& group_;
  const Network::Sweep memory_;
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

Network::Sweep memory_of(const SweepOptions& options) {
  return {.size_bytes = sizes_bytes(options).back(), .element = options.element, .has_source = options.out_of_place};
}

std::vector<SweepRow> sweep(Group& group, Network& network, const SweepOptions& options,
                            const std::function<void(const SweepRow&)>& tell) {
  Runner runner(group, network);
  std::vector<SweepRow> rows;
  for (const Op op : kOps) {
    for (const int64_t size_bytes : sizes_bytes(options)) {
      for (const bool in_place : {true, false}) {
        if (!in_place && !options.out_of_place) continue;
        SweepRow& row = rows.emplace_back(
            SweepRow{.op = op, .element = options.element, .in_place = in_place, .size_bytes = size_bytes});
        runner.measure(row, options);
        tell(row);
      }
    }
  }
  return rows;
}

}  // namespace gradcast
