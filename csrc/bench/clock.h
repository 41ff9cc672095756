// The clock of gradcast-bench, and waiting by it.
//
// Thread safety: any thread.
#pragma once

#include <sys/prctl.h>
#include <time.h>

#include <cstdint>

#include "gradcast/engine.h"

namespace gradcast {

inline int64_t steady_now_ns() {
  return Engine::now_ns();
}

// The calling thread wakes when it asks for it; the system's own choice is to let sleepers wait up to 50 us longer.
inline void wake_promptly() {
  prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);
}

inline void sleep_until(int64_t time_ns) {
  const timespec until{time_ns / 1'000'000'000, time_ns % 1'000'000'000};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) != 0) {
  }
}

}  // namespace gradcast
