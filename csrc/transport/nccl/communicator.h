// NCCL's communicator of one rank, whose calls do not block: connected, asked, ended well or given up.
//
// Thread safety: any thread, one at a time: NCCL's calls for a communicator must not meet, its questions neither.
#pragma once

#include <nccl.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "gradcast/nccl.h"

namespace gradcast {

class Communicator {
 public:
  using Clock = std::chrono::steady_clock;

  // Collective. Throws as make_nccl_transport does.
  Communicator(const std::string& id, int32_t rank, int32_t world_size, const NcclOptions& options);
  ~Communicator();  // end()
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  ncclComm_t get() const { return communicator_; }

  // A registered buffer is sent from where it lies. Where that is not possible it is copied on the way, as always.
  void register_memory(void* data, int64_t size_bytes);

  // A call of a communicator that does not block has been accepted, not done. The first operations of a kind are done when
  // all ranks have come to them, which connects them: that may take as long as the slowest rank does. `meanwhile` is called
  // between two looks, and may throw. Throws Error{kCommunication} after the deadline, with the connection given up.
  void settle(Clock::time_point deadline, const std::string& action, const std::function<void()>& meanwhile);

  // What has gone wrong with it, of itself or of a peer.
  std::optional<std::string> failure() noexcept;

  // Kernels that wait for other ranks end by it. Ranks on other hosts learn of it, by a connection that is lost; those of
  // this host may not, whose own operations then end by their timeout. Idempotent.
  void give_up() noexcept;

  // Well only where all ranks end it in time, and nothing has failed before; otherwise it is given up. Idempotent.
  void end() noexcept;

 private:
  bool say_farewell() noexcept;

  ncclComm_t communicator_ = nullptr;
  bool is_connected_ = false;
  std::vector<void*> registrations_;
};

}  // namespace gradcast
