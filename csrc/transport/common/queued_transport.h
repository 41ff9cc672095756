// A transport for libraries whose calls all have to come from one thread, and may block there: it queues the operations
// that it is given, and its own thread begins them.
//
// Thread safety: any thread, within the contract of gradcast/transport.h; protected functions: the transport's own.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gradcast/transport.h"
#include "platform/sync.h"
#include "transport/common/completion_gate.h"
#include "transport/common/host_memory.h"

namespace gradcast {

class QueuedTransport : public Transport {
 public:
  int32_t rank() const noexcept final { return rank_; }
  int32_t world_size() const noexcept final { return world_size_; }

  void open(CompletionSink* sink) noexcept final {
    gate_.open(sink);
    thread_ = std::thread([this] { run(); });
  }
  void start(const Operation& operation) noexcept final GC_EXCLUDES(mutex_) {
    if (!gate_.add(operation.ticket)) return;
    try {
      if (const auto fault = fault_of(operation, extents_)) throw Error(ErrorCode::kInvalidUse, *fault);
      const auto ranges = ranges_of(operation);
      Started started{operation, {ranges.begin(), ranges.end()}};
      started.operation.ranges = started.ranges.data();
      MutexLock lock(mutex_);
      started_.push_back(std::move(started));
    } catch (const std::exception& error) {
      gate_.complete(operation.ticket, error.what());
    }
    changed_.notify_one();
  }
  void abort(const char* reason) noexcept final GC_EXCLUDES(mutex_) {
    gate_.abort(reason);
    {
      MutexLock lock(mutex_);  // else the thread could look before the abort and wait after the notification
    }
    changed_.notify_one();
  }
  void close() noexcept final GC_EXCLUDES(mutex_) {
    gate_.close();
    {
      MutexLock lock(mutex_);
      closing_ = true;
    }
    changed_.notify_one();
    if (thread_.joinable()) thread_.join();
    release();
  }

 protected:
  // An operation with ranges of its own: the engine's are gone after an abort.
  struct Started {
    Operation operation;
    std::vector<Range> ranges;
  };

  // `library` is for messages. Throws Error{kInvalidOption} for a buffer that is not a whole number of elements.
  QueuedTransport(std::vector<HostBuffer> buffers, const char* library)
      : buffers_(std::move(buffers)), library_(library), extents_(extents_of(buffers_)) {
    check_extents(extents_);
  }
  // For the destructor of a subclass, whose run() and release() it calls.
  void end() {
    abort("the transport was destroyed before this operation had finished");
    close();
  }

  // The thread, until is_closing().
  virtual void run() = 0;
  // Gives back what the transport holds of its library. Called at each close(), when the thread has ended.
  virtual void release() noexcept = 0;

  // Waits until an operation is started, the end, an abort (unless it `knows_abort`), or the deadline. Takes all
  // operations.
  std::deque<Started> wait(int64_t deadline_ns, bool knows_abort = false) GC_EXCLUDES(mutex_) {
    std::deque<Started> started;
    MutexLock lock(mutex_);
    while (!closing_ && started_.empty() && (knows_abort || !gate_.aborted()) && steady_now_ns() < deadline_ns)
      changed_.wait_until(mutex_, deadline_ns);
    std::swap(started, started_);
    return started;
  }
  bool is_closing() GC_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return closing_;
  }
  // "all_reduce of 4000 bytes failed on rank 1 of 4 (MPI): no memory".
  std::string what_failed(const Operation& operation, const std::string& why) const {
    return failure_text(operation, rank_, world_size_, library_) + why;
  }

  const std::vector<HostBuffer> buffers_;
  int32_t rank_ = 0;
  int32_t world_size_ = 1;
  CompletionGate gate_;

 private:
  const char* const library_;
  const std::vector<Extent> extents_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<Started> started_ GC_GUARDED_BY(mutex_);
  bool closing_ GC_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace gradcast
