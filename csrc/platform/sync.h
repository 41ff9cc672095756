// Locks: the only place in csrc that names a standard mutex.
//
// The wrappers carry clang's thread-safety attributes. Under -Wthread-safety, an error in our builds, clang refuses
// code that touches a guarded field without its lock. Other compilers see plain code.
//
// Thread safety: any thread.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "platform/clock.h"

#if defined(__clang__)
#define GC_THREAD_ATTRIBUTE(...) __attribute__((__VA_ARGS__))
#else
#define GC_THREAD_ATTRIBUTE(...)
#endif
// A field that may be touched only with the mutex held.
#define GC_GUARDED_BY(mutex) GC_THREAD_ATTRIBUTE(guarded_by(mutex))
// A function that must be called with the mutex held, or without it.
#define GC_REQUIRES(mutex) GC_THREAD_ATTRIBUTE(requires_capability(mutex))
#define GC_EXCLUDES(...) GC_THREAD_ATTRIBUTE(locks_excluded(__VA_ARGS__))

namespace gradcast {

// A value that threads share without a lock.
template <typename Value>
using Atomic = std::atomic<Value>;

class GC_THREAD_ATTRIBUTE(capability("mutex")) Mutex {
 public:
  void lock() GC_THREAD_ATTRIBUTE(acquire_capability()) { mutex_.lock(); }
  void unlock() GC_THREAD_ATTRIBUTE(release_capability()) { mutex_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

// Holds a Mutex for a scope. unlock() and lock() let a thread give it up in between, for instance to call somebody
// else's code.
class GC_THREAD_ATTRIBUTE(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) GC_THREAD_ATTRIBUTE(acquire_capability(mutex)) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() GC_THREAD_ATTRIBUTE(release_capability()) {
    if (held_) mutex_.unlock();
  }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void unlock() GC_THREAD_ATTRIBUTE(release_capability()) {
    held_ = false;
    mutex_.unlock();
  }
  void lock() GC_THREAD_ATTRIBUTE(acquire_capability()) {
    mutex_.lock();
    held_ = true;
  }

 private:
  Mutex& mutex_;
  bool held_ = true;
};

// Waiting takes no predicate, because clang does not see that a lambda runs under the lock: callers loop over theirs.
class CondVar {
 public:
  // Both return after a notification or for no reason, wait_until() also at the deadline (steady_now_ns(), or kNever).
  void wait(Mutex& mutex) GC_REQUIRES(mutex) { wait_until(mutex, kNever); }
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

}  // namespace gradcast
