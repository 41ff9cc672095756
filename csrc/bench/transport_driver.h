// Drives a transport by hand: starts operations one by one and waits for their completions. gradcast-bench measures
// collectives with it, and the cases that every transport must pass are written with it.
//
// Thread safety: any thread, except start and close: one thread, as in Transport.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gradcast/transport.h"
#include "gradcast/types.h"
#include "platform/sync.h"

namespace gradcast {

class TransportDriver final : public CompletionSink {
 public:
  // Opens the transport, which must outlive the driver.
  explicit TransportDriver(Transport& transport);
  ~TransportDriver() = default;

  int32_t rank() const { return transport_.rank(); }
  int32_t world_size() const { return transport_.world_size(); }

  void start(int64_t ticket, std::vector<Range> ranges, Op op, int32_t buffer);
  // The error of this ticket's first completion ("" for success), or nothing if none came in time. Negative: no limit.
  std::optional<std::string> wait(int64_t ticket, int64_t timeout_ns);
  // All completions so far, in order.
  std::vector<std::pair<int64_t, std::string>> completions() const;
  // Drops what has completed, so that memory and the time of wait() do not grow with the operations of a long run.
  void forget_completed();
  void abort(const std::string& reason) { transport_.abort(reason.c_str()); }
  // Aborts what is in flight, then closes. Idempotent. Returns false if the transport has not completed everything
  // within two seconds: it is then not closed, and neither it nor this driver may be destroyed.
  bool close();

  void began(int64_t) noexcept override {}  // the bytes were written before start()
  void queued(int64_t) noexcept override {}
  void complete(int64_t ticket, const char* error) noexcept override;

 private:
  bool all_completed() const GC_REQUIRES(mutex_);
  const std::string* completion_of(int64_t ticket) const
      GC_REQUIRES(mutex_);  // the first one; nullptr if none has come

  Transport& transport_;

  mutable Mutex mutex_;
  CondVar completed_;
  // By ticket. The transport reads them until the completion.
  std::map<int64_t, std::vector<Range>> ranges_ GC_GUARDED_BY(mutex_);
  std::vector<std::pair<int64_t, std::string>> completions_ GC_GUARDED_BY(mutex_);
  bool closed_ GC_GUARDED_BY(mutex_) = false;
};

}  // namespace gradcast
