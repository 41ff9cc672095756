// A transport carries blocks between ranks. The engine starts operations; the transport posts one completion for each, and
// before it, where a device works on by itself: that it had written the bytes, that it will end the operation.
//
// Only plain data crosses this interface, and no exception does: a transport for torch is compiled on the user's machine,
// by another compiler than the one that built the engine. A change of anything here changes kTransportCapsule.
//
// Every rank starts the same operations in the same order. That is the caller's duty, since no backend checks it: on two
// ranks that start different operations most backends hang, die, or sum the wrong bytes without an error.
//
// Thread safety: any thread for `abort` and the sink; `open`, `start` and `close` from one thread.
#pragma once

#include <cstdint>

#include "gradcast/types.h"

namespace gradcast {

// The name of the Python capsule that hands a Transport* from the module that made it to the one that runs the engine.
inline constexpr const char* kTransportCapsule = "gradcast.Transport.3";

// One collective operation over `ranges` of one buffer: sums of what all ranks hold there. kAllReduce leaves the sum on
// every rank. kReduceScatter leaves on rank r the sum of the r-th of world_size parts and the rest undefined; kAllGather
// brings each rank's part to all. Parts are of ceil(elements / world_size) elements each, the last ones shorter or empty.
struct Operation {
  int64_t ticket = 0;  // names the operation in its completion; ascending
  Op op = Op::kAllReduce;
  int32_t buffer = 0;
  const Range* ranges =
      nullptr;  // ascending, disjoint; several are packed into one message. Valid until the completion
  int32_t range_count = 0;
};

// Where completions go. Implemented by the engine.
class CompletionSink {
 public:
  // A device had not written all of the operation's bytes when it was started, and now it has: the operation begins. At
  // most once, before the completion; ignored afterwards. Returns at once.
  virtual void began(int64_t ticket) noexcept = 0;
  // All that is left of the operation is in a device's queue: whoever puts work there behind it need not wait on the host.
  // At most once, before the completion; ignored afterwards. Returns at once.
  virtual void queued(int64_t ticket) noexcept = 0;
  // `error` is nullptr after success, otherwise a sentence, which is copied before the call returns. Returns at once.
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

  // Begins the operation and returns without waiting for the network. Its completion comes exactly once, from any thread,
  // also after an abort; an operation that cannot even begin completes with an error. REQUIRES: every tensor in its
  // ranges exists, and nobody else touches these bytes until the completion, but work that a device does behind the end of
  // the operation.
  virtual void start(const Operation& operation) noexcept = 0;

  // Everything that has been started completes within a second, with `reason` as its error where the network has not
  // finished it; what is started later completes at once in the same way. Idempotent.
  virtual void abort(const char* reason) noexcept = 0;

  // Ends the transport's threads. No completion comes after it has returned. REQUIRES: everything started has completed.
  virtual void close() noexcept = 0;
};

}  // namespace gradcast
