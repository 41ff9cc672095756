// A transport of one rank whose operations a test completes by hand, well or badly.
//
// Thread safety: any thread.
#pragma once

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "gradcast/transport.h"

namespace gradcast {

// Longer than any machine needs; a test that waits so long has failed.
inline constexpr int64_t kPatienceNs = 20'000'000'000;

class HandTransport final : public Transport {
 public:
  enum class Manner {
    kByHand,    // the test calls complete()
    kAtOnce,    // start() completes its operation before it returns
    kStubborn,  // by hand, and abort() completes nothing, against the contract
  };

  explicit HandTransport(Manner manner = Manner::kByHand) : manner_(manner) {}

  int32_t rank() const noexcept override { return 2; }
  int32_t world_size() const noexcept override { return 5; }
  void open(CompletionSink* sink) noexcept override {
    std::lock_guard lock(mutex_);
    sink_ = sink;
    pthread_getname_np(pthread_self(), thread_name_, sizeof thread_name_);
  }

  void start(const Operation& operation) noexcept override {
    CompletionSink* sink = nullptr;
    {
      std::lock_guard lock(mutex_);
      started_.push_back(operation.ticket);
      sink = sink_;
      if (manner_ != Manner::kAtOnce) {
        open_.push_back(operation.ticket);
      }
    }
    changed_.notify_all();
    if (manner_ == Manner::kAtOnce) {
      sink->complete(operation.ticket, nullptr);
    }
  }

  void abort(const char* reason) noexcept override {
    std::vector<int64_t> open;
    CompletionSink* sink = nullptr;
    {
      std::lock_guard lock(mutex_);
      abort_reasons_.push_back(reason);
      sink = sink_;
      if (manner_ != Manner::kStubborn) {
        std::swap(open, open_);
      }
    }
    for (const int64_t ticket : open) {
      sink->complete(ticket, reason);
    }
  }

  void close() noexcept override {
    std::lock_guard lock(mutex_);
    closed_ = true;
  }

  // --- For the test. ---

  // Waits until so many operations have been started; returns whether they were.
  bool await_started(size_t count) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::nanoseconds(kPatienceNs), [&] { return started_.size() >= count; });
  }
  std::vector<int64_t> started() const {
    std::lock_guard lock(mutex_);
    return started_;
  }
  void began(int64_t ticket) { sink()->began(ticket); }
  void queued(int64_t ticket) { sink()->queued(ticket); }
  // Completes an operation that may, or may not, have been started.
  void complete(int64_t ticket, const char* error = nullptr) {
    CompletionSink* sink = nullptr;
    {
      std::lock_guard lock(mutex_);
      std::erase(open_, ticket);
      sink = sink_;
    }
    sink->complete(ticket, error);
  }
  std::vector<std::string> abort_reasons() const {
    std::lock_guard lock(mutex_);
    return abort_reasons_;
  }
  // Of the thread that runs the transport.
  std::string thread_name() const {
    std::lock_guard lock(mutex_);
    return thread_name_;
  }
  bool closed() const {
    std::lock_guard lock(mutex_);
    return closed_;
  }

 private:
  CompletionSink* sink() const {
    std::lock_guard lock(mutex_);
    return sink_;
  }

  const Manner manner_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  CompletionSink* sink_ = nullptr;
  std::vector<int64_t> started_;
  std::vector<int64_t> open_;
  std::vector<std::string> abort_reasons_;
  char thread_name_[32] = "";
  bool closed_ = false;
};

}  // namespace gradcast
