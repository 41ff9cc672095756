// The collective sweep: what operations of all sizes cost, in the columns of nccl-tests, and the line through them.
//
// Thread safety: any thread, but each Group one.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "bench/group.h"
#include "bench/network.h"
#include "gradcast/link.h"
#include "gradcast/types.h"

namespace gradcast {

struct SweepOptions {
  Element element = Element::kFloat32;
  bool out_of_place = false;  // each size in place, and then from other memory
  int64_t bytes_min = 1024;
  int64_t bytes_max = 64 << 20;
  double factor = 2;             // from one size to the next
  int32_t iteration_count = 20;  // that count
  int32_t warmup_count = 5;      // before them, which do not
};

struct SweepRow {
  Op op = Op::kAllReduce;
  Element element = Element::kFloat32;
  bool in_place = true;
  int64_t size_bytes = 0;  // of the whole operation: what each rank holds of an all-reduce
  double time_ns = 0;      // the mean over iterations and ranks
  double low_ns = 0;       // the fastest rank's quickest iteration
  double high_ns = 0;      // the slowest rank's slowest one
  // So many of 100 iterations take no longer; each of the rank on which it is highest.
  double p50_ns = 0;
  double p90_ns = 0;
  double p99_ns = 0;
  std::optional<double> stream_ns =
      std::nullopt;         // the mean on the device's stream; nothing where no device carries the operation
  int64_t error_count = 0;  // elements of all ranks that were not the exact sum

  // bytes per ns, that is GB/s, as nccl-tests defines them: of the data, and of a link that carries it.
  double algorithm_bandwidth() const;
  double bus_bandwidth(int32_t world_size) const;
};

// The sweep's memory, of its largest size; smaller ones are the beginning of it.
Network::Sweep memory_of(const SweepOptions& options);

// All sizes of each operation: the same rows on every rank, each passed to `tell` at once. Throws Error{kCommunication}
// where an operation fails, or has not ended after a minute.
std::vector<SweepRow> sweep(Group& group, Network& network, const SweepOptions& options,
                            const std::function<void(const SweepRow&)>& tell);

}  // namespace gradcast
