#include "transport/inproc/wire.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <span>

#include "gradcast/error.h"
#include "transport/common/host_memory.h"
#include "transport/inproc/collective.h"

namespace gradcast {
namespace {

int64_t now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidOption, message);
}

std::string operation_text(const Operation& operation, Element element) {
  return std::string(to_string(operation.op)) + " of bytes " + ranges_text(operation) + " of buffer " +
         std::to_string(operation.buffer) + " (" + std::string(to_string(element)) + ")";
}

bool same(const Operation& a, const Operation& b) {
  return a.op == b.op && a.buffer == b.buffer && std::ranges::equal(ranges_of(a), ranges_of(b));
}

}  // namespace

InprocWorld::Wire::Wire(int32_t world_size, const InprocCost& cost) : cost_(cost) {
  if (world_size < 1) {
    refuse("world_size is " + std::to_string(world_size) + "; a world has at least one rank");
  }
  if (!(cost.alpha_ns >= 0) || !(cost.beta_ns_per_byte >= 0) || !std::isfinite(cost.alpha_ns) ||
      !std::isfinite(cost.beta_ns_per_byte)) {
    refuse("alpha_ns and beta_ns_per_byte must be 0 or more");
  }
  members_.resize(static_cast<size_t>(world_size));
  thread_ = std::thread([this] { run(); });
}

InprocWorld::Wire::~Wire() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void InprocWorld::Wire::check_rank(int32_t rank) const {
  if (rank < 0 || rank >= world_size()) {
    refuse("rank " + std::to_string(rank) + " does not exist; the world has " + std::to_string(world_size()) +
           ", counted from 0");
  }
}

void InprocWorld::Wire::admit(int32_t rank, std::vector<HostBuffer> buffers) {
  check_rank(rank);
  check_extents(extents_of(buffers));
  std::lock_guard lock(mutex_);
  Member& member = members_[rank];
  if (member.admitted) {
    refuse("rank " + std::to_string(rank) + " has its transport already; a rank has one");
  }
  member.admitted = true;
  member.buffers = std::move(buffers);
}

void InprocWorld::Wire::open(int32_t rank, CompletionSink* sink) {
  std::lock_guard lock(mutex_);
  members_[rank].sink = sink;
}

void InprocWorld::Wire::start(int32_t rank, const Operation& operation) {
  {
    std::lock_guard lock(mutex_);
    Member& member = members_[rank];
    member.started.push_back({operation, now_ns(), fault_of(operation, extents_of(member.buffers))});
  }
  changed_.notify_one();
}

void InprocWorld::Wire::abort(int32_t rank, const std::string& reason) {
  {
    std::lock_guard lock(mutex_);
    std::optional<std::string>& left = members_[rank].left;
    left = left ? left : reason;
  }
  changed_.notify_one();
}

void InprocWorld::Wire::close(int32_t rank) {
  std::unique_lock lock(mutex_);
  Member& member = members_[rank];
  member.left = member.left ? member.left : "it has closed its transport";
  changed_.notify_one();
  // Everything has completed, but perhaps the wire has not yet come back from saying so.
  delivered_.wait(lock, [&] { return member.delivery_count == 0; });
}

void InprocWorld::Wire::dismiss(int32_t rank) {
  abort(rank, "its transport is gone");
  std::unique_lock lock(mutex_);
  Member& member = members_[rank];
  delivered_.wait(
      lock, [&] { return member.delivery_count == 0 && std::ranges::all_of(member.started, &Started::completed); });
}

void InprocWorld::Wire::run() {
#if defined(__APPLE__)
  pthread_setname_np("gc-inproc");
#else
  pthread_setname_np(pthread_self(), "gc-inproc");
#endif
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    const std::vector<Delivery> failures = failures_due();
    if (!failures.empty()) {
      deliver(lock, failures);
      continue;
    }
    const std::optional<int64_t> finish_ns = first_finish_ns();
    if (!finish_ns) {
      changed_.wait(lock);
    } else if (const std::optional<std::string> mismatch = first_mismatch()) {
      deliver(lock, pop_first(mismatch));
    } else if (*finish_ns <= now_ns()) {
      free_ns_ = *finish_ns;
      run_first(lock);
    } else {
      changed_.wait_until(lock, std::chrono::steady_clock::time_point(std::chrono::nanoseconds(*finish_ns)));
    }
  }
}

