// The ranks of one run of gradcast-bench: threads of one process, or processes that MPI has started.
//
// Thread safety: any thread, but each Group one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gradcast/inproc.h"
#include "gradcast/transport.h"
#include "platform/clock.h"

namespace gradcast {

class Group {
 public:
  virtual ~Group() = default;

  virtual int32_t rank() const = 0;
  virtual int32_t world_size() const = 0;

  // For people: what sends the blocks, with its version, and the device of this rank. Empty where there is none.
  virtual std::string libraries() const { return ""; }
  virtual std::string device() const { return ""; }

  // Zeroed memory that the group's transports sum in: the host's, unless a subclass says otherwise.
  virtual std::shared_ptr<void> allocate(int64_t size_bytes) {
    const auto bytes = std::make_shared<std::vector<std::byte>>(static_cast<size_t>(size_bytes));
    return {bytes, bytes->data()};
  }
  // Between such memory and the host's.
  virtual void copy(void* to, const void* from, int64_t size_bytes) {
    std::memcpy(to, from, static_cast<size_t>(size_bytes));
  }
  // Compute that ends at this time of the steady clock: by default the thread sleeps; on a device a kernel spins.
  virtual void compute_until(int64_t time_ns) { sleep_until(time_ns); }
  // The cost per byte of packing a block of several ranges into a message and unpacking it again, on this rank: by
  // default measured in the host's memory.
  virtual double pack_ns_per_byte();

  // The time on the device's stream of the last operation that has completed; nothing where no device carries it.
  virtual std::optional<double> stream_ns() const { return std::nullopt; }

  // All below are collective.
  virtual std::unique_ptr<Transport> make_transport(std::vector<HostBuffer> buffers) = 0;
  // Every rank's text, by rank.
  virtual std::vector<std::string> gather_texts(const std::string& own) = 0;
  // Every rank's numbers, by rank.
  std::vector<std::vector<double>> gather(const std::vector<double>& own);
  std::string from_first(const std::string& text) { return gather_texts(rank() == 0 ? text : "").front(); }
  void barrier() { gather_texts(""); }
};

// Runs `action` on `world_size` threads. Each has a Group over the in-process transport, whose emulated network has
// this cost. Rethrows the first exception.
void run_as_threads(int32_t world_size, const InprocCost& cost, const std::function<void(Group&)>& action);

// Runs `action` once in this process, one of those that MPI has started; MPI is initialized before and finalized after
// it. An exception ends the processes of all ranks, with its message and exit code 1, since the others would wait for
// this one. kMpi: blocks are sent over MPI, in the memory of the host. kNccl: over NCCL, in that of a device, of which
// each rank of a host takes another one; MPI carries the rest. NCCL has not been run yet. Throws Error{kInvalidOption}
// in a build without MPI, or for kNccl without NCCL.
enum class Carrier { kMpi, kNccl };
void run_under_mpi(Carrier carrier, const std::function<void(Group&)>& action);

}  // namespace gradcast
