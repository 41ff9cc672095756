#include "transport/torch/wire_worker.h"

#include <ATen/ops/empty.h>

#include <utility>

#include "platform/thread.h"

namespace gradcast {

namespace {

// A message's tag has 31 bits, and an all-reduce takes two tags. By the time numbers repeat, the first messages have
// arrived.
constexpr int32_t kNumberCount = 1 << 30;
// How long an aborted message may take to end. A backend that cannot abort it holds the thread for as long as its
// timeout.
constexpr int64_t kAbortedWithinNs = 300'000'000;

}  // namespace

WireWorker::WireWorker(c10d::ProcessGroup& group, c10::ScalarType wire)
    : group_{group, {}}, wire_(wire), thread_([this] { run(); }) {}

WireWorker::~WireWorker() {
  close();
}

void WireWorker::start(const RangeViews& views, Finished finished) {
  const int64_t size = WireAllReduce::size_for(views, group_.group.getSize());
  auto all_reduce = std::make_unique<WireAllReduce>(group_, views, take_memory(size), number_);
  number_ = (number_ + 1) % kNumberCount;
  all_reduce->begin();
  {
    MutexLock lock(mutex_);
    under_way_.push_back({std::move(all_reduce), std::move(finished)});
  }
  changed_.notify_one();
}

Collective WireWorker::start_collective(Op op, const RangeViews& views) {
  MutexLock lock(group_.mutex);
  return gradcast::start_collective(group_.group, op, views);
}

// There is as much memory as all-reduces have been under way at once, each for the largest block so far: a plan that
// repeats allocates nothing.
WireAllReduce::Memory WireWorker::take_memory(int64_t size) {
  MutexLock lock(mutex_);
  if (size > memory_size_) {
    memory_size_ = size;
    free_.clear();
  }
  while (!free_.empty()) {
    const WireAllReduce::Memory memory = std::move(free_.back());
    free_.pop_back();
    if (memory.sent.numel() >= size) return memory;
  }
  const auto allocate = [size = memory_size_, wire = wire_] { return at::empty({size}, wire); };
  return {allocate(), allocate(), allocate()};
}

void WireWorker::abort() noexcept {
  {
    MutexLock lock(mutex_);
    aborted_ = closed_ = true;
    for (const UnderWay& each : under_way_)
      each.all_reduce->abort();
  }
  changed_.notify_all();
}

void WireWorker::close() noexcept {
  {
    MutexLock lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
  if (!thread_.joinable()) return;
  {
    MutexLock lock(mutex_);
    const int64_t deadline_ns = steady_now_ns() + kAbortedWithinNs;
    while (aborted_ && !has_left_ && steady_now_ns() < deadline_ns)
      changed_.wait_until(mutex_, deadline_ns);
    if (aborted_ && !has_left_) {
      thread_.detach();
      return;
    }
  }
  thread_.join();
}

void WireWorker::run() {
  name_this_thread("gradcast-wire");
  loop();
  MutexLock lock(mutex_);
  has_left_ = true;
  changed_.notify_all();
}

void WireWorker::loop() {
  Adder adder;
  MutexLock lock(mutex_);
  while (true) {
    while (!closed_ && under_way_.empty())
      changed_.wait(mutex_);
    if (closed_) return;
    WireAllReduce& first = *under_way_.front().all_reduce;  // stays there: nobody else takes from the front
    lock.unlock();
    std::exception_ptr exception;
    try {
      first.finish(adder);
    } catch (...) {
      exception = std::current_exception();
    }
    lock.lock();
    if (aborted_) return;
    const UnderWay ended = std::move(under_way_.front());
    under_way_.pop_front();
    if (exception == nullptr) free_.push_back(first.memory());
    lock.unlock();
    ended.finished(exception);
    lock.lock();
  }
}

}  // namespace gradcast
