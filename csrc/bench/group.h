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

class Group {
 public:
  virtual ~Group() = default;

  virtual int32_t rank() const = 0;
  virtual int32_t world_size() const = 0;

  // All below are collective.
  virtual std::unique_ptr<Transport> make_transport(std::vector<HostBuffer> buffers) = 0;
  // Every rank's numbers, by rank. REQUIRES: as many on each.
  virtual std::vector<std::vector<double>> gather(const std::vector<double>& own) = 0;
  virtual std::string from_first(const std::string& text) = 0;
  void barrier() { gather({}); }
};

// Runs `action` on so many threads, each with its Group over the in-process transport, whose emulated network has this cost.
// Rethrows the first exception.
void run_as_threads(int32_t world_size, const InprocCost& cost, const std::function<void(Group&)>& action);

// Runs `action` once in this process, with its Group over MPI; MPI is initialized before and finalized after it. An exception
// ends the processes of all ranks, with its message and exit code 1, since the others would wait for this one.
// Throws Error{kInvalidOption} in a build without MPI.
void run_under_mpi(const std::function<void(Group&)>& action);

}  // namespace gradcast
