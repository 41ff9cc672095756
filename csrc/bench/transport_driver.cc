#include "bench/transport_driver.h"

#include <algorithm>

#include "gradcast/error.h"

namespace gradcast {
namespace {

// Twice what a transport may take to complete everything after an abort.
constexpr int64_t kAbortedWithinNs = 2'000'000'000;

}  // namespace

TransportDriver::TransportDriver(Transport& transport) : transport_(transport) {
  transport_.open(this);
}

void TransportDriver::start(int64_t ticket, std::vector<Range> ranges, Op op, int32_t buffer) {
  Operation operation;
  operation.ticket = ticket;
  operation.op = op;
  operation.buffer = buffer;
  {
    MutexLock lock(mutex_);
    if (closed_) {
      throw Error(ErrorCode::kInvalidUse, "the driver is closed; make a new one, on a new transport");
    }
    const auto [place, added] = ranges_.try_emplace(ticket, std::move(ranges));
    if (!added) {
      throw Error(ErrorCode::kInvalidUse,
                  "ticket " + std::to_string(ticket) + " was started already; each operation has its own");
    }
    operation.ranges = place->second.data();
    operation.range_count = static_cast<int32_t>(place->second.size());
  }
  transport_.start(operation);
}

std::optional<std::string> TransportDriver::wait(int64_t ticket, int64_t timeout_ns) {
  const int64_t deadline_ns = deadline_after(timeout_ns);
  MutexLock lock(mutex_);
  const std::string* error = nullptr;
  while ((error = completion_of(ticket)) == nullptr && steady_now_ns() < deadline_ns) {
    completed_.wait_until(mutex_, deadline_ns);
  }
  return error == nullptr ? std::nullopt : std::optional(*error);
}

const std::string* TransportDriver::completion_of(int64_t ticket) const {
  const auto found = std::ranges::find(completions_, ticket, &std::pair<int64_t, std::string>::first);
  return found == completions_.end() ? nullptr : &found->second;
}

std::vector<std::pair<int64_t, std::string>> TransportDriver::completions() const {
  MutexLock lock(mutex_);
  return completions_;
}

void TransportDriver::forget_completed() {
  MutexLock lock(mutex_);
  for (const auto& [ticket, error] : completions_) {
    ranges_.erase(ticket);
  }
  completions_.clear();
}

bool TransportDriver::all_completed() const {
  for (const auto& [ticket, ranges] : ranges_) {
    if (completion_of(ticket) == nullptr) return false;
  }
  return true;
}

bool TransportDriver::close() {
  MutexLock lock(mutex_);
  if (closed_) {
    return all_completed();
  }
  closed_ = true;
  if (!all_completed()) {
    lock.unlock();
    transport_.abort("the driver was closed");
    lock.lock();
    const int64_t deadline_ns = steady_now_ns() + kAbortedWithinNs;
    while (!all_completed() && steady_now_ns() < deadline_ns) {
      completed_.wait_until(mutex_, deadline_ns);
    }
    if (!all_completed()) {
      return false;
    }
  }
  lock.unlock();
  transport_.close();
  return true;
}

void TransportDriver::complete(int64_t ticket, const char* error) noexcept {
  // Notifies under the lock: a thread that sees the last completion may destroy this object.
  MutexLock lock(mutex_);
  completions_.emplace_back(ticket, error == nullptr ? "" : error);
  completed_.notify_all();
}

}  // namespace gradcast
