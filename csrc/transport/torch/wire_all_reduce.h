// One block of fp32 numbers that travels as 16-bit ones, in point-to-point messages between tensors of the host.
//
// Each rank owns a part of the block. It receives the others' numbers of its part in the wire format, adds them up in fp32 in
// the order of the ranks, and sends the sum, in the wire format again, to all. So a sum is rounded once on the way there and
// once on the way back, however many ranks there are, and all ranks end with the same bits, whatever the plan.
//
// Messages, because of what Gloo offers only an all-reduce is as fast, and that rounds at every rank: docs/internals/decisions.md.
//
// Thread safety: any thread for abort(); begin() and finish() one after the other.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "transport/torch/cast.h"
#include "transport/torch/range_views.h"

namespace gradcast {

// A process group that several threads call, one at a time. Not an owner: see C10dTransport::Flight.
struct SharedGroup {
  c10d::ProcessGroup& group;
  std::mutex mutex;
};

class Exchange {
 public:
  // What an exchange needs besides its block: tensors of the wire format, each of at least size_for() elements.
  struct Memory {
    at::Tensor sent, received, sums;
  };
  static int64_t size_for(const Row& row, int world_size);

  // `number` is the same on all ranks, and another one for each exchange under way.
  Exchange(SharedGroup& group, const Row& row, const Memory& memory, int32_t number);

  // Reads the block and puts it on its way; waits for nothing. What fails is thrown by finish().
  void begin() noexcept;
  // Returns when the sums are in the block and the memory is free again. Throws what the backend throws.
  void finish(Adder& adder);
  // finish() throws soon.
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
  void keep(Works& works, c10::intrusive_ptr<c10d::Work> work);
  static void wait(const Works& works);

  SharedGroup& group_;
  const Row row_;
  const Memory memory_;
  const int rank_, world_size_;
  const int64_t part_size_;
  const int scatter_tag_, gather_tag_;
  std::exception_ptr failure_;  // of begin()

  // Of what follows while it grows or is aborted; only the thread of begin() and finish() changes it.
  std::mutex mutex_;
  Works scattered_, gathered_, sent_;
  bool aborted_ = false;
};

}  // namespace gradcast
