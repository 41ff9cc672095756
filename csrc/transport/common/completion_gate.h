// The operations that have been started and not completed: whoever ends one first, completes it; nobody completes it twice.
//
// Backends finish on threads of their own, an abort comes from any thread, and a backend that cannot be interrupted may
// report an operation long after an abort has completed it. All of them come through here.
//
// Thread safety: any thread.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <unordered_set>

#include "gradcast/transport.h"

namespace gradcast {

class Outstanding {
 public:
  void open(CompletionSink* sink) {
    const std::lock_guard lock(mutex_);
    sink_ = sink;
  }

  // False after an abort, whose reason has then completed the operation.
  bool add(int64_t ticket) {
    const std::lock_guard lock(mutex_);
    if (aborted_) {
      report(ticket, reason_.c_str());
      return false;
    }
    tickets_.insert(ticket);
    return true;
  }

  // These do nothing for an operation that has completed already.
  void began(int64_t ticket) noexcept {
    const std::lock_guard lock(mutex_);
    if (tickets_.contains(ticket) && sink_ != nullptr) sink_->began(ticket);
  }
  void queued(int64_t ticket) noexcept {
    const std::lock_guard lock(mutex_);
    if (tickets_.contains(ticket) && sink_ != nullptr) sink_->queued(ticket);
  }
  void complete(int64_t ticket, const char* error) noexcept {
    const std::lock_guard lock(mutex_);
    if (tickets_.erase(ticket) == 0) return;
    failed_ = failed_ || error != nullptr;
    report(ticket, error);
  }

  // What an abort found.
  struct Ended {
    size_t count;        // of operations that it completed
    bool after_failure;  // an operation had failed before: this rank will not go on, and its peers have to learn that
  };

  // Completes everything; later operations complete in add(). The first reason stays; a second abort ends nothing.
  Ended abort(const char* reason) {
    const std::lock_guard lock(mutex_);
    if (aborted_) return {0, false};
    aborted_ = true;
    reason_ = reason;
    const Ended ended{tickets_.size(), failed_};
    failed_ = failed_ || ended.count > 0;
    for (const int64_t ticket : tickets_)
      report(ticket, reason_.c_str());
    tickets_.clear();
    return ended;
  }

  bool aborted() const {
    const std::lock_guard lock(mutex_);
    return aborted_;
  }

  // Whether an operation has failed, or an abort has ended one.
  bool damaged() const {
    const std::lock_guard lock(mutex_);
    return failed_;
  }

  // The sink is not called after this has returned.
  void close() {
    const std::lock_guard lock(mutex_);
    sink_ = nullptr;
  }

 private:
  // The sink is called under the mutex: a close() on another thread must not return, and the sink not go, meanwhile.
  void report(int64_t ticket, const char* error) noexcept {
    if (sink_ != nullptr) sink_->complete(ticket, error);
  }

  mutable std::mutex mutex_;
  CompletionSink* sink_ = nullptr;
  std::unordered_set<int64_t> tickets_;
  bool aborted_ = false;
  bool failed_ = false;
  std::string reason_;
};

}  // namespace gradcast
