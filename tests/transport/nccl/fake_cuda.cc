#include <atomic>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <thread>
#include <utility>
#include <vector>

#include "tests/transport/nccl/fake_device.h"

// A stream: a thread that runs what it is given.
struct CUstream_st {
  CUstream_st() : thread([this] { run(); }) {}
  ~CUstream_st() {
    {
      const std::lock_guard lock(mutex);
      is_ending = true;
    }
    changed.notify_all();
    thread.join();
  }

  void put(std::function<void()> kernel) {
    {
      const std::lock_guard lock(mutex);
      kernels.push_back(std::move(kernel));
    }
    changed.notify_all();
  }

  void run() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return is_ending || !kernels.empty(); });
      if (kernels.empty()) return;
      const std::function<void()> kernel = std::move(kernels.front());
      kernels.pop_front();
      lock.unlock();
      kernel();
      lock.lock();
    }
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> kernels;
  bool is_ending = false;
  std::thread thread;
};

// Where its stream was when it was recorded last.
struct CUevent_st {
  bool has_time = false;
  std::mutex mutex;
  std::shared_ptr<fake::Place> place;

  std::shared_ptr<fake::Place> now() {
    const std::lock_guard lock(mutex);
    return place;
  }
};

namespace {

constexpr int kDevices = 8;
thread_local int current_device = 0;
std::atomic<int> allocation_count = 0, allocation_count_ever = 0;
std::atomic<int> refusals = 0;
std::mutex ending_mutex;
std::vector<std::thread> ending;

}  // namespace

namespace fake {

void put(cudaStream_t stream, std::function<void()> kernel) {
  stream->put(std::move(kernel));
}

int allocations() {
  return allocation_count;
}

int allocations_ever() {
  return allocation_count_ever;
}

void end_streams() {
  const std::lock_guard lock(ending_mutex);
  for (std::thread& each : ending)
    each.join();
  ending.clear();
}

void refuse_memory(int calls) {
  refusals = calls;
}

}  // namespace fake

extern "C" {

cudaError_t cudaGetDeviceCount(int* count) {
  *count = kDevices;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 12080;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  std::strcpy(properties->name, "a device of the tests");
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return cudaErrorInvalidDevice;
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned int, int) {
  *stream = new CUstream_st;
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
  *stream = new CUstream_st;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  // What it has begun is ended; the caller does not wait for that.
  const std::lock_guard lock(ending_mutex);
  ending.emplace_back([stream] { delete stream; });
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (stream == nullptr) return cudaSuccess;  // what is put there ends at once: cudaMemset and cudaMemcpy
  fake::Place end;
  stream->put([&] { end.reach(); });
  end.wait();
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned int flags) {
  *event = new CUevent_st;
  (*event)->has_time = (flags & cudaEventDisableTiming) == 0;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  const auto place = std::make_shared<fake::Place>();
  {
    const std::lock_guard lock(event->mutex);
    event->place = place;
  }
  stream->put([place] { place->reach(); });
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const auto place = event->now();
  return place == nullptr || place->is_reached() ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventElapsedTime(float* time_ms, cudaEvent_t begin, cudaEvent_t end) {
  if (!begin->has_time || !end->has_time) return cudaErrorInvalidResourceHandle;
  if (cudaEventQuery(begin) != cudaSuccess || cudaEventQuery(end) != cudaSuccess) return cudaErrorNotReady;
  *time_ms = std::chrono::duration<float, std::milli>(end->now()->time() - begin->now()->time()).count();
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** memory, size_t size) {
  if (refusals > 0) {
    --refusals;
    return cudaErrorMemoryAllocation;
  }
  *memory = std::malloc(size);
  ++allocation_count;
  ++allocation_count_ever;
  return cudaSuccess;
}
cudaError_t cudaFree(void* memory) {
  std::free(memory);
  --allocation_count;
  return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** memory, size_t size, cudaStream_t) {
  return cudaMalloc(memory, size);
}
cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream) {
  stream->put([memory] { cudaFree(memory); });
  return cudaSuccess;
}
cudaError_t cudaMemset(void* memory, int value, size_t size) {
  std::memset(memory, value, size);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  std::memcpy(to, from, size);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t stream) {
  stream->put([=] { std::memcpy(to, from, size); });
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "an error of the device";
}

}  // extern "C"