std::vector<InprocWorld::Wire::Delivery> InprocWorld::Wire::failures_due() {
  std::vector<Delivery> due;
  for (int32_t rank = 0; rank < world_size(); ++rank) {
    // Operations of a rank end in the order of their start.
    for (Started& started : members_[rank].started) {
      std::optional<std::string> failure = started.completed ? std::nullopt : failure_of(rank, started);
      if (failure) {
        started.completed = true;
        due.push_back({rank, started.operation.ticket, std::move(failure)});
      } else if (!started.completed) {
        break;
      }
    }
  }
  return due;
}

std::optional<std::string> InprocWorld::Wire::failure_of(int32_t rank, const Started& started) const {
  if (members_[rank].left) {
    return members_[rank].left;
  }
  if (started.fault) {
    return started.fault;
  }
  for (int32_t other = 0; other < world_size(); ++other) {
    if (members_[other].left) {
      return "rank " + std::to_string(other) + " has left: " + *members_[other].left;
    }
  }
  return std::nullopt;
}

std::optional<int64_t> InprocWorld::Wire::first_finish_ns() const {
  int64_t started_ns = 0;  // by the last rank
  for (const Member& member : members_) {
    if (member.started.empty() || member.started.front().completed || member.started.front().fault) {
      return std::nullopt;
    }
    started_ns = std::max(started_ns, member.started.front().start_ns);
  }
  const double bytes = static_cast<double>(size_bytes(members_.front().started.front().operation));
  const int64_t begin_ns = std::max(started_ns + static_cast<int64_t>(cost_.alpha_ns), free_ns_);
  return begin_ns + static_cast<int64_t>(cost_.beta_ns_per_byte * bytes);
}

std::optional<std::string> InprocWorld::Wire::first_mismatch() const {
  const auto operation_of = [&](int32_t rank) -> const Operation& { return members_[rank].started.front().operation; };
  const auto element_of = [&](int32_t rank) { return members_[rank].buffers[operation_of(rank).buffer].element; };
  for (int32_t rank = 1; rank < world_size(); ++rank) {
    if (!same(operation_of(0), operation_of(rank)) || element_of(0) != element_of(rank)) {
      return "ranks 0 and " + std::to_string(rank) + " started different operations as number " +
             std::to_string(first_index_) + ": rank 0 " + operation_text(operation_of(0), element_of(0)) + ", rank " +
             std::to_string(rank) + " " + operation_text(operation_of(rank), element_of(rank)) +
             "; all ranks must start the same operations in the same order";
    }
  }
  return std::nullopt;
}

std::vector<InprocWorld::Wire::Delivery> InprocWorld::Wire::pop_first(const std::optional<std::string>& error) {
  std::vector<Delivery> deliveries;
  for (int32_t rank = 0; rank < world_size(); ++rank) {
    deliveries.push_back({rank, members_[rank].started.front().operation.ticket, error});
    members_[rank].started.pop_front();
  }
  ++first_index_;
  return deliveries;
}

void InprocWorld::Wire::run_first(std::unique_lock<std::mutex>& lock) {
  const Op op = members_.front().started.front().operation.op;
  std::vector<Contribution> contributions;
  for (const Member& member : members_) {
    const Operation& operation = member.started.front().operation;
    contributions.push_back({member.buffers[operation.buffer], ranges_of(operation)});
  }
  // Without the lock: start() must return at once, however large this operation is. What it works on stays: only this
  // thread completes operations.
  lock.unlock();
  run_collective(op, contributions);
  lock.lock();
  deliver(lock, pop_first(std::nullopt));
}

void InprocWorld::Wire::deliver(std::unique_lock<std::mutex>& lock, const std::vector<Delivery>& deliveries) {
  for (const Delivery& delivery : deliveries) {
    ++members_[delivery.rank].delivery_count;
  }
  for (const Delivery& delivery : deliveries) {
    Member& member = members_[delivery.rank];
    CompletionSink* sink = member.sink;
    lock.unlock();
    sink->complete(delivery.ticket, delivery.error ? delivery.error->c_str() : nullptr);
    lock.lock();
    --member.delivery_count;
    delivered_.notify_all();
  }
}

}  // namespace gradcast
