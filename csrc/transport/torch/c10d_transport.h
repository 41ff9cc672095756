// A transport over torch.distributed: any backend, CPU and CUDA tensors.
//
// An operation starts the backend's collective on views of its ranges. The thread on which the backend finishes it
// reports the completion. For CPU tensors the transport has no thread of its own (except with a wire format), never
// waits, and never takes Python's GIL. Of torch it uses c10d::ProcessGroup and c10d::Work only, and only what torch
// 2.11 and 2.15 have in common.
//
// Most backends, Gloo among them, cannot interrupt an operation. After an abort they may still write into the bytes of
// operations that were in flight, so the group and buffers of an aborted transport are leaked.
//
// With a wire format, or on two levels (wire_all_reduce.h), all-reduces of fp32 buffers go as messages; everything else
// is sent unchanged.
//
// With TORCH_DISTRIBUTED_DEBUG=DETAIL torch waits for all ranks inside each start(); nothing else changes.
//
// Thread safety: any thread, within the contract of gradcast/transport.h.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <utility>
#include <vector>

#include "gradcast/transport.h"
#include "transport/common/completion_gate.h"
#include "transport/common/host_memory.h"
#include "transport/torch/collective.h"
#include "transport/torch/device_stream.h"
#include "transport/torch/wire_pieces.h"
#include "transport/torch/wire_worker.h"

namespace gradcast {

class C10dTransport final : public Transport {
 public:
  // `wire` is "fp32" (numbers are sent unchanged), "bf16", "fp16" or "int8". `host_of`: by rank, its host, for an
  // exchange on two levels between host tensors; empty for one level. Throws std::invalid_argument for a buffer that is
  // not flat and contiguous, for a group without a backend for a buffer's device, for a wire format that is unknown or
  // not available on a buffer's device, and for hosts with differently many ranks. REQUIRES: nobody else uses `group`
  // while the transport lives.
  // `runs_on`, `settings`: of the blocks of buffers on a device.
  C10dTransport(c10::intrusive_ptr<c10d::ProcessGroup> group, const std::vector<at::Tensor>& buffers,
                const std::string& wire, const std::vector<int>& host_of, RunsOn runs_on = RunsOn::kOwnStream,
                DeviceStream::Settings settings = {});
  ~C10dTransport() override;  // abort() and close()

  int32_t rank() const noexcept override { return rank_; }
  int32_t world_size() const noexcept override { return world_size_; }
  void open(CompletionSink* sink) noexcept override;
  void start(const Operation& operation) noexcept override;
  void abort(const char* reason) noexcept override;
  void close() noexcept override;

  // CUDA: these blocks, each a buffer and the ends of its ranges, are written and started from now on. CPU: does nothing.
  // Throws std::invalid_argument for an unknown buffer. REQUIRES: they are disjoint; nothing is in flight.
  using Ends = std::pair<int64_t, int64_t>;  // lo_bytes, hi_bytes
  void expect(const std::vector<std::pair<int32_t, std::vector<Ends>>>& blocks);
  // CUDA: the calling thread's current stream has been given the kernels that write this range of expected blocks; these
  // wait for them. CPU: does nothing. Throws as above.
  void on_written(int32_t buffer, int64_t lo_bytes, int64_t hi_bytes);
  // CUDA: orders the calling thread's current stream behind the operations on these bytes that have been reported as
  // queued. CPU: does nothing. Throws as above.
  using Place = std::tuple<int32_t, int64_t, int64_t>;  // buffer, lo_bytes, hi_bytes
  void order_behind(const std::vector<Place>& places);

  // Blocks of this buffer are carried from and into `tensor` from now on, without groups: set_groups() must follow.
  // An empty tensor lets go of the memory, until the next call and before the next block. Throws std::invalid_argument
  // unless it has as many elements of the same type on the same device, and as the constructor does. REQUIRES: nothing
  // is in flight.
  void replace_buffer(int32_t buffer, const at::Tensor& tensor);

  // For the wire format int8: the groups of the numbers of an fp32 buffer, and the residual (see wire_codec.h), of the
  // buffer's size and type. Throws std::invalid_argument unless they fit. REQUIRES: nothing is in flight.
  void set_groups(int32_t buffer, std::vector<GroupSegment> segments, const at::Tensor& residual);
  // The residual of the segment that begins at this element is not sent (`sends` false), or is again. Throws as above
  // unless there is one. REQUIRES: nothing of the segment is in flight.
  void send_residual(int32_t buffer, int64_t first, bool sends);

 private:
  struct Buffer {
    at::Tensor owner;                      // given by the caller
    at::Tensor tensor;                     // given to the backend
    std::string backend;                   // its name, for errors
    std::shared_ptr<DeviceStream> stream;  // nullptr on the CPU
    // Of the wire format int8:
    std::shared_ptr<std::vector<GroupSegment>> segments = std::make_shared<std::vector<GroupSegment>>();
    at::Tensor residual{};
  };
  struct Flight;

  Buffer make_buffer(const at::Tensor& tensor) const;
  Buffer& buffer_at(int32_t index);
  bool goes_as_messages(const Operation& operation, const Buffer& buffer) const;
  void launch(const Operation& operation);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;  // until close()
  const int32_t rank_;
  const int32_t world_size_;
  const Encoding wire_;
  const RunsOn runs_on_;
  const DeviceStream::Settings settings_;
  std::vector<Buffer> buffers_;
  std::vector<Extent> extents_;              // of the buffers
  std::shared_ptr<WireWorker> wire_worker_;  // nullptr with fp32 on one level
  const std::shared_ptr<CompletionGate> gate_ = std::make_shared<CompletionGate>();
};

}  // namespace gradcast
