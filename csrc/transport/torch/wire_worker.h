// The exchanges under way, and the thread "gradcast-wire" that waits for their messages, adds up, and tells when they have ended.
//
// A thread of its own, because messages tell nobody when they arrive: somebody has to wait for them. It ends exchanges in the
// order in which they were started; what a later one sends is on its way meanwhile.
//
// Thread safety: any thread, but start() from one.
#pragma once

#include <c10/core/ScalarType.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "transport/torch/range_views.h"
#include "transport/torch/wire_all_reduce.h"

namespace gradcast {

class Exchanges {
 public:
  // Of nullptr: the sums are in the block. Must not throw.
  using Finished = std::function<void(const std::exception_ptr&)>;

  // REQUIRES: all ranks start the same exchanges in the same order. Numbers travel as `wire`.
  Exchanges(c10d::ProcessGroup& group, c10::ScalarType wire);
  ~Exchanges();  // close()
  Exchanges(const Exchanges&) = delete;
  Exchanges& operator=(const Exchanges&) = delete;

  // Casts the block, puts it on its way and returns. `finished` runs on the thread of this class.
  void start(const Row& row, Finished finished);
  // The lock for calling the group from elsewhere.
  std::unique_lock<std::mutex> lock_group() { return std::unique_lock(group_.mutex); }

  // Nothing is finished any more. The backend may still write, so that this object must then live on until the program ends.
  void abort() noexcept;
  // Ends the thread. REQUIRES: everything has finished, or abort(). Idempotent. Returns within half a second after an abort: a
  // thread that a message holds which the backend cannot abort is left behind, and ends with the message.
  void close() noexcept;

 private:
  struct UnderWay {
    std::unique_ptr<Exchange> exchange;
    Finished finished;
  };

  Exchange::Memory take_memory(int64_t size);
  void run();
  void loop();

  SharedGroup group_;
  const c10::ScalarType wire_;
  int32_t number_ = 0;  // of the next exchange

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<UnderWay> under_way_;
  std::vector<Exchange::Memory> free_;
  int64_t memory_size_ = 0;  // the largest block so far
  bool aborted_ = false;
  bool closed_ = false;
  bool has_left_ = false;  // the thread has
  std::thread thread_;
};

}  // namespace gradcast
