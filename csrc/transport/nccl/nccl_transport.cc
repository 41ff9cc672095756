#include <nccl.h>
#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "calls.h"
#include "gradcast/error.h"
#include "gradcast/nccl.h"
#include "host_memory.h"
#include "outstanding.h"

namespace gradcast {
namespace {

// Between two looks at what is under way: far below what a block takes, and little of a core.
constexpr auto kPause = std::chrono::microseconds(20);
// How long the other ranks may take to close, too, before the communicator is given up instead.
constexpr auto kFarewell = std::chrono::seconds(1);
using Clock = std::chrono::steady_clock;

class NcclTransport final : public DeviceTransport {
 public:
  NcclTransport(const std::string& id, int32_t rank, int32_t world_size, std::vector<DeviceBuffer> buffers,
                const NcclOptions& options);
  ~NcclTransport() override {
    abort("the transport was destroyed before this operation had finished");
    close();
  }

  int32_t rank() const noexcept override { return rank_; }
  int32_t world_size() const noexcept override { return world_size_; }
  void open(CompletionSink* sink) noexcept override;
  void start(const Operation& operation) noexcept override;
  void abort(const char* reason) noexcept override;
  void close() noexcept override;
  void on_written(int32_t buffer, Range range, cudaStream_t stream) override;

 private:
  struct Started {
    Operation operation;
    std::vector<Range> ranges;  // its own: the engine's go with an abort
  };
  // An operation that is on the stream.
  struct Flight {
    int64_t ticket;
    std::string what_failed;
    Event begun;  // nullptr where the device had written the bytes before
    Event ended;
  };

  void acquire(const std::string& id, const NcclOptions& options);
  void connect(const std::string& id, const NcclOptions& options);
  void settle(Clock::time_point deadline, const std::string& action);
  void launch(const Operation& operation);
  void begin(const Operation& operation) noexcept;
  Event recorded_event();
  bool wait_for_writes(const Operation& operation);
  void reduce_in_place(const Operation& operation);
  void run_halves(const Operation& operation);
  void run();
  void look() noexcept;
  bool look_at(Flight& flight) noexcept;
  std::optional<std::string> failure() noexcept;
  void give_up_connection() noexcept;
  bool say_farewell() noexcept;
  void release() noexcept;

  const int32_t rank_;
  const int32_t world_size_;
  const int32_t device_;
  const std::vector<DeviceBuffer> buffers_;
  std::vector<Extent> extents_;
  cudaStream_t stream_ = nullptr;
  Outstanding outstanding_;
  // The thread's alone from open() to close(): NCCL's calls for a communicator must not meet, its questions neither.
  ncclComm_t communicator_ = nullptr;
  bool is_connected_ = false;
  std::vector<void*> registrations_;
  std::deque<Flight> flights_;

  std::mutex writes_mutex_;
  // Recorded again in each iteration: one for each range that was ever written. By buffer and beginning: end, event.
  std::map<std::pair<int32_t, int64_t>, std::pair<int64_t, Event>> writes_;

  // Guarded by mutex_.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Started> started_;
  bool closing_ = false;

