// The queue through which callers and transports reach the engine's thread.
//
// Thread safety: any thread; pop_all() from one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "platform/clock.h"
#include "platform/sync.h"

namespace gradcast {

// Bounded, with many producers and one consumer. An item either wakes the consumer at once or is counted: the consumer
// says how many counted items it needs before it has anything to do, and sleeps through fewer. So a hundred gradients
// that make one block ready wake the engine's thread once.
template <typename Item>
class BoundedQueue {
 public:
  enum class Wake { kAtOnce, kCounted };

  explicit BoundedQueue(size_t capacity) { raise_capacity(capacity); }

  // Never waits. If the queue is full, drops the item, returns false, and shows the consumer `overflowed`.
  // `then_min`: with this item and so many more, the consumer has something to do, whatever number it gave before.
  bool push(Item item, Wake wake, size_t then_min = kUnsaid) GC_EXCLUDES(mutex_) {
    bool due = false;
    bool kept = false;
    {
      MutexLock lock(mutex_);
      kept = items_.size() < capacity_;
      if (kept) {
        items_.push_back(std::move(item));
      } else {
        condition_.overflowed = true;
      }
      if (then_min != kUnsaid) then_min_ = items_.size() + then_min;
      at_once_ = at_once_ || wake == Wake::kAtOnce || !kept;
      due = is_due();
    }
    // Without the lock, which the consumer needs as soon as it wakes.
    if (due) {
      filled_.notify_one();
    }
    return kept;
  }

  // Each becomes true once and stays so.
  struct Condition {
    bool closed = false;
    bool overflowed = false;
  };

  // Sleeps until an item wakes it at once, `counted_min` items are there, close() is called, or the deadline has
  // passed. Then replaces `items` by all items of the queue. For the consumer only.
  Condition pop_all(std::vector<Item>& items, size_t counted_min, int64_t deadline_ns) GC_EXCLUDES(mutex_) {
    items.clear();
    MutexLock lock(mutex_);
    counted_min_ = counted_min;
    while (!is_due() && steady_now_ns() < deadline_ns) {
      filled_.wait_until(mutex_, deadline_ns);
    }
    at_once_ = false;
    then_min_ = kUnsaid;
    std::swap(items, items_);
    items_.reserve(capacity_);
    return condition_;
  }

  // Wakes the consumer and shows it `closed`. Works on a full queue, too, because it is not an item.
  void close() GC_EXCLUDES(mutex_) {
    {
      MutexLock lock(mutex_);
      condition_.closed = true;
      at_once_ = true;
    }
    filled_.notify_one();
  }

  // Never lowers the capacity.
  void raise_capacity(size_t capacity) GC_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    capacity_ = capacity > capacity_ ? capacity : capacity_;
    items_.reserve(capacity_);
  }

 private:
  static constexpr size_t kUnsaid = std::numeric_limits<size_t>::max();

  bool is_due() const GC_REQUIRES(mutex_) { return at_once_ || items_.size() >= std::min(counted_min_, then_min_); }

  Mutex mutex_;
  CondVar filled_;
  std::vector<Item> items_ GC_GUARDED_BY(mutex_);
  size_t capacity_ GC_GUARDED_BY(mutex_) = 0;
  size_t counted_min_ GC_GUARDED_BY(mutex_) = kUnsaid;
  size_t then_min_ GC_GUARDED_BY(mutex_) = kUnsaid;
  bool at_once_ GC_GUARDED_BY(mutex_) = false;
  Condition condition_ GC_GUARDED_BY(mutex_);
};

}  // namespace gradcast
