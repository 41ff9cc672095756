// A transport carries blocks between ranks. The engine starts operations, and the transport reports one completion for
// each. If a device does the work, the transport reports two more events before that: the device has written the bytes
// (began), and it will end the operation without the host (queued). It may also report the device's own time (timed).
//
// Only plain data crosses this interface, and no exception does: the transport for torch is compiled on the user's
// machine, by another compiler than the one that built the engine. Any change of Operation, CompletionSink or Transport
// changes kTransportCapsule.
//
// Every rank starts the same operations in the same order. The caller has to see to that, because no backend checks it:
// with different operations on two ranks most backends hang, crash, or sum the wrong bytes without an error.
//
// Thread safety: any thread for `abort` and the sink; `open`, `start` and `close` from one thread.
#pragma once

#include <cstdint>

#include "gradcast/types.h"

namespace gradcast {

// The name of the Python capsule that hands a Transport* from the module that made it to the one that runs the engine.
inline constexpr const char* kTransportCapsule = "gradcast.Transport.4";

enum class Element { kFloat32, kFloat64, kBFloat16 };

// One gradient buffer, of a transport that works on the host's memory or says otherwise. The memory must stay valid until
// the transport is closed.
struct HostBuffer {
  void* data = nullptr;
  int64_t size_bytes = 0;  // a multiple of the element's size
  Element element = Element::kFloat32;
  // Memory of this size that operations read instead, and leave as it is; nullptr: they work in place.
  const void* source = nullptr;
};

// One collective operation over `ranges` of one buffer. kAllReduce leaves the sum over all ranks on every rank.
// kReduceScatter leaves the sum of part r on rank r, and the other parts undefined. kAllGather brings each rank's part
// to all ranks. There are world_size parts of ceil(elements / world_size) elements; the last ones are shorter or empty.
struct Operation {
  int64_t ticket = 0;  // names the operation in its completion; ascending
  Op op = Op::kAllReduce;
  int32_t buffer = 0;
  const Range* ranges = nullptr;  // ascending and disjoint; several are one message. Valid until the completion
  int32_t range_count = 0;
};

// Receives the events of operations. Implemented by the engine. All functions return at once.
class CompletionSink {
 public:
  // A device has now written all bytes of the operation, which it had not when the operation was started. At most once,
  // before the completion; ignored afterwards.
  virtual void began(int64_t ticket) noexcept = 0;
  // The rest of the operation is in a device's queue, so work that is queued behind it needs no wait on the host. At
  // most once, before the completion; ignored afterwards.
  virtual void queued(int64_t ticket) noexcept = 0;
  // So long the device has carried the operation, by its own clock. At most once, before the completion.
  virtual void timed(int64_t /*ticket*/, int64_t /*duration_ns*/) noexcept {}
  // Exactly once. `error` is nullptr after success, otherwise a message that is copied before the call returns.
  virtual void complete(int64_t ticket, const char* error) noexcept = 0;

 protected:
  ~CompletionSink() = default;
};

class Transport {
 public:
  virtual ~Transport() = default;

  virtual int32_t rank() const noexcept = 0;
  virtual int32_t world_size() const noexcept = 0;

  // Called once, before everything below. `sink` lives until close() has returned.
  virtual void open(CompletionSink* sink) noexcept = 0;

  // Starts the operation and returns without waiting for the network. The completion comes exactly once, on any thread,
  // also after an abort. An operation that cannot begin completes with an error. REQUIRES: every gradient in its ranges
  // exists, and no other thread touches these bytes until the completion, except device work that is queued behind the
  // operation.
  virtual void start(const Operation& operation) noexcept = 0;

  // Completes everything that has been started within a second; operations that the network has not finished get
  // `reason` as their error. Later operations complete at once with the same error. Idempotent.
  virtual void abort(const char* reason) noexcept = 0;

  // Ends the transport's threads. No event comes after it has returned. REQUIRES: everything started has completed.
  virtual void close() noexcept = 0;
};

}  // namespace gradcast
