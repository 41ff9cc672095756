// What CUDA and NCCL are to the transport over NCCL, in one process and without a device: streams are threads, their
// kernels functions, and ranks threads as well. fake_cuda.cc and fake_nccl.cc define the functions of both libraries
// that it calls. Memory of the device is the host's.
//
// Thread safety: any thread.
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

namespace fake {

// A place on a stream that is reached once.
class Place {
 public:
  void reach() {
    const std::lock_guard lock(mutex_);
    reached_ = true;
    time_ = std::chrono::steady_clock::now();
    changed_.notify_all();  // under the lock: who has waited may destroy this
  }
  bool is_reached() {
    const std::lock_guard lock(mutex_);
    return reached_;
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return reached_; });
  }
  // REQUIRES: it is reached.
  std::chrono::steady_clock::time_point time() {
    const std::lock_guard lock(mutex_);
    return time_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  std::chrono::steady_clock::time_point time_;
};

// A kernel. Runs on the stream's thread after all that was put there before.
void put(cudaStream_t stream, std::function<void()> kernel);

// Returns when the streams that were destroyed have done what they were given.
void end_streams();

// Memory that was given by the device and has not come back.
int allocations();
int allocations_ever();
// The next so many calls that ask for memory get none.
void refuse_memory(int calls);

int version();
void set_version(int version);  // of NCCL, from now on
// Breaks every communicator of this rank, as if a connection had been lost.
void break_connections(int rank);
// Communicators that are neither destroyed nor aborted, and the number of those that were aborted, or destroyed.
int communicators();
int aborts();
int destructions();

}  // namespace fake
