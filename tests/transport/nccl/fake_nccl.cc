// Operations of a communicator, in the order in which each rank calls them, run when all its ranks' streams have come
// to them. A rank that is aborted leaves: its own operations end, those of the others wait on, as NCCL's do inside of a
// host.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/transport/nccl/fake_device.h"
#include "transport/common/numbers.h"

namespace {

enum class Kind { kSum, kScatter, kGather };

struct Call {
  Kind kind;
  const void* from;
  void* to;
  size_t count;  // as NCCL counts: of all, or of a part
  gradcast::Element element;
};

// What all ranks of one communicator have in common.
struct Room {
  std::mutex mutex;
  std::condition_variable changed;
  int size = 0;
  std::set<int> present, called, leaving;
  std::set<int> devices;
  struct Meeting {
    std::map<int, std::vector<Call>> calls;
    bool done = false;
  };
  std::map<size_t, Meeting> meetings;  // by number of the operation
};

std::mutex rooms_mutex;
std::map<std::string, std::shared_ptr<Room>> rooms;
std::set<ncclComm_t> open_communicators;
std::atomic<int> nccl_version_now = 22900;
std::atomic<int> id_count = 0, abort_count = 0, destruction_count = 0;
thread_local bool is_grouping = false;
thread_local std::vector<Call> grouped;
thread_local ncclComm_t grouped_on = nullptr;
thread_local cudaStream_t grouped_stream = nullptr;
thread_local std::string last_error;

template <typename Number>
void run_call(Room::Meeting& meeting, int size, size_t at) {
  const Call& first = meeting.calls.begin()->second[at];
  const size_t total = first.kind == Kind::kSum ? first.count : first.count * static_cast<size_t>(size);
  std::vector<Number> result(total);
  for (const auto& [rank, calls] : meeting.calls) {
    const Call& call = calls[at];
    if (call.kind == Kind::kGather) {
      std::memcpy(result.data() + static_cast<size_t>(rank) * call.count, call.from, call.count * sizeof(Number));
    } else {
      std::transform(result.begin(), result.end(), static_cast<const Number*>(call.from), result.begin(),
                     std::plus<>());
    }
  }
  for (const auto& [rank, calls] : meeting.calls) {
    const Call& call = calls[at];
    const size_t first_element = call.kind == Kind::kScatter ? static_cast<size_t>(rank) * call.count : 0;
    const size_t count = call.kind == Kind::kScatter ? call.count : total;
    std::memcpy(call.to, result.data() + first_element, count * sizeof(Number));
  }
}

void run_calls(Room::Meeting& meeting, int size) {
  const std::vector<Call>& calls = meeting.calls.begin()->second;
  for (size_t at = 0; at < calls.size(); ++at)
    gradcast::with_number(calls[at].element, [&]<typename Number>(Number) { run_call<Number>(meeting, size, at); });
}

}  // namespace

struct ncclComm {
  std::shared_ptr<Room> room;
  int rank = 0;
  size_t operation_count = 0;
  std::shared_ptr<std::atomic<bool>> aborted = std::make_shared<std::atomic<bool>>(false);
  std::atomic<bool> broken = false;
  bool finalized = false;
};

namespace {

void put_calls(ncclComm_t communicator, std::vector<Call> calls, cudaStream_t stream) {
  const std::shared_ptr<Room> room = communicator->room;
  const size_t number = communicator->operation_count++;
  const int rank = communicator->rank;
  const auto aborted = communicator->aborted;
  {
    const std::lock_guard lock(room->mutex);
    room->called.insert(rank);
  }
  fake::put(stream, [room, number, rank, aborted, calls = std::move(calls)] {
    std::unique_lock lock(room->mutex);
    Room::Meeting& meeting = room->meetings[number];
    meeting.calls[rank] = calls;
    if (meeting.calls.size() == static_cast<size_t>(room->size)) {
      run_calls(meeting, room->size);
      meeting.done = true;
      room->changed.notify_all();
    }
    room->changed.wait(lock, [&] { return meeting.done || *aborted; });
  });
}

ncclResult_t add_call(Kind kind, const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t communicator,
                      cudaStream_t stream) {
  if (type != ncclFloat32 && type != ncclBfloat16) return ncclInvalidArgument;
  const Call call{kind, from, to, count,
                  type == ncclFloat32 ? gradcast::Element::kFloat32 : gradcast::Element::kBFloat16};
  if (is_grouping) {
    grouped.push_back(call);
    grouped_on = communicator;
    grouped_stream = stream;
  } else {
    put_calls(communicator, {call}, stream);
  }
  return ncclInProgress;
}

}  // namespace

