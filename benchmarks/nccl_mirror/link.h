// The network that the mirror of NCCL pretends: one link for each rank, which all communicators share. An operation
// takes it as soon as it is free, for latency + bytes.
//
// Thread safety: pure; any thread, of the host and of a device.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define MIRROR_ANYWHERE __host__ __device__
#else
#define MIRROR_ANYWHERE
#endif

namespace nccl_mirror {

struct Link {
  double latency_ns = 0;
  double ns_per_byte = 0;

  static constexpr Link of(double gbit_per_s, double latency_us) { return {1e3 * latency_us, 8 / gbit_per_s}; }
};

enum class Traffic {
  kReduceAndGather,  // an all-reduce
  kHalf,             // half of one: a reduce-scatter, an all-gather, an all-to-all
  kThrough,          // to or from one rank, through a chain of all
};

// What a rank sends, and receives, for an operation on `size_bytes` of all `world_size` ranks together, as bandwidth-
// optimal algorithms do (Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms", section 2).
constexpr double wire_bytes(Traffic traffic, double size_bytes, int world_size) {
  if (world_size == 1) return 0;
  const double others = (world_size - 1.0) / world_size;
  switch (traffic) {
    case Traffic::kReduceAndGather:
      return 2 * others * size_bytes;
    case Traffic::kHalf:
      return others * size_bytes;
    case Traffic::kThrough:
      return size_bytes;
  }
  return 0;
}

// `is_first`: of a group of operations that are launched together, whose latencies are one.
constexpr uint64_t duration_ns(const Link& link, double bytes, bool is_first) {
  return static_cast<uint64_t>((is_first ? link.latency_ns : 0) + bytes * link.ns_per_byte);
}

// Takes the link for `duration_ns`, from `now_ns` on or from when it is free. Returns when it is free again.
// `exchange(expected, desired)`: atomically replaces the time at which the link is free, if that is `expected`. Returns
// what it was before.
template <typename Exchange>
MIRROR_ANYWHERE uint64_t take_link(uint64_t now_ns, uint64_t duration_ns, const Exchange& exchange) {
  uint64_t free_ns = 0;
  while (true) {
    const uint64_t end_ns = (free_ns > now_ns ? free_ns : now_ns) + duration_ns;
    const uint64_t before_ns = exchange(free_ns, end_ns);
    if (before_ns == free_ns) return end_ns;
    free_ns = before_ns;
  }
}

}  // namespace nccl_mirror
