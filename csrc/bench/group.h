// The ranks of one run of gradcast-bench: threads of one process, or processes that MPI has started.
//
// Thread safety: any thread, but each Group one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "gradcast/inproc.h"
#include "gradcast/transport.h"

namespace gradcast {

// Memory that a transport sums in: of the host, or of a device.
class Memory {
 public:
  virtual ~Memory() = default;
  // `data` is a device address if the group's transport works on a device.
  virtual HostBuffer buffer() = 0;
  // As many bytes as it has, from and to the host.
  virtual void write(const void* bytes) = 0;
  virtual void read(void* bytes) = 0;
};

class Group {
 public:
  virtual ~Group() = default;

  virtual int32_t rank() const = 0;
  virtual int32_t world_size() const = 0;

  // Zeroed memory; host memory unless a subclass says otherwise.
  virtual std::unique_ptr<Memory> make_memory(int64_t size_bytes, Element element);
  // Compute that ends at this time of the steady clock: by default the thread sleeps; on a device a kernel spins.
  virtual void compute_until(int64_t time_ns);

  // All below are collective.
  virtual std::unique_ptr<Transport> make_transport(std::vector<HostBuffer> buffers) = 0;
  // Every rank's numbers, by rank. REQUIRES: as many on each.
  virtual std::vector<std::vector<double>> gather(const std::vector<double>& own) = 0;
  virtual std::string from_first(const std::string& text) = 0;
  void barrier() { gather({}); }
};

// Runs `action` on `world_size` threads. Each has a Group over the in-process transport, whose emulated network has
// this cost. Rethrows the first exception.
void run_as_threads(int32_t world_size, const InprocCost& cost, const std::function<void(Group&)>& action);

// Runs `action` once in this process, one of those that MPI has started; MPI is initialized before and finalized after
// it. An exception ends the processes of all ranks, with its message and exit code 1, since the others would wait for
// this one. kMpi: blocks travel over MPI, in the memory of the host. kNccl: over NCCL, in that of a device, of which
// each rank of a host takes another one; MPI carries the rest. NCCL has not been run yet. Throws Error{kInvalidOption}
// in a build without MPI, or for kNccl without NCCL.
enum class Carrier { kMpi, kNccl };
void run_under_mpi(Carrier carrier, const std::function<void(Group&)>& action);

}  // namespace gradcast
