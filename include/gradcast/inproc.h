// Ranks as threads of one process, over an emulated wire.
//
// One thread per world is the wire. It takes the operations one after the other, each when all ranks have started it.
// It is busy for beta_ns_per_byte * bytes, after alpha_ns that may pass while the operation before is still on it; it
// sleeps meanwhile, so slow networks can be emulated on few cores. Sums are taken in the order of ranks and are the
// same bits on every rank.
//
// A rank that aborts or closes leaves the world: operations that the others cannot finish without it fail with its name
// and reason. An operation that cannot begin fails on its own rank only, as on a real network; the others wait.
//
// Thread safety: any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gradcast/transport.h"
#include "gradcast/types.h"

namespace gradcast {

// The cost of an operation on the emulated wire.
struct InprocCost {
  double alpha_ns = 0;
  double beta_ns_per_byte = 0;
};

class InprocWorld {
 public:
  // Throws Error{kInvalidOption} unless world_size >= 1 and the costs are not negative.
  explicit InprocWorld(int32_t world_size, const InprocCost& cost = {});
  ~InprocWorld();
  InprocWorld(const InprocWorld&) = delete;
  InprocWorld& operator=(const InprocWorld&) = delete;

  int32_t world_size() const;

  // The transport of one rank; each rank has one. It may outlive the world. After a reduce-scatter it sets the parts of
  // other ranks to NaN, so that no caller relies on undefined values. Throws Error{kInvalidOption} for an unknown
  // rank, a buffer that cuts an element, or a rank that has its transport already.
  std::unique_ptr<Transport> transport(int32_t rank, std::vector<HostBuffer> buffers);

 private:
  class Wire;
  class RankTransport;
  std::shared_ptr<Wire> wire_;
};

}  // namespace gradcast
