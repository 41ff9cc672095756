#include "transport/nccl/communicator.h"

#include <cstring>

#include "gradcast/error.h"
#include "platform/clock.h"
#include "transport/nccl/calls.h"

namespace gradcast {
namespace {

// Between two polls: far below what a block takes, and cheap.
constexpr int64_t kPauseNs = 20'000;
// How long the destructor waits for the other ranks before it aborts the communicator instead.
constexpr int64_t kFarewellNs = 1'000'000'000;

ncclUniqueId unique_of(const std::string& id, int32_t rank) {
  ncclUniqueId unique{};
  int32_t version = 0;
  if (id.size() != sizeof version + sizeof unique) {
    throw Error(ErrorCode::kInvalidOption, "the id is not what new_nccl_id() has returned on one of the ranks");
  }
  std::memcpy(&version, id.data(), sizeof version);
  std::memcpy(&unique, id.data() + sizeof version, sizeof unique);
  if (version != nccl_version()) {
    throw Error(ErrorCode::kInvalidUse, "rank " + std::to_string(rank) + " has NCCL " + version_text(nccl_version()) +
                                            ", the rank that made the id " + version_text(version) +
                                            "; install the same on all hosts");
  }
  return unique;
}

}  // namespace

Communicator::Communicator(const std::string& id, int32_t rank, int32_t world_size, const NcclOptions& options) {
  const ncclUniqueId unique = unique_of(id, rank);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  const int64_t deadline_ns = deadline_after(options.connect_timeout_ns);
  const std::string action = "connect rank " + std::to_string(rank) + " of " + std::to_string(world_size);
  require(ncclCommInitRankConfig(&communicator_, world_size, unique, rank, &config), action, communicator_);
  is_connected_ = true;
  try {
    settle(deadline_ns, action, [] {});
  } catch (...) {
    give_up();  // the destructor of what was never constructed does not run
    throw;
  }
}

void Communicator::register_memory(void* data, int64_t size_bytes) {
  void* registration = nullptr;
  if (ncclCommRegister(communicator_, data, static_cast<size_t>(size_bytes), &registration) == ncclSuccess) {
    registrations_.push_back(registration);
  }
}

void Communicator::settle(int64_t deadline_ns, const std::string& action, const std::function<void()>& meanwhile) {
  ncclResult_t state = ncclInProgress;
  while (true) {
    require(ncclCommGetAsyncError(communicator_, &state), action, communicator_);
    if (state != ncclInProgress) break;
    meanwhile();
    if (steady_now_ns() > deadline_ns) {
      give_up();
      throw Error(ErrorCode::kCommunication,
                  "NCCL could not " + action + " in time: not every rank has come; NCCL_DEBUG=INFO shows which have");
    }
    sleep_until(steady_now_ns() + kPauseNs);
  }
  require(state, action, communicator_);
}

std::optional<std::string> Communicator::failure() noexcept {
  if (!is_connected_) {
    return "the communicator was aborted; what has ended it was said before: go on with a new transport on every rank";
  }
  ncclResult_t state = ncclSuccess;
  if (const ncclResult_t asked = ncclCommGetAsyncError(communicator_, &state); asked != ncclSuccess) state = asked;
  if (state == ncclSuccess || state == ncclInProgress) return std::nullopt;
  return ncclGetErrorString(state);
}

void Communicator::give_up() noexcept {
  if (is_connected_) {
    ncclCommAbort(communicator_);
    is_connected_ = false;
  }
}

Communicator::~Communicator() {
  if (!is_connected_) return;
  for (void* registration : registrations_) {
    ncclCommDeregister(communicator_, registration);
  }
  if (!failure() && say_farewell()) {
    ncclCommDestroy(communicator_);
    is_connected_ = false;
  }
  give_up();  // ncclCommDestroy would wait for operations that an error has left behind
}

// Returns whether all ranks have ended the communicator. False, for instance, while another rank of this host goes on.
bool Communicator::say_farewell() noexcept {
  const ncclResult_t begun = ncclCommFinalize(communicator_);
  if (begun != ncclSuccess && begun != ncclInProgress) return false;
  const int64_t deadline_ns = steady_now_ns() + kFarewellNs;
  ncclResult_t state = ncclInProgress;
  while (ncclCommGetAsyncError(communicator_, &state) == ncclSuccess && state == ncclInProgress &&
         steady_now_ns() < deadline_ns) {
    sleep_until(steady_now_ns() + kPauseNs);
  }
  return state == ncclSuccess;
}

std::string new_nccl_id() {
  ncclUniqueId unique{};
  require(ncclGetUniqueId(&unique), "make an id");
  const int32_t version = nccl_version();
  std::string id(sizeof version + sizeof unique, '\0');
  std::memcpy(id.data(), &version, sizeof version);
  std::memcpy(id.data() + sizeof version, &unique, sizeof unique);
  return id;
}

}  // namespace gradcast
