// Drives a transport by hand: starts operations one by one and looks at their completions. The conformance suite that every
// transport passes is written with it.
//
// Thread safety: any thread, except start and close: one thread, as in Transport.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "gradcast/transport.h"
#include "gradcast/types.h"

namespace gradcast {

class TransportDriver final : public CompletionSink {
 public:
  // Opens the transport, which must outlive the driver, or be kept where is_abandoned() says so.
  explicit TransportDriver(Transport& transport);
  ~TransportDriver() = default;

  int32_t rank() const { return transport_.rank(); }
  int32_t world_size() const { return transport_.world_size(); }

  void start(int64_t ticket, std::vector<Range> ranges, Op op, int32_t buffer);
  // The error of this ticket's first completion ("" for success), or nothing if none came in time. Negative: no limit.
  std::optional<std::string> wait(int64_t ticket, int64_t timeout_ns);
  // All so far, in the order in which they came.
  std::vector<std::pair<int64_t, std::string>> completions() const;
  void abort(const std::string& reason) { transport_.abort(reason.c_str()); }
  // Aborts what is in flight, then closes. Returns false where the transport did not complete everything within two seconds:
  // then it is not closed, and this driver must not be destroyed. Idempotent.
  bool close();

  void began(int64_t) noexcept override {}  // who drives by hand has written the bytes before
  void queued(int64_t) noexcept override {}
  void complete(int64_t ticket, const char* error) noexcept override;

 private:
  bool all_completed() const;  // REQUIRES: mutex_ held

  Transport& transport_;

  // Guarded by mutex_.
  mutable std::mutex mutex_;
  std::condition_variable completed_;
  std::map<int64_t, std::vector<Range>> ranges_;  // by ticket: the transport reads them until the completion
  std::vector<std::pair<int64_t, std::string>> completions_;
  bool closed_ = false;
};

}  // namespace gradcast
