// The memory that a run measures with, and its one transport, which the sweep and the schedule use one after the other:
// on a device each communicator takes memory and time to connect.
//
// Thread safety: any thread, within the contract of gradcast/transport.h.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "bench/group.h"
#include "gradcast/profile.h"
#include "gradcast/transport.h"
#include "platform/sync.h"

namespace gradcast {

class Network final : public Transport, private CompletionSink {
 public:
  // The memory of the sweep: one buffer in which operations work in place, and one with the same memory whose
  // operations read other memory, if there is any.
  struct Sweep {
    int64_t size_bytes = 0;
    Element element = Element::kFloat32;
    bool has_source = false;
    int32_t buffer = 0;  // the first of the two; the network fills in this and the rest
    void* data = nullptr;
    void* source = nullptr;
  };

  // Collective. Memory for these gradients, in the buffers that they name, and for the sweep. Throws
  // Error{kInvalidOption} for gradients that the transports cannot sum.
  Network(Group& group, const std::vector<Tensor>& gradients, const Sweep& sweep);
  ~Network() override;

  const Sweep& sweep() const { return sweep_; }

  int32_t rank() const noexcept override { return transport_->rank(); }
  int32_t world_size() const noexcept override { return transport_->world_size(); }
  // Each open() has a close(), with which the next user may open it.
  void open(CompletionSink* sink) noexcept override GC_EXCLUDES(mutex_);
  void start(const Operation& operation) noexcept override { transport_->start(operation); }
  void abort(const char* reason) noexcept override { transport_->abort(reason); }
  void close() noexcept override { open(nullptr); }

 private:
  void began(int64_t ticket) noexcept override GC_EXCLUDES(mutex_);
  void queued(int64_t ticket) noexcept override GC_EXCLUDES(mutex_);
  void complete(int64_t ticket, const char* error) noexcept override GC_EXCLUDES(mutex_);

  std::vector<std::shared_ptr<void>> memory_;
  Sweep sweep_;
  Mutex mutex_;  // held in calls of the user's sink, which close() has to outlast
  CompletionSink* sink_ GC_GUARDED_BY(mutex_) = nullptr;
  std::unique_ptr<Transport> transport_;
};

}  // namespace gradcast
