// A thread's settings in the operating system: name and timers.
//
// Thread safety: any thread.
#pragma once

#include <pthread.h>
#if defined(__linux__)
#include <sys/prctl.h>
#endif

#include <cstddef>
#include <string>

namespace gradcast {

// Names the calling thread for debuggers and `top`. Cuts the name to 15 bytes: Linux refuses longer ones.
inline void name_this_thread(const std::string& name) {
  constexpr size_t kNameMax = 15;
#if defined(__APPLE__)
  pthread_setname_np(name.substr(0, kNameMax).c_str());
#else
  pthread_setname_np(pthread_self(), name.substr(0, kNameMax).c_str());
#endif
}

// Lets timed waits of the calling thread end on time. By default Linux ends them up to 50 us late, to save power: as
// much as the pauses between two looks at a device.
inline void wake_promptly() {
#if defined(__linux__)
  prctl(PR_SET_TIMERSLACK, 1UL, 0UL, 0UL, 0UL);  // ns
#endif
}

}  // namespace gradcast
