// The transport over NCCL. start() only queues an operation; the thread puts it on the transport's stream and polls an
// event for its end.
#include <nccl.h>

#include <cmath>
#include <memory>
#include <optional>
#include <utility>

#include "gradcast/error.h"
#include "gradcast/nccl.h"
#include "platform/thread.h"
#include "transport/common/host_memory.h"
#include "transport/common/parts.h"
#include "transport/common/queued_transport.h"
#include "transport/common/stream_points.h"
#include "transport/nccl/calls.h"
#include "transport/nccl/communicator.h"

namespace gradcast {
namespace {

// Between two polls of what is under way: far below what a block takes, and cheap.
constexpr int64_t kPauseNs = 20'000;

class NcclTransport final : public QueuedTransport {
 public:
  NcclTransport(const std::string& id, int32_t rank, int32_t world_size, std::vector<HostBuffer> buffers,
                const NcclOptions& options);
  ~NcclTransport() override { end(); }

 private:
  // An operation that is on the stream.
  struct Flight {
    int64_t ticket;
    std::string what_failed;
    Event began;  // none if nobody asks for times
    Event ended;
    int64_t begun_ns;
  };

  void settle(const Operation& operation);
  void launch(const Operation& operation) noexcept;
  Event recorded_event();
  void complete(const Flight& flight);
  void reduce(const Operation& operation);
  void run_half(const Operation& operation);
  void run_half(const Operation& operation, const char* source, char* message, int64_t part_bytes);
  char* message_memory(size_t size_bytes);
  void run() override;
  bool has_ended(const Flight& flight) noexcept;
  void check_time(const Flight& flight) noexcept;
  void release() noexcept override;

