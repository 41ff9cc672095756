// Preloaded into a program: once it is told to, the threads of torch's Gloo are late. One that has woken a waiter goes
// on, and drops what it has worked on, when the program has begun to end, or else after a while.
//
// Thread safety: any thread.
#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <thread>

namespace {

using Clock = std::chrono::steady_clock;

std::atomic<int> late_ms = 0;
std::atomic<bool> is_ending = false;

bool is_of_gloo() {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  return std::strstr(name, "pt_gloo") != nullptr;
}

}  // namespace

extern "C" void be_late(int milliseconds) {
  late_ms = milliseconds;
}

// Called as the last thing before Python ends, it keeps the GIL meanwhile.
extern "C" void end_late(int milliseconds) {
  is_ending = true;
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

// In the place of that of the library.
void std::condition_variable::notify_all() noexcept {
  using Notify = void (*)(std::condition_variable*);
  static const auto notify = reinterpret_cast<Notify>(dlsym(RTLD_NEXT, "_ZNSt18condition_variable10notify_allEv"));
  notify(this);
  if (late_ms == 0 || !is_of_gloo()) return;
  const auto deadline = Clock::now() + std::chrono::milliseconds(late_ms);
  while (!is_ending && Clock::now() < deadline)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
}
