// A transport of one rank whose operations a test completes by hand, well or badly.
//
// Thread safety: any thread.
#pragma once

#include <pthread.h>

#include <atomic>
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
    char name[32] = "";
    pthread_getname_np(pthread_self(), name, sizeof name);
    thread_name_ = name;
  }

  void start(const Operation& operation) noexcept override {
    {
      std::lock_guard lock(mutex_);
      started_.push_back(operation.ticket);
      if (manner_ != Manner::kAtOnce) open_.push_back(operation.ticket);
    }
    changed_.notify_all();
    if (manner_ == Manner::kAtOnce) complete(operation.ticket);
  }

  void abort(const char* reason) noexcept override {
    std::vector<int64_t> open;
    {
      std::lock_guard lock(mutex_);
      abort_reasons_.push_back(reason);
      if (manner_ != Manner::kStubborn) open = open_;
    }
    for (const int64_t ticket : open)
      complete(ticket, reason);
  }

  void close() noexcept override { closed_ = true; }

  // --- For the test. ---

  // Waits until so many operations have been started; returns whether they were.
  bool await_started(size_t count) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::nanoseconds(kPatienceNs), [&] { return started_.size() >= count; });
  }
  void began(int64_t ticket) { sink_.load()->began(ticket); }
  void queued(int64_t ticket) { sink_.load()->queued(ticket); }
  void timed(int64_t ticket, int64_t duration_ns) { sink_.load()->timed(ticket, duration_ns); }
  // Completes an operation that may, or may not, have been started.
  void complete(int64_t ticket, const char* error = nullptr) {
    {
      std::lock_guard lock(mutex_);
      std::erase(open_, ticket);
    }
    sink_.load()->complete(ticket, error);
  }
  // Completes an operation once it is started, of tickets that count from 0; returns whether it was.
  bool finish(int64_t ticket, const char* error = nullptr) {
    const bool is_started = await_started(static_cast<size_t>(ticket) + 1);
    complete(ticket, error);
    return is_started;
  }
  std::vector<int64_t> started() const { return copy_of(started_); }
  std::vector<std::string> abort_reasons() const { return copy_of(abort_reasons_); }
  // The name of the thread that runs the transport.
  std::string thread_name() const { return copy_of(thread_name_); }
  bool closed() const { return closed_; }

 private:
  template <typename Value>
  Value copy_of(const Value& value) const {
    std::lock_guard lock(mutex_);
    return value;
  }

  const Manner manner_;
  std::atomic<CompletionSink*> sink_ = nullptr;
  std::atomic<bool> closed_ = false;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int64_t> started_, open_;
  std::vector<std::string> abort_reasons_;
  std::string thread_name_;
};

}  // namespace gradcast
