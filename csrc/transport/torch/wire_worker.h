// The wire worker: the all-reduces in a wire format that are under way, and the threads "gradcast-wire" that carry them
// on.
//
// Messages notify nobody of their arrival, so threads have to wait for them. There is one thread for each step of an
// all-reduce; each takes them in the order in which they were started. So while the sum of one is being sent, another
// one is summed. On two levels a large block goes as several all-reduces, so that the network is not idle while the
// ranks of a host exchange.
//
// Thread safety: any thread, but start() and start_collective() from one.
#pragma once

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
#include "transport/torch/wire_topology.h"

namespace gradcast {

class WireWorker {
 public:
  // nullptr: the sums are in the block. Runs on one of the worker's threads and must not throw.
  using Finished = std::function<void(const std::exception_ptr&)>;

  // `host_of`: see WireTopology, which throws. REQUIRES: all ranks start the same operations in the same order.
  WireWorker(c10d::ProcessGroup& group, const std::vector<int>& host_of);
  ~WireWorker();  // close()
  WireWorker(const WireWorker&) = delete;
  WireWorker& operator=(const WireWorker&) = delete;

  // Encodes the block, sends it and returns. The block's memory stays until `finished` was called.
  void start(const WireBlock& block, Finished finished) GC_EXCLUDES(mutex_);
  // Starts an operation that is sent unchanged. The group is the worker's too, and one thread at a time may call it.
  Collective start_collective(Op op, const RangeViews& views) GC_EXCLUDES(group_.mutex);

  // After this no `finished` is called. The backend may still write into the memory of operations under way, so this
  // object must then live until the process ends.
  void abort() noexcept GC_EXCLUDES(mutex_);
  // Ends the threads. Idempotent. REQUIRES: everything has finished, or abort() was called. After an abort it returns
  // within half a second: if the backend cannot abort a message, threads are left behind and end with the message.
  void close() noexcept GC_EXCLUDES(mutex_);

 private:
  // A block, carried by one all-reduce or several. Each is with one thread at a time.
  struct Operation {
    Finished finished;
    std::exception_ptr exception;  // the first one
  };
  struct UnderWay {
    std::unique_ptr<WireAllReduce> all_reduce;
    std::shared_ptr<Operation> operation;
    bool is_last;                  // of its operation
    std::exception_ptr exception;  // of a step; the ones after it are skipped
  };
  using Step = void (WireAllReduce::*)();

  void start_one(const WireBlock& block, const std::shared_ptr<Operation>& operation, bool is_last) GC_EXCLUDES(mutex_);
  at::Tensor take_memory(int64_t size_bytes) GC_EXCLUDES(mutex_);
  void run(size_t step) GC_EXCLUDES(mutex_);
  void carry_on(size_t step) GC_EXCLUDES(mutex_);
  void finish_first() GC_EXCLUDES(mutex_);

  SharedGroup group_;
  const WireTopology topology_;
  const std::vector<Step> steps_;
  int32_t number_ = 0;  // of the next all-reduce; only start() touches it

  Mutex mutex_;
  CondVar changed_;
  std::deque<UnderWay> under_way_ GC_GUARDED_BY(mutex_);              // in the order of their starts
  std::vector<std::deque<UnderWay*>> waiting_ GC_GUARDED_BY(mutex_);  // by step: for that step
  std::vector<at::Tensor> free_ GC_GUARDED_BY(mutex_);
  int64_t memory_bytes_ GC_GUARDED_BY(mutex_) = 0;  // of the largest all-reduce so far
  bool aborted_ GC_GUARDED_BY(mutex_) = false;
  bool closed_ GC_GUARDED_BY(mutex_) = false;
  size_t running_ GC_GUARDED_BY(mutex_) = 0;  // threads
  std::vector<std::thread> threads_;
};

}  // namespace gradcast
