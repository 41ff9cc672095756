// The wire of an in-process world is one thread that carries out the operations, and the state that it shares with the
// ranks' transports, which only forward to it and keep it alive.
//
// The k-th operation of each rank is matched with the k-th of all others. It runs when all ranks have started it and
// the emulated network has had its time; sums and completions run on the wire's thread.
#include "gradcast/inproc.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gradcast/error.h"
#include "platform/sync.h"
#include "platform/thread.h"
#include "transport/common/host_memory.h"
#include "transport/common/numbers.h"
#include "transport/common/parts.h"

namespace gradcast {
namespace {

// One rank's part in an operation.
struct Contribution {
  HostBuffer buffer;
  std::span<const Range> ranges;
};

template <typename Number>
std::vector<Number> packed(const Contribution& rank) {
  std::vector<Number> message(static_cast<size_t>(size_bytes(rank.ranges)) / sizeof(Number));
  pack(message.data(), rank.buffer, rank.ranges);
  return message;
}

// Copies a rank's part of one message to its place in another.
template <typename Number>
void copy_part(const std::vector<Number>& from, std::vector<Number>& to, size_t rank, size_t world_size) {
  const Part part =
      part_of(static_cast<int32_t>(rank), static_cast<int32_t>(world_size), static_cast<int64_t>(from.size()));
  std::copy(from.begin() + part.first, from.begin() + part.last, to.begin() + part.first);
}

// Every rank's part for an all-gather, otherwise the sum.
template <typename Number>
std::vector<Number> result_of(Op op, std::span<const Contribution> ranks) {
  std::vector<Number> result = packed<Number>(ranks.front());
  for (size_t rank = 1; rank < ranks.size(); ++rank) {
    const std::vector<Number> message = packed<Number>(ranks[rank]);
    if (op == Op::kAllGather) {
      copy_part(message, result, rank, ranks.size());
    } else {
      std::ranges::transform(result, message, result.begin(), std::plus<>());
    }
  }
  return result;
}

template <typename Number>
void run(Op op, std::span<const Contribution> ranks) {
  const std::vector<Number> result = result_of<Number>(op, ranks);
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    std::vector<Number> own;
    if (op == Op::kReduceScatter) {
      own.assign(result.size(), Number(std::numeric_limits<float>::quiet_NaN()));
      copy_part(result, own, rank, ranks.size());
    }
    unpack(ranks[rank].buffer, ranks[rank].ranges, own.empty() ? result.data() : own.data());
  }
}

// Carries out the operation for all ranks at once. Sums are taken in the order of ranks, in the elements' own
// precision, so all ranks get the same bits. REQUIRES: all ranks have the same ranges, whole elements of the same type
// inside their buffers.
void run_collective(Op op, std::span<const Contribution> ranks) {
  with_number(ranks.front().buffer.element, [&]<typename Number>(Number) { run<Number>(op, ranks); });
}

}  // namespace

// Any thread.
class InprocWorld::Wire {
 public:
  Wire(int32_t world_size, const InprocCost& cost);
  ~Wire();

  int32_t world_size() const { return world_size_; }
  void admit(int32_t rank, std::vector<HostBuffer> buffers) GC_EXCLUDES(mutex_);

  // As in Transport, for one rank.
  void open(int32_t rank, CompletionSink* sink) GC_EXCLUDES(mutex_);
  void start(int32_t rank, const Operation& operation) GC_EXCLUDES(mutex_);
  void abort(int32_t rank, const std::string& reason) GC_EXCLUDES(mutex_);
  void close(int32_t rank) GC_EXCLUDES(mutex_);
  // Abort and close in one, for a transport that is destroyed in the middle of its work.
  void dismiss(int32_t rank) GC_EXCLUDES(mutex_);

