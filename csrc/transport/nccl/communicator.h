// One rank's NCCL communicator: it connects, reports failures, and ends cleanly or by an abort.
//
// It does not block, although NCCL then starts a thread for each launch: NCCL's user guide ("Fault Tolerance") allows an
// abort only while no thread is inside of a call, and a blocking call waits for other ranks without a limit.
//
// Thread safety: any thread, one at a time, because NCCL allows no concurrent calls for one communicator.
#pragma once

#include <nccl.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "gradcast/nccl.h"

namespace gradcast {

class Communicator {
 public:
  // Collective. Throws as make_nccl_transport does.
  Communicator(const std::string& id, int32_t rank, int32_t world_size, const NcclOptions& options);
  // Ends the communicator cleanly if all ranks end it in time and nothing has failed; otherwise aborts it.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  ncclComm_t get() const { return communicator_; }

  // Lets NCCL send this memory without a copy, if it can. Otherwise it copies, as for any other memory.
  void register_memory(void* data, int64_t size_bytes);

  // Waits until NCCL has carried out a call that it has accepted. The first operations of a kind connect the ranks, so
  // they wait for the slowest one. Calls `meanwhile`, which may throw, between two polls. Throws Error{kCommunication}
  // after the deadline and aborts the communicator.
  void settle(int64_t deadline_ns, const std::string& action, const std::function<void()>& meanwhile);

  // The failure of the communicator, on this rank or on a peer; nothing if it is healthy.
  std::optional<std::string> failure() noexcept;

  // Aborts the communicator, which ends kernels that wait for other ranks. Ranks on other hosts see a lost connection.
  // Ranks of this host may see nothing; their operations end by their timeout. Idempotent.
  void give_up() noexcept;

 private:
  bool say_farewell() noexcept;

  ncclComm_t communicator_ = nullptr;
  bool is_connected_ = false;
  std::vector<void*> registrations_;
};

}  // namespace gradcast