  const int32_t device_;
  const int64_t timeout_ns_;
  const std::function<void(int64_t)> on_stream_time_;
  Stream stream_;
  // The thread's own from open() to close().
  std::optional<Communicator> communicator_;
  StreamPoints flights_;
  char* message_ = nullptr;  // one is enough, because the stream uses it in order
  size_t message_bytes_ = 0;
};

NcclTransport::NcclTransport(const std::string& id, int32_t rank, int32_t world_size, std::vector<HostBuffer> buffers,
                             const NcclOptions& options)
    : QueuedTransport(std::move(buffers), "NCCL"),
      device_(options.device),
      timeout_ns_(options.operation_timeout_ns),
      on_stream_time_(options.on_stream_time) {
  rank_ = rank;
  world_size_ = world_size;
  int device_count = 0;
  if (cudaGetDeviceCount(&device_count) != cudaSuccess || device_ < 0 || device_ >= device_count) {
    throw Error(ErrorCode::kInvalidUse, "there is no CUDA device " + std::to_string(device_) + " here, of " +
                                            std::to_string(device_count) +
                                            "; train on the CPU with Gloo or MPI instead");
  }
  const OnDevice current(device_);
  int lowest = 0;
  int highest = 0;
  require(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "name its priorities");
  cudaStream_t made = nullptr;
  require(cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, highest), "make a stream");
  stream_.reset(made);
  communicator_.emplace(id, rank_, world_size_, options);
  for (const HostBuffer& buffer : buffers_) {
    communicator_->register_memory(buffer.data, buffer.size_bytes);
  }
}

// Waits until NCCL has put the operation on the stream. If that takes too long, all operations fail: the communicator
// is aborted, which also ends the kernels of earlier operations, so their results cannot be trusted.
void NcclTransport::settle(const Operation& operation) {
  try {
    communicator_->settle(deadline_after(timeout_ns_), "start a block", [this] {
      if (gate_.aborted()) {
        throw Error(ErrorCode::kCommunication, "given up");  // nobody sees this: the abort has completed everything
      }
      flights_.report_passed();
    });
  } catch (const Error& error) {
    gate_.abort(what_failed(operation, error.what()).c_str());
    throw;
  }
}

void NcclTransport::launch(const Operation& operation) noexcept {
  try {
    if (const auto failed = communicator_->failure()) {
      throw Error(ErrorCode::kCommunication, what_failed(operation, *failed));
    }
    Event began = on_stream_time_ ? recorded_event() : nullptr;
    operation.op == Op::kAllReduce ? reduce(operation) : run_half(operation);
    settle(operation);
    const std::shared_ptr<const Flight> flight(
        new Flight{operation.ticket, what_failed(operation, ""), std::move(began), recorded_event(), steady_now_ns()});
    flights_.add({[this, flight] { return has_ended(*flight); },
                  [this, flight](const std::exception_ptr&) { complete(*flight); }});
    gate_.queued(operation.ticket);
  } catch (const std::exception& error) {
    gate_.complete(operation.ticket, error.what());
  }
}

// An event at the point where the stream is now.
Event NcclTransport::recorded_event() {
  cudaEvent_t made = nullptr;
  const unsigned int flags = on_stream_time_ ? cudaEventDefault : cudaEventDisableTiming;
  require(cudaEventCreateWithFlags(&made, flags), "make an event");
  Event event(made);
  require(cudaEventRecord(event.get(), stream_.get()), "record an event");
  return event;
}

void NcclTransport::complete(const Flight& flight) {
  float time_ms = 0;
  if (flight.began != nullptr &&
      cudaEventElapsedTime(&time_ms, flight.began.get(), flight.ended.get()) == cudaSuccess) {
    on_stream_time_(std::llround(1e6 * static_cast<double>(time_ms)));
  }
  gate_.complete(flight.ticket, nullptr);
}

// Several ranges are reduced in one launch, each where it lies, so nothing is packed.
void NcclTransport::reduce(const Operation& operation) {
  const HostBuffer& buffer = buffers_[operation.buffer];
  require(ncclGroupStart(), "begin a block");
  ncclResult_t result = ncclSuccess;
  for (const Range& range : ranges_of(operation)) {
    auto* place = static_cast<char*>(buffer.data) + range.lo_bytes;
    const auto count = static_cast<size_t>(range.size_bytes() / element_bytes(buffer.element));
    result = ncclAllReduce(source_of(buffer) + range.lo_bytes, place, count, type_of(buffer.element), ncclSum,
                           communicator_->get(), stream_.get());
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
  const HostBuffer& buffer = buffers_[operation.buffer];
  const int64_t part_count = part_of(0, world_size_, size_bytes(operation) / element_bytes(buffer.element)).count();
  const int64_t part_bytes = part_count * element_bytes(buffer.element);
  auto* const gradients = static_cast<char*>(buffer.data);
  if (operation.range_count == 1 && part_bytes * world_size_ == size_bytes(operation)) {
    const int64_t lo_bytes = operation.ranges[0].lo_bytes;
    run_half(operation, source_of(buffer) + lo_bytes, gradients + lo_bytes, part_bytes);
    return;
  }
  char* const message = message_memory(static_cast<size_t>(part_bytes * world_size_));
  const auto copy = [&](bool is_inward) {
    char* place = message;
    for (const Range& range : ranges_of(operation)) {
      const char* from = is_inward ? source_of(buffer) + range.lo_bytes : place;
      const auto size = static_cast<size_t>(range.size_bytes());
      require(cudaMemcpyAsync(is_inward ? place : gradients + range.lo_bytes, from, size, cudaMemcpyDeviceToDevice,
                              stream_.get()),
              "copy a block");
      place += size;
    }
  };
  copy(true);
  run_half(operation, message, message, part_bytes);
  settle(operation);
  copy(false);
}

void NcclTransport::run_half(const Operation& operation, const char* source, char* message, int64_t part_bytes) {
  const Element element = buffers_[operation.buffer].element;
  const auto count = static_cast<size_t>(part_bytes / element_bytes(element));
  const int64_t own_bytes = part_bytes * rank_;
  const ncclResult_t result =
      operation.op == Op::kReduceScatter
          ? ncclReduceScatter(source, message + own_bytes, count, type_of(element), ncclSum, communicator_->get(),
                              stream_.get())
          : ncclAllGather(source + own_bytes, message, count, type_of(element), communicator_->get(), stream_.get());
  require(result, "start half of an all-reduce", communicator_->get());
}

// Freeing and allocating are ordered on the stream, so a larger message can replace one that is still in use.
char* NcclTransport::message_memory(size_t size_bytes) {
  if (size_bytes <= message_bytes_) return message_;
  if (message_ != nullptr) require(cudaFreeAsync(message_, stream_.get()), "give memory back");
  message_ = nullptr;
  message_bytes_ = 0;
  void* memory = nullptr;
  require(cudaMallocAsync(&memory, size_bytes, stream_.get()), "hold a block on its way");
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
    for (const Started& each : wait(deadline_ns, is_given_up)) {
      if (gate_.aborted()) break;
      launch(each.operation);
      flights_.report_passed();
    }
    if (gate_.aborted()) {
      // Also if nothing is in flight: the peers must learn of it, and work on the stream must end.
      communicator_->give_up();
      is_given_up = true;
    }
    flights_.report_passed();
  } while (!flights_.empty() || !is_closing());
}

// Whether the operation has ended. If it has failed, it is completed with the error here.
bool NcclTransport::has_ended(const Flight& flight) noexcept {
  const cudaError_t state = cudaEventQuery(flight.ended.get());
  if (state == cudaSuccess) return true;
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
  if (steady_now_ns() - flight.begun_ns < timeout_ns_) return;
  gate_.abort((flight.what_failed + "it has not ended in " + std::to_string(timeout_ns_ / 1'000'000) +
               " ms; another rank has stopped, or is slower than NcclOptions::operation_timeout_ns allows")
                  .c_str());
}

void NcclTransport::release() noexcept {
  if (communicator_ && gate_.aborted()) communicator_->give_up();
  communicator_.reset();
  if (message_ != nullptr) cudaFreeAsync(message_, stream_.get());
  message_ = nullptr;
  stream_.reset();
}

}  // namespace

std::unique_ptr<Transport> make_nccl_transport(const std::string& id, int32_t rank, int32_t world_size,
                                               std::vector<HostBuffer> buffers, const NcclOptions& options) {
  return std::make_unique<NcclTransport>(id, rank, world_size, std::move(buffers), options);
}

}  // namespace gradcast
