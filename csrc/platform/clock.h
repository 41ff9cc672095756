// The clocks that gradcast reads, in whole nanoseconds, and sleeping by them.
//
// Thread safety: any thread.
#pragma once

#include <chrono>
#include <cstdint>
#include <ctime>
#include <limits>
#include <thread>

namespace gradcast {

// A deadline that never comes.
inline constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

// The steady clock. Python's time.perf_counter_ns() reads the same clock on Linux.
inline int64_t steady_now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

// The steady clock's time after so many ns; kNever for a negative number, and for one that the clock does not reach.
inline int64_t deadline_after(int64_t timeout_ns) {
  const int64_t now_ns = steady_now_ns();
  return timeout_ns < 0 || timeout_ns > kNever - now_ns ? kNever : now_ns + timeout_ns;
}

// Returns at this time of the steady clock, or at once if it has passed.
inline void sleep_until(int64_t time_ns) {
  std::this_thread::sleep_until(std::chrono::steady_clock::time_point(std::chrono::nanoseconds(time_ns)));
}

// CPU time of the calling thread: what its work costs, however long it waits for a core. A system call of about 1 us,
// unlike the steady clock.
inline int64_t thread_cpu_now_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace gradcast
