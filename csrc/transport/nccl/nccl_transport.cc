// The transport over NCCL. start() only queues an operation; the thread puts it on the transport's stream, behind the
// kernels that write its bytes, and polls events for its end. Events also order the caller's streams behind an
// operation.
#include <nccl.h>

#include <chrono>
#include <deque>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include "gradcast/error.h"
#include "gradcast/nccl.h"
#include "platform/sync.h"
#include "platform/thread.h"
#include "transport/common/host_memory.h"
#include "transport/common/operation_queue.h"
#include "transport/common/parts.h"
#include "transport/common/range_map.h"
#include "transport/nccl/calls.h"
#include "transport/nccl/communicator.h"

namespace gradcast {
namespace {

// Between two polls of what is under way: far below what a block takes, and cheap.
constexpr int64_t kPauseNs = 20'000;
using Clock = std::chrono::steady_clock;
// The end of an operation. Its flight has a share of it, and so has each of its ranges.
using SharedEvent = std::shared_ptr<CUevent_st>;

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
  void open(CompletionSink* sink) noexcept override {
    queue_.open(sink, [this] { run(); });
  }
  void start(const Operation& operation) noexcept override { queue_.start(operation); }
  void abort(const char* reason) noexcept override { queue_.abort(reason); }
  void close() noexcept override {
    queue_.close();
    release();
  }
  void on_written(int32_t buffer, Range range, cudaStream_t stream) override;
  void order_behind(int32_t buffer, Range range, cudaStream_t stream) override;

 private:
  // An operation that is on the stream.
  struct Flight {
    int64_t ticket;
    std::string what_failed;
    Event begun;  // nullptr once the device has written the bytes
    Clock::time_point begun_at;
    SharedEvent ended;
  };

  void acquire(const std::string& id, const NcclOptions& options);
  void settle(const Operation& operation);
  void launch(const Operation& operation);
  void begin(const Operation& operation) noexcept;
  Event recorded_event();
  void note_end(const Operation& operation, const SharedEvent& ended);
  bool wait_for_writes(const Operation& operation);
  void reduce_in_place(const Operation& operation);
  void run_half(const Operation& operation);
  void run_half(const Operation& operation, char* message, int64_t part_bytes);
  char* message_memory(size_t size_bytes);
  void run();
  void look() noexcept;
  bool look_at(Flight& flight) noexcept;
  void check_time(const Flight& flight) noexcept;
  void check_buffer(int32_t buffer) const;
  void release() noexcept;

  const int32_t rank_;
  const int32_t world_size_;
  const int32_t device_;
  const std::chrono::nanoseconds timeout_;
  const std::vector<DeviceBuffer> buffers_;
  OperationQueue queue_;
  CompletionGate& gate_ = queue_.gate;
  cudaStream_t stream_ = nullptr;
  // The thread's own from open() to close().
  std::optional<Communicator> communicator_;
  std::deque<Flight> flights_;
  char* message_ = nullptr;  // one is enough, because the stream uses it in order
  size_t message_bytes_ = 0;

  Mutex writes_mutex_;
  // By buffer, beginning and end. An event is recorded again in each iteration, so none is ever removed.
  std::map<std::tuple<int32_t, int64_t, int64_t>, Event> writes_ GC_GUARDED_BY(writes_mutex_);

