// The all-reduce of one block of fp32 numbers that travel as 16-bit numbers, in point-to-point messages between host
// tensors.
//
// Each rank owns a part of the block. It receives the other ranks' numbers of its part in the wire format, sums them in
// fp32 in rank order, and sends the sum to all in the wire format. A sum is thus rounded once on the way there and once
// on the way back, however many ranks there are, and all ranks end with the same bits under every plan.
//
// Why messages: of Gloo's collectives only the all-reduce is as fast, and that one rounds at every rank
// (docs/internals/decisions.md).
//
// Thread safety: any thread for abort(); begin() and finish() one after the other.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "platform/sync.h"
#include "transport/torch/cast.h"
#include "transport/torch/range_views.h"

namespace gradcast {

// A process group that several threads call, one at a time. Not an owner: see C10dTransport::Flight.
struct SharedGroup {
  c10d::ProcessGroup& group;  // calls that start something hold the mutex; rank and size may be asked for at any time
  Mutex mutex;
};

class WireAllReduce {
 public:
  // What it needs besides its block: tensors of the wire format, each of at least size_for() elements.
  struct Memory {
    at::Tensor sent, received, sums;
  };
  static int64_t size_for(const RangeViews& views, int world_size);

  // `number` is the same on all ranks, and differs between operations under way.
  WireAllReduce(SharedGroup& group, const RangeViews& views, const Memory& memory, int32_t number);

  // Reads the block and sends it. Never waits. A failure is kept, and finish() throws it.
  void begin() noexcept;
  // Waits until the sums are in the block and the memory may be used again. Throws what the backend throws.
  void finish(Adder& adder);
  // Makes finish() throw soon. Any thread.
  void abort() noexcept;

  const Memory& memory() const { return memory_; }

 private:
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

  at::Tensor part(const at::Tensor& numbers, int rank) const;
  at::Tensor term(int rank) const;
  void post();
  void add_up(Adder& adder);
  void receive(Works& works, const at::Tensor& numbers, int from, int tag);
  void send(const at::Tensor& numbers, int to, int tag);
  template <typename Start>
  void message(Works& works, const at::Tensor& numbers, const Start& start) GC_EXCLUDES(mutex_);
  static void wait(const Works& works);

  SharedGroup& group_;
  const RangeViews views_;
  const Memory memory_;
  const int rank_, world_size_;
  const int64_t part_size_;
  const int scatter_tag_, gather_tag_;
  std::exception_ptr failure_;  // of begin()

  // Held while the lists grow and while an abort walks them. The thread of begin() and finish() reads them without it:
  // nobody else changes them, which clang's annotations cannot express.
  Mutex mutex_;
  Works scattered_, gathered_, sent_;
  bool aborted_ GC_GUARDED_BY(mutex_) = false;
};

}  // namespace gradcast
