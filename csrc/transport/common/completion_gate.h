// The gate that every completion of a transport passes: it lets exactly one through for each operation.
//
// Backends finish operations on threads of their own, an abort comes from any thread, and a backend that cannot be
// interrupted may report an operation long after an abort has completed it. The first of them completes the operation.
//
// Thread safety: any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_set>

#include "gradcast/transport.h"
#include "platform/sync.h"

namespace gradcast {

class CompletionGate {
 public:
  void open(CompletionSink* sink) GC_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    sink_ = sink;
  }

  // To be called when an operation is started. Returns false after an abort, and has then completed it with the abort's
  // reason.
  bool add(int64_t ticket) GC_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (aborted_) {
      report(ticket, reason_.c_str());
      return false;
    }
    tickets_.insert(ticket);
    return true;
  }

  // See CompletionSink. They do nothing for an operation that has completed.
  void began(int64_t ticket) noexcept GC_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (tickets_.contains(ticket) && sink_ != nullptr) sink_->began(ticket);
  }
  void queued(int64_t ticket) noexcept GC_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (tickets_.contains(ticket) && sink_ != nullptr) sink_->queued(ticket);
  }
  void timed(int64_t ticket, int64_t duration_ns) noexcept GC_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (tickets_.contains(ticket) && sink_ != nullptr) sink_->timed(ticket, duration_ns);
  }
  void complete(int64_t ticket, const char* error) noexcept GC_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (tickets_.erase(ticket) == 0) return;
    failed_ = failed_ || error != nullptr;
    report(ticket, error);
  }

  // The result of an abort.
  struct Aborted {
    size_t count;        // operations that it completed
    bool after_failure;  // an operation had failed before, so the peers must learn that this rank will not go on
  };
  // Completes all operations under way with this reason, and later ones in add(). Only the first abort does anything.
  Aborted abort(const char* reason) GC_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    if (aborted_) return {0, false};
    aborted_ = true;
    reason_ = reason;
    const Aborted aborted{tickets_.size(), failed_};
    failed_ = failed_ || aborted.count > 0;
    for (const int64_t ticket : tickets_)
      report(ticket, reason_.c_str());
    tickets_.clear();
    return aborted;
  }

  bool aborted() const GC_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return aborted_;
  }

  // An operation has failed, or an abort has completed one.
  bool has_failed() const GC_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return failed_;
  }

  // The sink is not called after this has returned.
  void close() GC_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    sink_ = nullptr;
  }

 private:
  // Calls the sink under the lock: otherwise close() could return, and the sink be destroyed, during the call.
  void report(int64_t ticket, const char* error) noexcept GC_REQUIRES(mutex_) {
    if (sink_ != nullptr) sink_->complete(ticket, error);
  }

  mutable Mutex mutex_;
  CompletionSink* sink_ GC_GUARDED_BY(mutex_) = nullptr;
  std::unordered_set<int64_t> tickets_ GC_GUARDED_BY(mutex_);  // started and not completed
  bool aborted_ GC_GUARDED_BY(mutex_) = false;
  bool failed_ GC_GUARDED_BY(mutex_) = false;
  std::string reason_ GC_GUARDED_BY(mutex_);
};

}  // namespace gradcast
