// A thread's settings in CUDA's driver for captures of CUDA graphs.
//
// Thread safety: any thread.
#pragma once

#include <dlfcn.h>

namespace gradcast {

// While a thread captures a CUDA graph in the default mode, CUDA refuses calls such as cudaEventQuery on every thread,
// and the capture is lost. After this, the calling thread heeds only captures that it has begun itself. Does nothing
// where CUDA's driver is not loaded. (The driver is asked by name, so that no header of CUDA is needed.)
inline void stay_out_of_captures() noexcept {
  constexpr int kThreadLocal = 1;  // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (driver == nullptr) return;
  const auto exchange = reinterpret_cast<int (*)(int*)>(dlsym(driver, "cuThreadExchangeStreamCaptureMode"));
  int mode = kThreadLocal;
  if (exchange != nullptr) exchange(&mode);
  dlclose(driver);
}

}  // namespace gradcast
