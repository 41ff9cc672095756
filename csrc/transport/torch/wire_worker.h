// The wire worker: the all-reduces in a wire format that are under way, and the thread "gradcast-wire" that finishes
// them.
//
// Messages tell nobody when they arrive, so a thread has to wait for them; it then adds up and reports the end. It
// finishes all-reduces in the order in which they were started, and later ones travel meanwhile.
//
// Thread safety: any thread, but start() and start_collective() from one.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "platform/sync.h"
#include "transport/torch/collective.h"
#include "transport/torch/range_views.h"
#include "transport/torch/wire_all_reduce.h"

namespace gradcast {

class WireWorker {
 public:
  // nullptr: the sums are in the block. Runs on the worker's thread and must not throw.
  using Finished = std::function<void(const std::exception_ptr&)>;

  // Numbers travel as `wire`. REQUIRES: all ranks start the same operations in the same order.
  WireWorker(c10d::ProcessGroup& group, c10::ScalarType wire);
  ~WireWorker();  // close()
  WireWorker(const WireWorker&) = delete;
  WireWorker& operator=(const WireWorker&) = delete;

  // Casts the block, sends it and returns.
  void start(const RangeViews& views, Finished finished) GC_EXCLUDES(mutex_);
  // Starts an operation that travels as it is. The group is the worker's too, and one thread at a time may call it.
  Collective start_collective(Op op, const RangeViews& views) GC_EXCLUDES(group_.mutex);

  // After this no `finished` is called. The backend may still write into the memory of what was under way, so this
  // object must then live until the process ends.
  void abort() noexcept GC_EXCLUDES(mutex_);
  // Ends the thread. Idempotent. REQUIRES: everything has finished, or abort() was called. After an abort it returns
  // within half a second: if the backend cannot abort a message, the thread is left behind and ends with the message.
  void close() noexcept GC_EXCLUDES(mutex_);

 private:
  struct UnderWay {
    std::unique_ptr<WireAllReduce> all_reduce;
    Finished finished;
  };

  WireAllReduce::Memory take_memory(int64_t size) GC_EXCLUDES(mutex_);
  void run() GC_EXCLUDES(mutex_);
  void loop() GC_EXCLUDES(mutex_);

  SharedGroup group_;
  const c10::ScalarType wire_;
  int32_t number_ = 0;  // of the next all-reduce; only start() touches it

  Mutex mutex_;
  CondVar changed_;
  std::deque<UnderWay> under_way_ GC_GUARDED_BY(mutex_);
  std::vector<WireAllReduce::Memory> free_ GC_GUARDED_BY(mutex_);
  int64_t memory_size_ GC_GUARDED_BY(mutex_) = 0;  // elements of the largest block so far
  bool aborted_ GC_GUARDED_BY(mutex_) = false;
  bool closed_ GC_GUARDED_BY(mutex_) = false;
  bool has_left_ GC_GUARDED_BY(mutex_) = false;  // the thread has
  std::thread thread_;
};

}  // namespace gradcast