 private:
  // An operation as one rank started it.
  struct Started {
    Operation operation;
    int64_t start_ns = 0;
    std::optional<std::string> fault;  // why it cannot begin
    bool completed = false;
  };
  struct Member {
    std::vector<HostBuffer> buffers;
    bool admitted = false;
    CompletionSink* sink = nullptr;
    std::deque<Started> started;      // those from number first_index_ on
    std::optional<std::string> left;  // why this rank is gone
    int32_t delivery_count = 0;       // calls of the sink that are pending or running
  };
  struct Delivery {
    int32_t rank;
    int64_t ticket;
    std::optional<std::string> error;
  };

  void run() GC_EXCLUDES(mutex_);
  std::vector<Delivery> failures_due() GC_REQUIRES(mutex_);
  std::optional<std::string> failure_of(int32_t rank, const Started& started) const GC_REQUIRES(mutex_);
  // When the first operation ends; nothing before all ranks have started it.
  std::optional<int64_t> first_finish_ns() const GC_REQUIRES(mutex_);
  // How the ranks' first operations differ. REQUIRES: all ranks have started theirs.
  std::optional<std::string> first_mismatch() const GC_REQUIRES(mutex_);
  std::vector<Delivery> pop_first(const std::optional<std::string>& error) GC_REQUIRES(mutex_);
  // These two give the mutex up in between: start() must not wait for sums or for a sink.
  void run_first() GC_REQUIRES(mutex_);
  void deliver(const std::vector<Delivery>& deliveries) GC_REQUIRES(mutex_);

  // Constant after construction.
  const int32_t world_size_;
  const InprocCost cost_;

  Mutex mutex_;
  CondVar changed_;                                    // for the wire's thread
  CondVar delivered_;                                  // for transports that close
  std::vector<Member> members_ GC_GUARDED_BY(mutex_);  // by rank
  int64_t first_index_ GC_GUARDED_BY(mutex_) = 0;      // of the operation that the wire takes next
  int64_t free_ns_ GC_GUARDED_BY(mutex_) = 0;          // when the wire is done with the one before
  bool stopping_ GC_GUARDED_BY(mutex_) = false;

  std::thread thread_;
};

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

void InprocWorld::Wire::admit(int32_t rank, std::vector<HostBuffer> buffers) {
  if (rank < 0 || rank >= world_size()) {
    refuse("rank " + std::to_string(rank) + " does not exist; the world has " + std::to_string(world_size()) +
           ", counted from 0");
  }
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

void InprocWorld::Wire::run_first() {
  const Op op = members_.front().started.front().operation.op;
  std::vector<Contribution> contributions;
  for (const Member& member : members_) {
    const Operation& operation = member.started.front().operation;
    contributions.push_back({member.buffers[operation.buffer], ranges_of(operation)});
  }
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

class InprocWorld::RankTransport final : public Transport {
 public:
  RankTransport(std::shared_ptr<Wire> wire, int32_t rank) : wire_(std::move(wire)), rank_(rank) {}
  // The buffers may be freed next, so the wire must be done with them.
  ~RankTransport() override { wire_->dismiss(rank_); }

  int32_t rank() const noexcept override { return rank_; }
  int32_t world_size() const noexcept override { return wire_->world_size(); }
  void open(CompletionSink* sink) noexcept override { wire_->open(rank_, sink); }
  void start(const Operation& operation) noexcept override { wire_->start(rank_, operation); }
  void abort(const char* reason) noexcept override { wire_->abort(rank_, reason); }
  void close() noexcept override { wire_->close(rank_); }

 private:
  const std::shared_ptr<Wire> wire_;
  const int32_t rank_;
};

InprocWorld::InprocWorld(int32_t world_size, const InprocCost& cost)
    : wire_(std::make_shared<Wire>(world_size, cost)) {}

InprocWorld::~InprocWorld() = default;

int32_t InprocWorld::world_size() const {
  return wire_->world_size();
}

std::unique_ptr<Transport> InprocWorld::transport(int32_t rank, std::vector<HostBuffer> buffers) {
  wire_->admit(rank, std::move(buffers));
  return std::make_unique<RankTransport>(wire_, rank);
}

}  // namespace gradcast