  std::thread thread_;
};

NcclTransport::NcclTransport(const std::string& id, int32_t rank, int32_t world_size, std::vector<DeviceBuffer> buffers,
                             const NcclOptions& options)
    : rank_(rank), world_size_(world_size), device_(options.device), buffers_(std::move(buffers)) {
  for (const DeviceBuffer& buffer : buffers_) {
    extents_.push_back({buffer.size_bytes, bytes_of(buffer.element)});
  }
  check_extents(extents_);
  int device_count = 0;
  if (cudaGetDeviceCount(&device_count) != cudaSuccess || device_ < 0 || device_ >= device_count) {
    throw Error(ErrorCode::kInvalidUse, "there is no CUDA device " + std::to_string(device_) + " here, of " +
                                            std::to_string(device_count) +
                                            "; train on the CPU with Gloo or MPI instead");
  }
  try {
    acquire(id, options);
  } catch (...) {
    release();  // the destructor of what was never constructed does not run
    throw;
  }
}

void NcclTransport::acquire(const std::string& id, const NcclOptions& options) {
  const OnDevice current(device_);
  int lowest = 0;
  int highest = 0;
  require(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "name its priorities");
  require(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, highest), "make a stream");
  connect(id, options);
  // A registered buffer is sent from where it lies. Where that is not possible it is copied on the way, as always.
  for (const DeviceBuffer& buffer : buffers_) {
    void* registration = nullptr;
    if (ncclCommRegister(communicator_, buffer.data, static_cast<size_t>(buffer.size_bytes), &registration) ==
        ncclSuccess) {
      registrations_.push_back(registration);
    }
  }
}

void NcclTransport::connect(const std::string& id, const NcclOptions& options) {
  ncclUniqueId unique{};
  int32_t version = 0;
  if (id.size() != sizeof version + sizeof unique) {
    throw Error(ErrorCode::kInvalidOption, "the id is not what new_nccl_id() has returned on one of the ranks");
  }
  std::memcpy(&version, id.data(), sizeof version);
  std::memcpy(&unique, id.data() + sizeof version, sizeof unique);
  if (version != nccl_version()) {
    throw Error(ErrorCode::kInvalidUse, "rank " + std::to_string(rank_) + " has NCCL " + version_text(nccl_version()) +
                                            ", the rank that made the id " + version_text(version) +
                                            "; install the same on all hosts");
  }
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  if (options.cta_count_max > 0) {
    config.maxCTAs = options.cta_count_max;
  }
  const auto deadline = Clock::now() + std::chrono::nanoseconds(options.connect_timeout_ns);
  const std::string action = "connect rank " + std::to_string(rank_) + " of " + std::to_string(world_size_);
  require(ncclCommInitRankConfig(&communicator_, world_size_, unique, rank_, &config), action, communicator_);
  is_connected_ = true;
  settle(deadline, action);
}

// A call of a communicator that does not block has been accepted, not done. The first operations of a kind are done when
// all ranks have come to them, which connects them: that may take as long as the slowest rank does.
void NcclTransport::settle(Clock::time_point deadline, const std::string& action) {
  ncclResult_t state = ncclInProgress;
  while (true) {
    require(ncclCommGetAsyncError(communicator_, &state), action, communicator_);
    if (state != ncclInProgress) {
      break;
    }
    if (outstanding_.aborted()) {
      throw Error(ErrorCode::kCommunication, "given up");  // nobody hears it: the abort has completed everything
    }
    look();
    if (Clock::now() > deadline) {
      give_up_connection();
      throw Error(ErrorCode::kCommunication,
                  "NCCL could not " + action + " in time: not every rank has come; NCCL_DEBUG=INFO shows which have");
    }
    std::this_thread::sleep_for(kPause);
  }
  require(state, action, communicator_);
}

void NcclTransport::open(CompletionSink* sink) noexcept {
  outstanding_.open(sink);
  thread_ = std::thread([this] { run(); });
}

void NcclTransport::start(const Operation& operation) noexcept {
  if (!outstanding_.add(operation.ticket)) {
    return;
  }
  try {
    if (const auto fault = fault_of(operation, extents_)) {
      throw Error(ErrorCode::kInvalidUse, *fault);
    }
    const auto ranges = ranges_of(operation);
    Started started{operation, {ranges.begin(), ranges.end()}};
    {
      std::lock_guard lock(mutex_);
      started_.push_back(std::move(started));
    }
    changed_.notify_one();
  } catch (const std::exception& error) {
    outstanding_.complete(operation.ticket, error.what());
  }
}

void NcclTransport::begin(const Operation& operation) noexcept {
  try {
    launch(operation);
  } catch (const std::exception& error) {
    outstanding_.complete(operation.ticket, error.what());
  }
}

void NcclTransport::launch(const Operation& operation) {
  Event begun = wait_for_writes(operation) ? recorded_event() : nullptr;
  operation.op == Op::kAllReduce ? reduce_in_place(operation) : run_halves(operation);
  settle(Clock::time_point::max(), "start a block");
  flights_.push_back(
      {operation.ticket, failure_text(operation, rank_, world_size_, "NCCL"), std::move(begun), recorded_event()});
}

// Where the stream is now.
Event NcclTransport::recorded_event() {
  cudaEvent_t made = nullptr;
  require(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "make an event");
  Event event(made);
  require(cudaEventRecord(event.get(), stream_), "record an event");
  return event;
}

// Returns whether some of the operation's bytes are still to be written.
bool NcclTransport::wait_for_writes(const Operation& operation) {
  bool is_waiting = false;
  std::lock_guard lock(writes_mutex_);
  for (const Range& range : ranges_of(operation)) {
    for (const auto& [place, write] : writes_) {
      const auto& [buffer, lo_bytes] = place;
      const auto& [hi_bytes, event] = write;
      if (buffer == operation.buffer && lo_bytes < range.hi_bytes && range.lo_bytes < hi_bytes) {
        require(cudaStreamWaitEvent(stream_, event.get(), 0), "wait for a gradient");
        if (cudaEventQuery(event.get()) == cudaErrorNotReady) {
          is_waiting = true;
          cudaGetLastError();  // whoever asks for this thread's last error next did not make it
        }
      }
    }
  }
  return is_waiting;
}

// Several ranges as one launch, each in its place: nothing is packed.
void NcclTransport::reduce_in_place(const Operation& operation) {
  const DeviceBuffer& buffer = buffers_[operation.buffer];
  require(ncclGroupStart(), "begin a block");
  ncclResult_t result = ncclSuccess;
  for (const Range& range : ranges_of(operation)) {
    auto* place = static_cast<char*>(buffer.data) + range.lo_bytes;
    const auto count = static_cast<size_t>(range.size_bytes() / bytes_of(buffer.element));
    result = ncclAllReduce(place, place, count, type_of(buffer.element), ncclSum, communicator_, stream_);
    if (result != ncclSuccess && result != ncclInProgress) {
      break;
    }
  }
  require(ncclGroupEnd(), "end a block", communicator_);
  require(result, "all-reduce a block", communicator_);
}

// All parts of a reduce-scatter or all-gather are of one length for NCCL, so a block is padded in memory of its own.
void NcclTransport::run_halves(const Operation& operation) {
  const DeviceBuffer& buffer = buffers_[operation.buffer];
  const int64_t element_count = size_bytes(operation) / bytes_of(buffer.element);
  const int64_t part_count = part_of(0, world_size_, element_count).count();
  const auto part_bytes = static_cast<size_t>(part_count * bytes_of(buffer.element));
  void* memory = nullptr;
  require(cudaMallocAsync(&memory, part_bytes * static_cast<size_t>(world_size_), stream_), "hold a block on its way");
  const auto give_back = [this](char* unused) { cudaFreeAsync(unused, stream_); };
  const std::unique_ptr<char, decltype(give_back)> owner(static_cast<char*>(memory), give_back);
  char* const message = owner.get();
  const auto copy = [&](bool is_inward) {
    char* place = message;
    for (const Range& range : ranges_of(operation)) {
      char* gradients = static_cast<char*>(buffer.data) + range.lo_bytes;
      const auto size = static_cast<size_t>(range.size_bytes());
      require(cudaMemcpyAsync(is_inward ? place : gradients, is_inward ? gradients : place, size,
                              cudaMemcpyDeviceToDevice, stream_),
              "copy a block");
      place += size;
    }
  };
  copy(true);
  char* own = message + part_bytes * static_cast<size_t>(rank_);
  const ncclDataType_t type = type_of(buffer.element);
  const ncclResult_t result =
      operation.op == Op::kReduceScatter
          ? ncclReduceScatter(message, own, static_cast<size_t>(part_count), type, ncclSum, communicator_, stream_)
          : ncclAllGather(own, message, static_cast<size_t>(part_count), type, communicator_, stream_);
  require(result, "start half of an all-reduce", communicator_);
  settle(Clock::time_point::max(), "start a block");
  copy(false);
}

void NcclTransport::run() {
  pthread_setname_np(pthread_self(), "gradcast-nccl");
  cudaSetDevice(device_);
  std::unique_lock lock(mutex_);
  while (true) {
    const auto has_news = [this] { return closing_ || !started_.empty() || (is_connected_ && outstanding_.aborted()); };
    if (flights_.empty()) {
      changed_.wait(lock, has_news);
    } else {
      changed_.wait_for(lock, kPause, [this] { return !started_.empty(); });
    }
    if (outstanding_.aborted()) {
      // Kernels that wait for other ranks end by it, the peers learn that this rank will not go on, also where nothing is
      // in flight, and the stream goes on.
      give_up_connection();
      flights_.clear();
      started_.clear();
    }
    if (started_.empty() && flights_.empty()) {
      if (closing_) return;
      continue;
    }
    std::optional<Started> next;
    if (!started_.empty()) {
      next = std::move(started_.front());
      started_.pop_front();
    }
    lock.unlock();
    if (next) {
      next->operation.ranges = next->ranges.data();
      begin(next->operation);
    }
    look();
    lock.lock();
  }
}

// Tells of what has ended. The stream ends operations in their order.
void NcclTransport::look() noexcept {
  while (!flights_.empty() && look_at(flights_.front()))
    flights_.pop_front();
}

// Returns whether it has ended, well or not.
bool NcclTransport::look_at(Flight& flight) noexcept {
  cudaError_t state = cudaSuccess;
  if (flight.begun != nullptr && (state = cudaEventQuery(flight.begun.get())) == cudaSuccess) {
    outstanding_.began(flight.ticket);
    flight.begun.reset();
  }
  if (state == cudaSuccess) {
    state = cudaEventQuery(flight.ended.get());
  }
  if (state == cudaSuccess) {
    outstanding_.complete(flight.ticket, nullptr);
    return true;
  }
  const std::optional<std::string> failed = failure();
  if (state == cudaErrorNotReady && !failed) return false;
  outstanding_.complete(flight.ticket, (flight.what_failed + failed.value_or(cudaGetErrorString(state))).c_str());
  return true;
}

// What has gone wrong with the communicator, of itself or of a peer.
std::optional<std::string> NcclTransport::failure() noexcept {
  if (!is_connected_) {
    return "the communicator was aborted";
  }
  ncclResult_t state = ncclSuccess;
  if (ncclCommGetAsyncError(communicator_, &state) == ncclSuccess &&
      (state == ncclSuccess || state == ncclInProgress)) {
    return std::nullopt;
  }
  return ncclGetErrorString(state);
}

void NcclTransport::abort(const char* reason) noexcept {
  outstanding_.abort(reason);
  {
    std::lock_guard lock(mutex_);  // the thread is waiting or will look: it misses nothing
  }
  changed_.notify_one();
}

void NcclTransport::give_up_connection() noexcept {
  if (is_connected_) {
    ncclCommAbort(communicator_);
    is_connected_ = false;
  }
}

void NcclTransport::close() noexcept {
  outstanding_.close();
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) {
    thread_.join();
  }
  release();
}

