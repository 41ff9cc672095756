#include "transport/torch/wire_worker.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <utility>

#include "platform/thread.h"
#include "transport/torch/int8_group.h"

namespace gradcast {

namespace {

// A message's tag has 31 bits, of which an all-reduce takes two. By the time numbers repeat, the first messages have
// arrived.
constexpr int32_t kNumberCount = 1 << 29;
// How long an aborted message may take to end. A backend that cannot abort it holds a thread for as long as its
// timeout.
constexpr int64_t kAbortedWithinNs = 300'000'000;
// On two levels, the most of a block that goes as one all-reduce. A multiple of a group of 8-bit numbers.
constexpr int64_t kPipelinedBytes = 2 << 20;
static_assert(kPipelinedBytes % (kInt8GroupElements * static_cast<int64_t>(sizeof(float))) == 0);

// Cuts ranges into lists of ranges of at most `limit_bytes` each.
std::vector<std::vector<Range>> cut(const std::vector<Range>& ranges, int64_t limit_bytes) {
  std::vector<std::vector<Range>> lists(1);
  int64_t size_bytes = 0;  // of the last list
  for (Range rest : ranges) {
    while (rest.size_bytes() > limit_bytes - size_bytes) {
      const Range first{rest.lo_bytes, rest.lo_bytes + limit_bytes - size_bytes};
      if (first.size_bytes() > 0) lists.back().push_back(first);
      rest.lo_bytes = first.hi_bytes;
      lists.emplace_back();
      size_bytes = 0;
    }
    lists.back().push_back(rest);
    size_bytes += rest.size_bytes();
  }
  return lists;
}

}  // namespace

WireWorker::WireWorker(c10d::ProcessGroup& group, const std::vector<int>& host_of)
    : group_{group, {}},
      topology_(WireTopology::of(group.getRank(), group.getSize(), host_of)),
      steps_(topology_.has_two_levels() ? std::vector<Step>{&WireAllReduce::sum_inside_host,
                                                            &WireAllReduce::sum_between_hosts, &WireAllReduce::gather}
                                        : std::vector<Step>{&WireAllReduce::sum_between_hosts, &WireAllReduce::gather}),
      waiting_(steps_.size()),
      running_(steps_.size()) {
  for (size_t step = 0; step < steps_.size(); ++step)
    threads_.emplace_back([this, step] { run(step); });
}

WireWorker::~WireWorker() {
  close();
}

void WireWorker::start(const WireBlock& block, Finished finished) {
  const auto operation = std::make_shared<Operation>(std::move(finished), nullptr);
  const auto lists =
      topology_.has_two_levels() ? cut(block.ranges, kPipelinedBytes) : std::vector<std::vector<Range>>{block.ranges};
  for (size_t i = 0; i < lists.size(); ++i) {
    WireBlock part = block;
    part.ranges = lists[i];
    start_one(part, operation, i + 1 == lists.size());
  }
}

void WireWorker::start_one(const WireBlock& block, const std::shared_ptr<Operation>& operation, bool is_last) {
  auto all_reduce = std::make_unique<WireAllReduce>(group_, topology_, block, number_);
  number_ = (number_ + 1) % kNumberCount;
  all_reduce->begin(take_memory(all_reduce->memory_bytes()));
  {
    MutexLock lock(mutex_);
    under_way_.push_back({std::move(all_reduce), operation, is_last, nullptr});
    waiting_.front().push_back(&under_way_.back());
  }
  changed_.notify_all();
}

Collective WireWorker::start_collective(Op op, const RangeViews& views) {
  MutexLock lock(group_.mutex);
  return gradcast::start_collective(group_.group, op, views);
}

// There is as much memory as all-reduces have been under way at once, each for the largest one so far: a plan that
// repeats allocates nothing.
at::Tensor WireWorker::take_memory(int64_t size_bytes) {
  MutexLock lock(mutex_);
  if (size_bytes > memory_bytes_) {
    memory_bytes_ = size_bytes;
    free_.clear();
  }
  while (!free_.empty()) {
    const at::Tensor memory = std::move(free_.back());
    free_.pop_back();
    if (memory.numel() >= size_bytes) return memory;
  }
  return at::empty({memory_bytes_}, at::kByte);
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
  bool left_behind = false;
  {
    MutexLock lock(mutex_);
    const int64_t deadline_ns = steady_now_ns() + kAbortedWithinNs;
    while (aborted_ && running_ > 0 && steady_now_ns() < deadline_ns)
      changed_.wait_until(mutex_, deadline_ns);
    left_behind = aborted_ && running_ > 0;
  }
  for (std::thread& thread : std::exchange(threads_, {})) {
    if (left_behind) {
      thread.detach();
    } else {
      thread.join();
    }
  }
}

void WireWorker::run(size_t step) {
  name_this_thread("gradcast-wire");
  carry_on(step);
  MutexLock lock(mutex_);
  --running_;
  changed_.notify_all();
}

// Takes one all-reduce after the other through a step.
void WireWorker::carry_on(size_t step) {
  MutexLock lock(mutex_);
  while (true) {
    while (!closed_ && waiting_[step].empty())
      changed_.wait(mutex_);
    if (closed_) return;
    UnderWay& next = *waiting_[step].front();  // stays in under_way_: only the last step takes from there
    waiting_[step].pop_front();
    lock.unlock();
    try {
      if (next.exception == nullptr) ((*next.all_reduce).*steps_[step])();
    } catch (...) {
      next.exception = std::current_exception();
    }
    lock.lock();
    if (aborted_) return;
    if (step + 1 < steps_.size()) {
      waiting_[step + 1].push_back(&next);
      changed_.notify_all();
      continue;
    }
    lock.unlock();
    finish_first();
    lock.lock();
  }
}

void WireWorker::finish_first() {
  UnderWay ended;
  {
    MutexLock lock(mutex_);
    if (aborted_) return;
    ended = std::move(under_way_.front());
    under_way_.pop_front();
    if (ended.exception == nullptr) free_.push_back(ended.all_reduce->memory());
  }
  if (ended.operation->exception == nullptr) ended.operation->exception = ended.exception;
  if (ended.is_last) ended.operation->finished(ended.operation->exception);
}

}  // namespace gradcast
