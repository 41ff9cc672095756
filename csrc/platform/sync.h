// Locks, waiting, the clock, and the queue between threads: the only place in the engine that names a mutex.
//
// The wrappers carry clang's thread-safety attributes, so that clang refuses code that touches a guarded field without its
// lock (-Wthread-safety, an error in our builds). Compilers without them see plain code.
//
// Thread safety: any thread.
#pragma once

#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#if defined(__clang__)
#define GC_THREAD_ATTRIBUTE(...) __attribute__((__VA_ARGS__))
#else
#define GC_THREAD_ATTRIBUTE(...)
#endif
#define GC_GUARDED_BY(mutex) GC_THREAD_ATTRIBUTE(guarded_by(mutex))
#define GC_REQUIRES(mutex) GC_THREAD_ATTRIBUTE(requires_capability(mutex))
#define GC_EXCLUDES(...) GC_THREAD_ATTRIBUTE(locks_excluded(__VA_ARGS__))

namespace gradcast {

// Times of the steady clock, ns. kNever as a deadline: without end.
inline constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

inline int64_t steady_now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// How the system shows the calling thread. Linux refuses longer names instead of cutting them.
inline void name_this_thread(const std::string& name) {
  constexpr size_t kNameMax = 15;
#if defined(__APPLE__)
  pthread_setname_np(name.substr(0, kNameMax).c_str());
#else
  pthread_setname_np(pthread_self(), name.substr(0, kNameMax).c_str());
#endif
}

class GC_THREAD_ATTRIBUTE(capability("mutex")) Mutex {
 public:
  void lock() GC_THREAD_ATTRIBUTE(acquire_capability()) { mutex_.lock(); }
  void unlock() GC_THREAD_ATTRIBUTE(release_capability()) { mutex_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

// Holds a Mutex for a scope.
class GC_THREAD_ATTRIBUTE(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) GC_THREAD_ATTRIBUTE(acquire_capability(mutex)) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() GC_THREAD_ATTRIBUTE(release_capability()) { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

class CondVar {
 public:
  // Returns after a notification, at the deadline, or for no reason: the caller looks again at what it waits for.
  void wait_until(Mutex& mutex, int64_t deadline_ns) GC_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    if (deadline_ns == kNever) {
      condition_.wait(lock);
    } else {
      condition_.wait_until(lock, std::chrono::steady_clock::time_point(std::chrono::nanoseconds(deadline_ns)));
    }
    lock.release();
  }
  void notify_one() { condition_.notify_one(); }
  void notify_all() { condition_.notify_all(); }

 private:
  std::condition_variable condition_;
};

// Many producers, one consumer, bounded. An item either wakes the consumer at once or is counted: the consumer says how many
// counted items it needs before it has anything to do, and sleeps through fewer. So a hundred gradients that make one block
// ready wake the engine's thread once.
template <typename Item>
class BoundedQueue {
 public:
  enum class Wake { kAtOnce, kCounted };

  explicit BoundedQueue(size_t capacity) { raise_capacity(capacity); }

  // Never waits: an item that finds the queue full is dropped, false is returned, and the consumer sees `overflowed`.
  bool push(Item item, Wake wake) GC_EXCLUDES(mutex_) {
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
      at_once_ = at_once_ || wake == Wake::kAtOnce || !kept;
      due = is_due();
    }
    // After the lock is given back: the consumer would only wake up to wait for it.
    if (due) {
      filled_.notify_one();
    }
    return kept;
  }

  // What holds from some moment on, for good.
  struct Condition {
    bool closed = false;
    bool overflowed = false;
  };

  // Sleeps until an item has come that wakes at once, until `counted_min` items are there, until close(), or until the
  // deadline; then moves all there are into `items`, which is emptied first. For the consumer only.
  Condition pop_all(std::vector<Item>& items, size_t counted_min, int64_t deadline_ns) GC_EXCLUDES(mutex_) {
    items.clear();
    MutexLock lock(mutex_);
    counted_min_ = counted_min;
    while (!is_due() && steady_now_ns() < deadline_ns) {
      filled_.wait_until(mutex_, deadline_ns);
    }
    at_once_ = false;
    std::swap(items, items_);
    items_.reserve(capacity_);
    return condition_;
  }

  // Wakes the consumer and tells it that its producers are done; not an item, so it finds its way through a full queue.
  void close() GC_EXCLUDES(mutex_) {
    {
      MutexLock lock(mutex_);
      condition_.closed = true;
      at_once_ = true;
    }
    filled_.notify_one();
  }

  // A capacity is never taken back.
  void raise_capacity(size_t capacity) GC_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    capacity_ = capacity > capacity_ ? capacity : capacity_;
    items_.reserve(capacity_);
  }

 private:
  bool is_due() const GC_REQUIRES(mutex_) { return at_once_ || items_.size() >= counted_min_; }

  mutable Mutex mutex_;
  CondVar filled_;
  std::vector<Item> items_ GC_GUARDED_BY(mutex_);
  size_t capacity_ GC_GUARDED_BY(mutex_) = 0;
  size_t counted_min_ GC_GUARDED_BY(mutex_) = std::numeric_limits<size_t>::max();
  bool at_once_ GC_GUARDED_BY(mutex_) = false;
  Condition condition_ GC_GUARDED_BY(mutex_);
};

}  // namespace gradcast