namespace fake {

int version() {
  return nccl_version_now;
}
void set_version(int version) {
  nccl_version_now = version;
}
void break_connections(int rank) {
  const std::lock_guard lock(rooms_mutex);
  for (const ncclComm_t each : open_communicators) {
    if (each->rank == rank) each->broken = true;
  }
}
int communicators() {
  const std::lock_guard lock(rooms_mutex);
  return static_cast<int>(open_communicators.size());
}
int aborts() {
  return abort_count;
}
int destructions() {
  return destruction_count;
}

}  // namespace fake

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  *version = nccl_version_now;
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclRemoteError ? "remote process exited or there was a network error" : "an error of NCCL";
}
const char* ncclGetLastError(ncclComm_t) {
  return last_error.c_str();
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::memset(id, 0, sizeof *id);
  const int number = ++id_count;
  std::memcpy(id->internal, &number, sizeof number);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* communicator, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  if (config->blocking != 0) return ncclInvalidArgument;
  const std::string name(id.internal, sizeof id.internal);
  int device = 0;
  cudaGetDevice(&device);
  const std::lock_guard rooms_lock(rooms_mutex);
  std::shared_ptr<Room>& room = rooms[name];
  if (room == nullptr) room = std::make_shared<Room>();
  const std::lock_guard lock(room->mutex);
  if (!room->devices.insert(device).second) {
    last_error = nccl_version_now < 23000 ? "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000"
                                          : "Multiple Ranks are using the same GPU/Partition. Set "
                                            "NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this configuration.";
    return ncclInvalidUsage;
  }
  room->size = size;
  room->present.insert(rank);
  *communicator = new ncclComm;
  (*communicator)->room = room;
  (*communicator)->rank = rank;
  open_communicators.insert(*communicator);
  return ncclInProgress;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t* state) {
  Room& room = *communicator->room;
  const std::lock_guard lock(room.mutex);
  const auto all = static_cast<size_t>(room.size);
  // The first operation connects: all have to come to it.
  const bool is_connecting =
      room.present.size() < all ||
      (!room.called.empty() && room.called.contains(communicator->rank) && room.called.size() < all);
  *state = communicator->broken                                                      ? ncclRemoteError
           : is_connecting || (communicator->finalized && room.leaving.size() < all) ? ncclInProgress
                                                                                     : ncclSuccess;
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t communicator) {
  {
    const std::lock_guard lock(communicator->room->mutex);
    *communicator->aborted = true;
  }
  communicator->room->changed.notify_all();
  ++abort_count;
  const std::lock_guard lock(rooms_mutex);
  open_communicators.erase(communicator);
  delete communicator;
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t communicator) {
  const std::lock_guard lock(communicator->room->mutex);
  communicator->room->leaving.insert(communicator->rank);
  communicator->finalized = true;
  return ncclInProgress;
}
ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
  ++destruction_count;
  const std::lock_guard lock(rooms_mutex);
  open_communicators.erase(communicator);
  delete communicator;
  return ncclSuccess;
}
ncclResult_t ncclCommRegister(ncclComm_t, void* data, size_t, void** handle) {
  *handle = data;
  return ncclSuccess;
}
ncclResult_t ncclCommDeregister(ncclComm_t, void*) {
  return ncclSuccess;
}
ncclResult_t ncclMemAlloc(void** memory, size_t size) {
  return cudaMalloc(memory, size) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
ncclResult_t ncclMemFree(void* memory) {
  return cudaFree(memory) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
ncclResult_t ncclGroupStart() {
  is_grouping = true;
  grouped.clear();
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  is_grouping = false;
  if (!grouped.empty()) put_calls(grouped_on, std::move(grouped), grouped_stream);
  grouped.clear();
  return ncclInProgress;
}
ncclResult_t ncclAllReduce(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t,
                           ncclComm_t communicator, cudaStream_t stream) {
  return add_call(Kind::kSum, from, to, count, type, communicator, stream);
}
ncclResult_t ncclReduceScatter(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t,
                               ncclComm_t communicator, cudaStream_t stream) {
  return add_call(Kind::kScatter, from, to, count, type, communicator, stream);
}
ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t communicator,
                           cudaStream_t stream) {
  return add_call(Kind::kGather, from, to, count, type, communicator, stream);
}

}  // extern "C"
