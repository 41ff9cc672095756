#include "transport/inproc/wire.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "gradcast/error.h"
#include "platform/clock.h"
#include "platform/thread.h"
#include "transport/common/host_memory.h"
#include "transport/inproc/collective.h"

namespace gradcast {
namespace {

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

// The thread starts last, when everything it uses exists.
InprocWorld::Wire::Wire(int32_t world_size, const InprocCost& cost) : world_size_(world_size), cost_(cost) {
  if (world_size < 1) {
    refuse("world_size is " + std::to_string(world_size) + "; a world has at least one rank");
  }
  if (!(cost.alpha_ns >= 0) || !(cost.beta_ns_per_byte >= 0) || !std::isfinite(cost.alpha_ns) ||
      !std::isfinite(cost.beta_ns_per_byte)) {
    refuse("alpha_ns and beta_ns_per_byte must be 0 or more");
  }
  {
    MutexLock lock(mutex_);
    members_.resize(static_cast<size_t>(world_size));
  }
  thread_ = std::thread([this] { run(); });
}

InprocWorld::Wire::~Wire() {
  {
    MutexLock lock(mutex_);
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
  MutexLock lock(mutex_);
  Member& member = members_[rank];
  if (member.admitted) {
    refuse("rank " + std::to_string(rank) + " has its transport already; a rank has one");
  }
  member.admitted = true;
  member.buffers = std::move(buffers);
}

void InprocWorld::Wire::open(int32_t rank, CompletionSink* sink) {
  MutexLock lock(mutex_);
  members_[rank].sink = sink;
}

// Never completes the operation itself: completions come from the wire's thread only, so the caller may hold locks.
void InprocWorld::Wire::start(int32_t rank, const Operation& operation) {
  {
    MutexLock lock(mutex_);
    Member& member = members_[rank];
    member.started.push_back({operation, steady_now_ns(), fault_of(operation, extents_of(member.buffers))});
  }
  changed_.notify_one();
}

void InprocWorld::Wire::abort(int32_t rank, const std::string& reason) {
  {
    MutexLock lock(mutex_);
    std::optional<std::string>& left = members_[rank].left;
    left = left ? left : reason;
  }
  changed_.notify_one();
}

void InprocWorld::Wire::close(int32_t rank) {
  MutexLock lock(mutex_);
  Member& member = members_[rank];
  member.left = member.left ? member.left : "it has closed its transport";
  changed_.notify_one();
  // Everything has completed, but the wire may still be inside the sink.
  while (member.delivery_count > 0) {
    delivered_.wait(mutex_);
  }
}

// Completes everything this rank has started before it returns, because its buffers may be freed next.
void InprocWorld::Wire::dismiss(int32_t rank) {
  abort(rank, "its transport is gone");
  MutexLock lock(mutex_);
  Member& member = members_[rank];
  while (member.delivery_count > 0 || !std::ranges::all_of(member.started, &Started::completed)) {
    delivered_.wait(mutex_);
  }
}

void InprocWorld::Wire::run() {
  name_this_thread("gc-inproc");
  MutexLock lock(mutex_);
  while (!stopping_) {
    const std::vector<Delivery> failures = failures_due();
    if (!failures.empty()) {
      deliver(failures);
      continue;
    }
    const std::optional<int64_t> finish_ns = first_finish_ns();
    if (!finish_ns) {
      changed_.wait(mutex_);
    } else if (const std::optional<std::string> mismatch = first_mismatch()) {
      deliver(pop_first(mismatch));
    } else if (*finish_ns <= steady_now_ns()) {
      free_ns_ = *finish_ns;
      run_first();
    } else {
      changed_.wait_until(mutex_, *finish_ns);
    }
  }
}

// Failures do not wait for the network: they are delivered before any operation runs.
std::vector<InprocWorld::Wire::Delivery> InprocWorld::Wire::failures_due() {
  std::vector<Delivery> due;
  for (int32_t rank = 0; rank < world_size(); ++rank) {
    // Stops at the first operation that goes on, because operations of a rank end in the order of their start.
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

// A rank's own reasons come first; the others' departure is a consequence of something that happened there.
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

// The emulated link of play(): alpha may pass while the operation before is on the wire, the bytes may not.
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
  const Operation& first = members_[0].started.front().operation;
  const Element first_element = members_[0].buffers[first.buffer].element;
  for (int32_t rank = 1; rank < world_size(); ++rank) {
    const Operation& other = members_[rank].started.front().operation;
    const Element other_element = members_[rank].buffers[other.buffer].element;
    if (!same(first, other) || first_element != other_element) {
      return "ranks 0 and " + std::to_string(rank) + " started different operations as number " +
             std::to_string(first_index_) + ": rank 0 " + operation_text(first, first_element) + ", rank " +
             std::to_string(rank) + " " + operation_text(other, other_element) +
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

std::vector<Contribution> InprocWorld::Wire::first_contributions() const {
  std::vector<Contribution> contributions;
  for (const Member& member : members_) {
    const Operation& operation = member.started.front().operation;
    contributions.push_back({member.buffers[operation.buffer], ranges_of(operation)});
  }
  return contributions;
}

void InprocWorld::Wire::run_first() {
  const Op op = members_.front().started.front().operation.op;
  const std::vector<Contribution> contributions = first_contributions();
  // The memory stays valid without the lock, because only this thread completes operations.
  mutex_.unlock();
  run_collective(op, contributions);
  mutex_.lock();
  deliver(pop_first(std::nullopt));
}

void InprocWorld::Wire::deliver(const std::vector<Delivery>& deliveries) {
  for (const Delivery& delivery : deliveries) {
    ++members_[delivery.rank].delivery_count;
  }
  for (const Delivery& delivery : deliveries) {
    CompletionSink* const sink = members_[delivery.rank].sink;
    mutex_.unlock();
    sink->complete(delivery.ticket, delivery.error ? delivery.error->c_str() : nullptr);
    mutex_.lock();
    --members_[delivery.rank].delivery_count;
    delivered_.notify_all();
  }
}

}  // namespace gradcast
