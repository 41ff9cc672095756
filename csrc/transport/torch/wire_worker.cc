#include "transport/torch/wire_worker.h"

#include <ATen/ops/empty.h>
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace gradcast {

namespace {

// Tags of messages are 31 bits, two per exchange; when they begin again, the first have long arrived.
constexpr int32_t kNumberCount = 1 << 30;
// How long an aborted message may take to end. A backend that cannot abort it holds the thread for as long as its timeout.
constexpr auto kAbortedWithin = std::chrono::milliseconds(300);

}  // namespace

Exchanges::Exchanges(c10d::ProcessGroup& group, c10::ScalarType wire)
    : group_{group, {}}, wire_(wire), thread_([this] { run(); }) {}

Exchanges::~Exchanges() {
  close();
}

void Exchanges::start(const Row& row, Finished finished) {
  const Exchange::Memory memory = take_memory(Exchange::size_for(row, group_.group.getSize()));
  auto exchange = std::make_unique<Exchange>(group_, row, memory, number_);
  number_ = (number_ + 1) % kNumberCount;
  exchange->begin();
  {
    const std::lock_guard lock(mutex_);
    under_way_.push_back({std::move(exchange), std::move(finished)});
  }
  changed_.notify_one();
}

// As many as exchanges have been under way at once, each for the largest block so far: a plan that repeats allocates nothing.
Exchange::Memory Exchanges::take_memory(int64_t size) {
  const std::lock_guard lock(mutex_);
  if (size > memory_size_) {
    memory_size_ = size;
    free_.clear();
  }
  while (!free_.empty()) {
    const Exchange::Memory memory = std::move(free_.back());
    free_.pop_back();
    if (memory.sent.numel() >= size) return memory;
  }
  const auto allocate = [this] { return at::empty({memory_size_}, wire_); };
  return {allocate(), allocate(), allocate()};
}

void Exchanges::abort() noexcept {
  {
    const std::lock_guard lock(mutex_);
    aborted_ = closed_ = true;
    for (const UnderWay& each : under_way_)
      each.exchange->abort();
  }
  changed_.notify_all();
}

void Exchanges::close() noexcept {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
  if (!thread_.joinable()) return;
  std::unique_lock lock(mutex_);
  const auto has_left = [this] { return has_left_; };
  if (aborted_ && !changed_.wait_for(lock, kAbortedWithin, has_left)) {
    thread_.detach();
    return;
  }
  lock.unlock();
  thread_.join();
}

void Exchanges::run() {
  pthread_setname_np(pthread_self(), "gradcast-wire");
  loop();
  const std::lock_guard lock(mutex_);
  has_left_ = true;
  changed_.notify_all();
}

void Exchanges::loop() {
  Adder adder;
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closed_ || !under_way_.empty(); });
    if (closed_) return;
    Exchange& exchange = *under_way_.front().exchange;
    lock.unlock();
    std::exception_ptr exception;
    try {
      exchange.finish(adder);
    } catch (...) {
      exception = std::current_exception();
    }
    lock.lock();
    if (aborted_) return;
    const UnderWay ended = std::move(under_way_.front());
    under_way_.pop_front();
    if (exception == nullptr) free_.push_back(exchange.memory());
    lock.unlock();
    ended.finished(exception);
    lock.lock();
  }
}

}  // namespace gradcast