// Returns whether the communicator has ended well: not with an error, and not where other ranks of this host go on.
bool NcclTransport::say_farewell() noexcept {
  if (outstanding_.aborted() || failure()) return false;
  const ncclResult_t begun = ncclCommFinalize(communicator_);
  if (begun != ncclSuccess && begun != ncclInProgress) return false;
  const auto deadline = Clock::now() + kFarewell;
  ncclResult_t state = ncclInProgress;
  while (ncclCommGetAsyncError(communicator_, &state) == ncclSuccess && state == ncclInProgress &&
         Clock::now() < deadline) {
    std::this_thread::sleep_for(kPause);
  }
  return state == ncclSuccess;
}

void NcclTransport::release() noexcept {
  if (is_connected_) {
    for (void* registration : registrations_) {
      ncclCommDeregister(communicator_, registration);
    }
    if (say_farewell()) {
      ncclCommDestroy(communicator_);
      is_connected_ = false;
    }
    give_up_connection();  // what an error has left, ncclCommDestroy would wait for
  }
  writes_.clear();
  if (stream_ != nullptr) {
    cudaStreamDestroy(stream_);
    stream_ = nullptr;
  }
}

void NcclTransport::on_written(int32_t buffer, Range range, cudaStream_t stream) {
  if (buffer < 0 || static_cast<size_t>(buffer) >= buffers_.size()) {
    throw Error(ErrorCode::kInvalidOption,
                "buffer " + std::to_string(buffer) + " does not exist; there are " + std::to_string(buffers_.size()));
  }
  const OnDevice current(device_);
  std::lock_guard lock(writes_mutex_);
  auto& [hi_bytes, event] = writes_[{buffer, range.lo_bytes}];
  hi_bytes = range.hi_bytes;
  if (event == nullptr) {
    cudaEvent_t made = nullptr;
    require(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "make an event");
    event.reset(made);
  }
  require(cudaEventRecord(event.get(), stream), "record an event");
}

}  // namespace

std::string new_nccl_id() {
  ncclUniqueId unique{};
  require(ncclGetUniqueId(&unique), "make an id");
  const int32_t version = nccl_version();
  std::string id(sizeof version + sizeof unique, '\0');
  std::memcpy(id.data(), &version, sizeof version);
  std::memcpy(id.data() + sizeof version, &unique, sizeof unique);
  return id;
}

std::unique_ptr<DeviceTransport> make_nccl_transport(const std::string& id, int32_t rank, int32_t world_size,
                                                     std::vector<DeviceBuffer> buffers, const NcclOptions& options) {
  return std::make_unique<NcclTransport>(id, rank, world_size, std::move(buffers), options);
}

}  // namespace gradcast
