// The all-reduce of one block of fp32 numbers in a wire format, in point-to-point messages between host tensors.
//
// Each number has an owner. On one level the owner receives the other ranks' numbers in the wire format, sums them in
// fp32 in rank order, and sends the sum to all in the wire format. A number is thus rounded once on the way there, and
// the sum once on the way back, however many ranks there are, and all ranks end with the same bits.
//
// On two levels the ranks of a host first sum among themselves, in fp32: the rank that has the owner's local number gets
// the sum. Those of one local number then do the above, and the sums go around inside each host. So each number crosses
// the network between two hosts once, not once for each rank (the idea of BlueConnect, MLSys 2019).
//
// Why messages: of Gloo's collectives only the all-reduce is as fast, and that one rounds at every rank
// (docs/internals/decisions.md).
//
// Thread safety: any thread for abort(); begin() and the steps one after the other.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "platform/sync.h"
#include "transport/torch/wire_pieces.h"
#include "transport/torch/wire_topology.h"

namespace gradcast {

// A process group that several threads call, one at a time. Not an owner: see C10dTransport::Flight.
struct SharedGroup {
  c10d::ProcessGroup& group;  // calls that start something hold the mutex; rank and size may be asked for at any time
  Mutex mutex;
};

// A block of a buffer of fp32 numbers.
struct WireBlock {
  at::Tensor buffer;
  at::Tensor residual;  // see wire_codec.h; undefined without 8-bit numbers
  std::vector<Range> ranges;
  Encoding encoding = Encoding::kFloat32;
  GroupSegments segments;  // see BlockPieces
};

class WireAllReduce {
 public:
  // `number` is the same on all ranks, and differs between operations under way.
  WireAllReduce(SharedGroup& group, const WireTopology& topology, const WireBlock& block, int32_t number);

  // The memory that it needs besides its block.
  int64_t memory_bytes() const { return memory_bytes_; }

  // Encodes the block and sends it. `memory`: bytes. Never waits. A failure is kept, and the next step throws it.
  void begin(const at::Tensor& memory) noexcept;

  // The next steps, in this order; each waits for messages and throws what the backend throws.
  void sum_inside_host();  // on two levels only
  void sum_between_hosts();
  // Afterwards the sums are in the block and the memory may be used again.
  void gather();

  // Makes the steps throw soon. Any thread.
  void abort() noexcept;

  const at::Tensor& memory() const { return memory_; }

 private:
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
  // Bytes of the memory.
  struct Area {
    int64_t offset = 0;
    int64_t size_bytes = 0;
  };

  Area take(int64_t size_bytes);
  void place_areas();
  std::vector<int> owners_of(int local_number) const;
  int local_number(int rank) const { return topology_.local_number_of[static_cast<size_t>(rank)]; }
  std::byte* bytes_at(const Area& area) const;
  void post();
  void send_inside_host();
  void send_encoded();
  void receive(Works& works, const Area& area, int from, int phase);
  void send(const Area& area, int to, int phase);
  template <typename Start>
  void message(Works& works, const Area& area, const Start& start) GC_EXCLUDES(mutex_);
  static void wait(const Works& works);
  void rethrow() const;
  float* numbers() const { return block_.buffer.data_ptr<float>(); }
  float* residual() const { return block_.residual.defined() ? block_.residual.data_ptr<float>() : nullptr; }

  SharedGroup& group_;
  const WireTopology& topology_;
  const WireBlock block_;
  const BlockPieces pieces_;
  const int32_t number_;

  // By position in topology_.locals and topology_.across; nothing is sent between a rank and itself.
  std::vector<Area> inside_out_, inside_in_;  // numbers as they are, to and from ranks of this host
  std::vector<Area> encoded_, received_;      // to the owners across, this rank among them, and from them
  std::vector<Area> sums_;                    // by owner
  std::vector<Area> shares_;                  // by position in locals: the sums of that local number's owners, adjacent
  int64_t memory_bytes_ = 0;
  at::Tensor memory_;
  std::exception_ptr failure_;  // of begin()

  // Held while the lists grow and while an abort walks them. The thread of a step reads them without it: nobody else
  // changes them, which clang's annotations cannot express.
  Mutex mutex_;
  Works inside_, scattered_, gathered_, shared_, sent_;
  bool aborted_ GC_GUARDED_BY(mutex_) = false;
};

}  // namespace gradcast