  Mutex ends_mutex_;
  RangeMap<SharedEvent> ends_ GC_GUARDED_BY(ends_mutex_);  // of the last operation on each byte
};

std::vector<Extent> extents_of(const std::vector<DeviceBuffer>& buffers) {
  std::vector<Extent> extents;
  for (const DeviceBuffer& buffer : buffers) {
    extents.push_back({buffer.size_bytes, bytes_of(buffer.element)});
  }
  return extents;
}

NcclTransport::NcclTransport(const std::string& id, int32_t rank, int32_t world_size, std::vector<DeviceBuffer> buffers,
                             const NcclOptions& options)
    : rank_(rank),
      world_size_(world_size),
      device_(options.device),
      timeout_(options.operation_timeout_ns),
      buffers_(std::move(buffers)),
      queue_(extents_of(buffers_)) {
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
  communicator_.emplace(id, rank_, world_size_, options);
  for (const DeviceBuffer& buffer : buffers_) {
    communicator_->register_memory(buffer.data, buffer.size_bytes);
  }
}

// Waits until NCCL has put the operation on the stream. If that takes too long, all operations fail: the communicator
// is aborted, which also ends the kernels of earlier operations, so their results cannot be trusted.
void NcclTransport::settle(const Operation& operation) {
  try {
    communicator_->settle(Clock::now() + timeout_, "start a block", [this] {
      if (gate_.aborted()) {
        throw Error(ErrorCode::kCommunication, "given up");  // nobody sees this: the abort has completed everything
      }
      look();
    });
  } catch (const Error& error) {
    gate_.abort((failure_text(operation, rank_, world_size_, "NCCL") + error.what()).c_str());
    throw;
  }
}

void NcclTransport::begin(const Operation& operation) noexcept {
  try {
    launch(operation);
  } catch (const std::exception& error) {
    gate_.complete(operation.ticket, error.what());
  }
}

void NcclTransport::launch(const Operation& operation) {
  if (const auto failed = communicator_->failure()) {
    throw Error(ErrorCode::kCommunication, failure_text(operation, rank_, world_size_, "NCCL") + *failed);
  }
  Event begun = wait_for_writes(operation) ? recorded_event() : nullptr;
  operation.op == Op::kAllReduce ? reduce_in_place(operation) : run_half(operation);
  settle(operation);
  const SharedEvent ended = recorded_event();
  note_end(operation, ended);
  flights_.push_back(
      {operation.ticket, failure_text(operation, rank_, world_size_, "NCCL"), std::move(begun), Clock::now(), ended});
  gate_.queued(operation.ticket);
}

void NcclTransport::note_end(const Operation& operation, const SharedEvent& ended) {
  decltype(ends_)::Values replaced;
  MutexLock lock(ends_mutex_);
  for (const Range& range : ranges_of(operation))
    ends_.set(operation.buffer, range, ended, replaced);
}

// An event at the point where the stream is now.
Event NcclTransport::recorded_event() {
  cudaEvent_t made = nullptr;
  require(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "make an event");
  Event event(made);
  require(cudaEventRecord(event.get(), stream_), "record an event");
  return event;
}

// Orders the stream behind the kernels that write the operation's bytes. Returns whether one of them has still to run.
bool NcclTransport::wait_for_writes(const Operation& operation) {
  bool is_waiting = false;
  MutexLock lock(writes_mutex_);
  for (const Range& range : ranges_of(operation)) {
    for (const auto& [place, event] : writes_) {
      const auto& [buffer, lo_bytes, hi_bytes] = place;
      if (buffer == operation.buffer && lo_bytes < range.hi_bytes && range.lo_bytes < hi_bytes) {
        require(cudaStreamWaitEvent(stream_, event.get(), 0), "wait for a gradient");
        if (cudaEventQuery(event.get()) == cudaErrorNotReady) {
          is_waiting = true;
          cudaGetLastError();  // clears it: the query's answer is also this thread's "last error"
        }
      }
    }
  }
  return is_waiting;
}

// Several ranges are reduced in one launch, each where it lies, so nothing is packed.
void NcclTransport::reduce_in_place(const Operation& operation) {
  const DeviceBuffer& buffer = buffers_[operation.buffer];
  require(ncclGroupStart(), "begin a block");
  ncclResult_t result = ncclSuccess;
  for (const Range& range : ranges_of(operation)) {
    auto* place = static_cast<char*>(buffer.data) + range.lo_bytes;
    const auto count = static_cast<size_t>(range.size_bytes() / bytes_of(buffer.element));
    result = ncclAllReduce(place, place, count, type_of(buffer.element), ncclSum, communicator_->get(), stream_);
    if (result != ncclSuccess && result != ncclInProgress) {
      break;
    }
  }
  require(ncclGroupEnd(), "end a block", communicator_->get());
  require(result, "all-reduce a block", communicator_->get());
}

// NCCL wants parts of one length. A block that is not contiguous, or does not divide into equal parts, is packed and
// padded in memory of the transport.
void NcclTransport::run_half(const Operation& operation) {
  const DeviceBuffer& buffer = buffers_[operation.buffer];
  const int64_t part_count = part_of(0, world_size_, size_bytes(operation) / bytes_of(buffer.element)).count();
  const int64_t part_bytes = part_count * bytes_of(buffer.element);
  auto* const gradients = static_cast<char*>(buffer.data);
  if (operation.range_count == 1 && part_bytes * world_size_ == size_bytes(operation)) {
    run_half(operation, gradients + operation.ranges[0].lo_bytes, part_bytes);
    return;
  }
  char* const message = message_memory(static_cast<size_t>(part_bytes * world_size_));
  const auto copy = [&](bool is_inward) {
    char* place = message;
    for (const Range& range : ranges_of(operation)) {
      char* own = gradients + range.lo_bytes;
      const auto size = static_cast<size_t>(range.size_bytes());
      require(
          cudaMemcpyAsync(is_inward ? place : own, is_inward ? own : place, size, cudaMemcpyDeviceToDevice, stream_),
          "copy a block");
      place += size;
    }
  };
  copy(true);
  run_half(operation, message, part_bytes);
  settle(operation);
  copy(false);
}

void NcclTransport::run_half(const Operation& operation, char* message, int64_t part_bytes) {
  const DeviceElement element = buffers_[operation.buffer].element;
  const auto count = static_cast<size_t>(part_bytes / bytes_of(element));
  char* const own = message + part_bytes * rank_;
  const ncclResult_t result =
      operation.op == Op::kReduceScatter
          ? ncclReduceScatter(message, own, count, type_of(element), ncclSum, communicator_->get(), stream_)
          : ncclAllGather(own, message, count, type_of(element), communicator_->get(), stream_);
  require(result, "start half of an all-reduce", communicator_->get());
}

// Freeing and allocating are ordered on the stream, so a larger message can replace one that is still in use.
char* NcclTransport::message_memory(size_t size_bytes) {
  if (size_bytes <= message_bytes_) return message_;
  if (message_ != nullptr) require(cudaFreeAsync(message_, stream_), "give memory back");
  message_ = nullptr;
  message_bytes_ = 0;
  void* memory = nullptr;
  require(cudaMallocAsync(&memory, size_bytes, stream_), "hold a block on its way");
  message_ = static_cast<char*>(memory);
  message_bytes_ = size_bytes;
  return message_;
}

void NcclTransport::run() {
  name_this_thread("gradcast-nccl");
  wake_promptly();
  cudaSetDevice(device_);
  bool is_given_up = false;
  do {
    const int64_t deadline_ns = flights_.empty() ? kNever : steady_now_ns() + kPauseNs;
    for (const OperationQueue::Started& each : queue_.wait(deadline_ns, is_given_up)) {
      if (gate_.aborted()) break;
      begin(each.operation);
      look();
    }
    if (gate_.aborted()) {
      // Also if nothing is in flight: the peers must learn of it, and work on the stream must end.
      communicator_->give_up();
      is_given_up = true;
      flights_.clear();
    }
    look();
  } while (!flights_.empty() || !queue_.is_closing());
}

// Reports what has ended. The stream ends operations in order.
void NcclTransport::look() noexcept {
  while (!flights_.empty() && look_at(flights_.front()))
    flights_.pop_front();
}

// Returns whether the operation has ended, with or without an error.
bool NcclTransport::look_at(Flight& flight) noexcept {
  cudaError_t state = cudaSuccess;
  if (flight.begun != nullptr && (state = cudaEventQuery(flight.begun.get())) == cudaSuccess) {
    gate_.began(flight.ticket);
    flight.begun.reset();
    flight.begun_at = Clock::now();
  }
  if (state == cudaSuccess) {
    state = cudaEventQuery(flight.ended.get());
  }
  if (state == cudaSuccess) {
    gate_.complete(flight.ticket, nullptr);
    return true;
  }
  const std::optional<std::string> failed = communicator_->failure();
  if (state == cudaErrorNotReady && !failed) {
    check_time(flight);
    return false;
  }
  gate_.complete(flight.ticket, (flight.what_failed + failed.value_or(cudaGetErrorString(state))).c_str());
  return true;
}

// NCCL itself never notices that another rank of this host has given up or never comes.
void NcclTransport::check_time(const Flight& flight) noexcept {
  if (flight.begun != nullptr || Clock::now() - flight.begun_at < timeout_) return;
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(timeout_).count();
  gate_.abort((flight.what_failed + "it has not ended in " + std::to_string(ms) +
               " ms; another rank has stopped, or is slower than NcclOptions::operation_timeout_ns allows")
                  .c_str());
}

void NcclTransport::release() noexcept {
  if (communicator_ && gate_.aborted()) communicator_->give_up();
  communicator_.reset();
  {
    MutexLock lock(writes_mutex_);
    writes_.clear();
  }
  {
    MutexLock lock(ends_mutex_);
    ends_.clear();
  }
  if (message_ != nullptr) cudaFreeAsync(message_, stream_);
  message_ = nullptr;
  if (stream_ != nullptr) {
    cudaStreamDestroy(stream_);
    stream_ = nullptr;
  }
}

void NcclTransport::check_buffer(int32_t buffer) const {
  if (buffer < 0 || static_cast<size_t>(buffer) >= buffers_.size()) {
    throw Error(ErrorCode::kInvalidOption,
                "buffer " + std::to_string(buffer) + " does not exist; there are " + std::to_string(buffers_.size()));
  }
}

void NcclTransport::on_written(int32_t buffer, Range range, cudaStream_t stream) {
  check_buffer(buffer);
  const OnDevice current(device_);
  MutexLock lock(writes_mutex_);
  Event& event = writes_[{buffer, range.lo_bytes, range.hi_bytes}];
  if (event == nullptr) {
    cudaEvent_t made = nullptr;
    require(cudaEventCreateWithFlags(&made, cudaEventDisableTiming), "make an event");
    event.reset(made);
  }
  require(cudaEventRecord(event.get(), stream), "record an event");
}

void NcclTransport::order_behind(int32_t buffer, Range range, cudaStream_t stream) {
  check_buffer(buffer);
  const OnDevice current(device_);
  MutexLock lock(ends_mutex_);
  const CUevent_st* last = nullptr;  // ranges of one operation are often neighbours
  ends_.for_each(buffer, range, [&](const SharedEvent& ended) {
    if (ended.get() == last) return;
    require(cudaStreamWaitEvent(stream, ended.get(), 0), "wait for a block");
    last = ended.get();
  });
}

}  // namespace

std::unique_ptr<DeviceTransport> make_nccl_transport(const std::string& id, int32_t rank, int32_t world_size,
                                                     std::vector<DeviceBuffer> buffers, const NcclOptions& options) {
  return std::make_unique<NcclTransport>(id, rank, world_size, std::move(buffers), options);
}

}  // namespace gradcast
