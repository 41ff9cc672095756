#include "bench/transport_driver.h"

#include <algorithm>
#include <chrono>

#include "gradcast/error.h"

namespace gradcast {

TransportDriver::TransportDriver(Transport& transport) : transport_(transport) {
  transport_.open(this);
}

void TransportDriver::start(int64_t ticket, std::vector<Range> ranges, Op op, int32_t buffer) {
  Operation operation;
  operation.ticket = ticket;
  operation.op = op;
  operation.buffer = buffer;
  {
    std::lock_guard lock(mutex_);
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
  std::unique_lock lock(mutex_);
  const auto find = [&] { return std::ranges::find(completions_, ticket, &std::pair<int64_t, std::string>::first); };
  const auto has_come = [&] { return find() != completions_.end(); };
  if (timeout_ns < 0) {
    completed_.wait(lock, has_come);
  } else if (!completed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), has_come)) {
    return std::nullopt;
  }
  return find()->second;
}

std::vector<std::pair<int64_t, std::string>> TransportDriver::completions() const {
  std::lock_guard lock(mutex_);
  return completions_;
}

bool TransportDriver::all_completed() const {
  return std::ranges::all_of(ranges_, [&](const auto& started) {
    return std::ranges::find(completions_, started.first, &std::pair<int64_t, std::string>::first) !=
           completions_.end();
  });
}

bool TransportDriver::close() {
  std::unique_lock lock(mutex_);
  if (closed_) {
    return all_completed();
  }
  closed_ = true;
  if (!all_completed()) {
    lock.unlock();
    transport_.abort("the driver was closed");
    lock.lock();
    if (!completed_.wait_for(lock, std::chrono::seconds(2), [&] { return all_completed(); })) {
      return false;
    }
  }
  lock.unlock();
  transport_.close();
  return true;
}

void TransportDriver::complete(int64_t ticket, const char* error) noexcept {
  // Notified under the lock: who sees the last completion may destroy this object.
  std::lock_guard lock(mutex_);
  completions_.emplace_back(ticket, error == nullptr ? "" : error);
  completed_.notify_all();
}

}  // namespace gradcast
