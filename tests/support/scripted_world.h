// An in-process world in which chosen operations of chosen ranks are late or fail.
//
// Each rank's transport wraps one of gradcast/inproc.h and holds operations back before the wire sees them. The wire
// itself knows nothing of scripts: it waits for a rank that is late, as a real network does.
//
// Thread safety: any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gradcast/inproc.h"
#include "gradcast/transport.h"

namespace gradcast {

class ScriptedWorld {
 public:
  explicit ScriptedWorld(int32_t world_size, const InprocCost& cost = {});

  int32_t world_size() const { return world_.world_size(); }
  // As InprocWorld::transport. It may outlive the world.
  std::unique_ptr<Transport> transport(int32_t rank, std::vector<HostBuffer> buffers);

  // Operation number `operation_index` of `rank`, counted from 0, reaches the wire this much later than it is started.
  void delay(int32_t rank, int64_t operation_index, int64_t delay_ns);
  // It fails with this message and never reaches the wire, nor does any later operation of the rank: the others wait
  // until the rank aborts.
  void fail(int32_t rank, int64_t operation_index, const std::string& message);

 private:
  class Scripts;
  class RankTransport;

  InprocWorld world_;
  std::shared_ptr<Scripts> scripts_;
};

}  // namespace gradcast
