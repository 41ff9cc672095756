// The operations that a transport has been given and its own thread has not begun: for libraries whose calls all have
// to come from one thread, and may block there.
//
// Thread safety: any thread; wait() from the transport's own.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "gradcast/transport.h"
#include "platform/sync.h"
#include "transport/common/completion_gate.h"
#include "transport/common/host_memory.h"

namespace gradcast {

class OperationQueue {
 public:
  // An operation with ranges of its own: the engine's are gone after an abort.
  struct Started {
    Operation operation;
    std::vector<Range> ranges;
  };

  // Throws Error{kInvalidOption} for a buffer that is not a whole number of elements.
  explicit OperationQueue(std::vector<Extent> extents) : extents_(std::move(extents)) { check_extents(extents_); }

  // What a transport does in its functions of these names. `run` is the thread, until is_closing().
  void open(CompletionSink* sink, std::function<void()> run) {
    gate.open(sink);
    thread_ = std::thread(std::move(run));
  }
  void start(const Operation& operation) noexcept GC_EXCLUDES(mutex_) {
    if (!gate.add(operation.ticket)) return;
    try {
      if (const auto fault = fault_of(operation, extents_)) throw Error(ErrorCode::kInvalidUse, *fault);
      const auto ranges = ranges_of(operation);
      Started started{operation, {ranges.begin(), ranges.end()}};
      started.operation.ranges = started.ranges.data();
      MutexLock lock(mutex_);
      started_.push_back(std::move(started));
    } catch (const std::exception& error) {
      gate.complete(operation.ticket, error.what());
    }
    changed_.notify_one();
  }
  void abort(const char* reason) noexcept GC_EXCLUDES(mutex_) {
    gate.abort(reason);
    {
      MutexLock lock(mutex_);  // else the thread could look before the abort and wait after the notification
    }
    changed_.notify_one();
  }
  void close() noexcept GC_EXCLUDES(mutex_) {
    gate.close();
    {
      MutexLock lock(mutex_);
      closing_ = true;
    }
    changed_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

  // Waits until an operation is started, the end, an abort (unless it `knows_abort`), or the deadline. Takes all
  // operations.
  std::deque<Started> wait(int64_t deadline_ns, bool knows_abort = false) GC_EXCLUDES(mutex_) {
    std::deque<Started> started;
    MutexLock lock(mutex_);
    while (!closing_ && started_.empty() && (knows_abort || !gate.aborted()) && steady_now_ns() < deadline_ns)
      changed_.wait_until(mutex_, deadline_ns);
    std::swap(started, started_);
    return started;
  }
  bool is_closing() GC_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return closing_;
  }

  CompletionGate gate;

 private:
  const std::vector<Extent> extents_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<Started> started_ GC_GUARDED_BY(mutex_);
  bool closing_ GC_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace gradcast
