// The engine's thread: takes events from the queue, starts blocks, and publishes what has happened.
#include "engine/loop.h"

#include <algorithm>
#include <exception>
#include <limits>
#include <utility>

#include "platform/thread.h"

namespace gradcast {
namespace {

// A transport must complete everything within a second of abort(). What it holds longer than this it holds for good.
constexpr int64_t kDrainNs = 1'500'000'000;
// How long shutdown waits for a device that ends all operations in flight by itself. These are the last blocks of a
// step that was trained to its end; aborting them would lose nothing, but would end the device's work with an error.
constexpr int64_t kDeviceEndsNs = 400'000'000;
// "More gradients than can come": no number of them wakes the thread.
constexpr size_t kNoGradient = std::numeric_limits<size_t>::max();

// The time from since_ns on during which at least one of these blocks was due and not finished: the union of their
// intervals.
int64_t together_ns(std::vector<BlockRecord>& blocks, int64_t since_ns) {
  std::ranges::sort(blocks, {}, &BlockRecord::due_ns);
  int64_t total_ns = 0;
  int64_t end_ns = since_ns;
  for (const BlockRecord& block : blocks) {
    total_ns += std::max(int64_t{0}, block.finish_ns - std::max(block.due_ns, end_ns));
    end_ns = std::max(end_ns, block.finish_ns);
  }
  return total_ns;
}

// The network could not take the block before this.
void put_off(BlockRecord& record, int64_t time_ns) {
  record.due_ns = std::max(record.due_ns, time_ns);
  record.launch_ns = std::max(record.launch_ns, time_ns);
}

}  // namespace

void Engine::Loop::run_on_loop() {
  loop_id_ = std::this_thread::get_id();
  name_this_thread(thread_name_);
  transport_.open(this);
  while (!stopping_ || drain_deadline_ns_ != kNever) {
    const size_t counted_min = is_draining() ? kNoGradient : follower_.ready_missing_min();
    const Queue::Condition condition = queue_.pop_all(batch_, counted_min, drain_deadline_ns_);
    run_turn_on_loop(condition);
  }
  leave_on_loop();
}

// One turn of the loop. It takes in all events first, so that blocks start on the newest knowledge, and starts blocks
// before it wakes callers, so that the network does not stand idle.
void Engine::Loop::run_turn_on_loop(const Queue::Condition& condition) {
  GC_CHECK(on_loop());
  callers_due_ = false;
  for (const Event& event : batch_) {
    attempt_on_loop([&] { handle_on_loop(event); });
  }
  attempt_on_loop([&] { GC_CHECK(!condition.overflowed); });
  if (condition.closed && !stopping_) {
    stop_on_loop();
  }
  attempt_on_loop([&] { launch_on_loop(); });
  if (is_draining() && in_flight_count() == 0) {
    settle_on_loop();
  } else if (is_draining() && steady_now_ns() >= drain_deadline_ns_) {
    aborted_ ? settle_on_loop() : abort_on_loop("the engine was shut down");
  }
  if (callers_due_) {
    changed_.notify_all();
  }
  MutexLock lock(mutex_);
  counters_.loop_ns = thread_cpu_now_ns() - transport_cpu_ns_;
}

// Runs a part of a turn. A broken invariant fails the engine just as a broken network does: an exception that left the
// thread would end the process.
template <typename Action>
void Engine::Loop::attempt_on_loop(const Action& action) {
  GC_CHECK(on_loop());
  try {
    action();
  } catch (const Error& error) {
    fail_on_loop(error.code(), error.what());
  } catch (const std::exception& error) {
    fail_on_loop(ErrorCode::kInternal, std::string("the engine cannot go on: ") + error.what());
  }
}

void Engine::Loop::handle_on_loop(const Event& event) {
  GC_CHECK(on_loop());
  if (event.kind == Event::Kind::kBegin || event.kind == Event::Kind::kReady) {
    if (is_draining()) {
      return;
    }
    if (event.kind == Event::Kind::kReady) {
      follower_.on_ready(static_cast<int32_t>(event.subject));
    } else {
      begin_on_loop(event);
    }
    return;
  }
  const bool is_earlier = event.subject < first_ticket_;
  Follower& follower = is_earlier ? earlier_ : follower_;
  const int64_t block = event.subject - (is_earlier ? earlier_first_ticket_ : first_ticket_);
  const bool is_in_flight = follower.is_in_flight(block);
  if (event.kind == Event::Kind::kComplete) {
    if (!is_in_flight) {
      throw Error(ErrorCode::kInternal, "the transport completed operation " + std::to_string(event.subject) +
                                            ", which is not in flight; please report it");
    }
    complete_on_loop(follower, static_cast<int32_t>(block), event);
  } else if (is_in_flight) {
    progress_on_loop(follower, static_cast<int32_t>(block), event);
  }
}

// Blocks of the last iteration that a device has still to end are followed beside the new one.
void Engine::Loop::begin_on_loop(const Event& event) {
  GC_CHECK(on_loop());
  std::swap(follower_, earlier_);
  ++iteration_on_loop_;
  follower_.begin(event.plan);
  earlier_first_ticket_ = std::exchange(first_ticket_, started_count_);
}

// A device has written the block's bytes, will end it without the host, or has carried it.
void Engine::Loop::progress_on_loop(Follower& follower, int32_t block, const Event& event) {
  GC_CHECK(on_loop());
  if (event.kind == Event::Kind::kQueued) {
    if (&follower == &earlier_) return;  // known: an iteration begins when all blocks of the last one are queued
    follower.on_queued(block);
    room_since_ns_ = event.time_ns;
  }
  MutexLock lock(mutex_);
  if (event.kind == Event::Kind::kQueued) {
    publish_progress_on_loop(block);
  } else if (event.kind == Event::Kind::kTimed) {
    record_of(follower).blocks[block].device_ns = event.time_ns;
  } else {
    // The block counts from now on: before this the device had not written its gradients.
    BlockRecord& record = record_of(follower).blocks[block];
    record.ready_ns = event.time_ns;
    put_off(record, event.time_ns);
  }
}

// Counts the block out of flight in every case, because the transport completes it exactly once.
void Engine::Loop::complete_on_loop(Follower& follower, int32_t block, const Event& event) {
  GC_CHECK(on_loop());
  if (!event.error) {
    return finish_on_loop(follower, block, event.time_ns);
  }
  follower.on_finish(block);
  if (!is_draining()) {
    fail_on_loop(ErrorCode::kCommunication, block_text(follower.plan(), block) + " failed on rank " +
                                                std::to_string(transport_.rank()) + " of " +
                                                std::to_string(transport_.world_size()) + ": " + *event.error);
  }
}

void Engine::Loop::finish_on_loop(Follower& follower, int32_t block, int64_t finish_ns) {
  GC_CHECK(on_loop());
  const std::vector<int32_t> arrived = follower.on_finish(block);
  const int64_t size_bytes = follower.plan().plan.blocks[block].size_bytes();
  room_since_ns_ = finish_ns;
  MutexLock lock(mutex_);
  IterationRecord& record = record_of(follower);
  record.blocks[block].finish_ns = finish_ns;
  // In a device's queue another block has waited for this.
  const int32_t in_flight = follower.plan().plan.in_flight;
  if (follower.in_flight_count() >= in_flight && follower.is_in_flight(int64_t{block} + in_flight)) {
    put_off(record.blocks[block + in_flight], finish_ns);
  }
  lately_on_network_.push_back(record.blocks[block]);
  const bool counts_as_open = is_open(follower);
  if (counts_as_open) {
    publish_progress_on_loop(block);
    arrivals_.insert(arrivals_.end(), arrived.begin(), arrived.end());
  }
  int32_t& unfinished_count = counts_as_open ? unfinished_count_ : earlier_unfinished_count_;
  --unfinished_count;
  ++counters_.blocks;
  counters_.bytes += size_bytes;
  // On a device the next iteration's blocks may be under way before this one ends, always, so that the network is never
  // seen idle.
  if (--on_network_count_ == 0 || unfinished_count == 0) {
    counters_.link_ns += together_ns(lately_on_network_, link_counted_until_ns_);
    lately_on_network_.clear();
    link_counted_until_ns_ = finish_ns;
  }
  counters_.iterations += unfinished_count == 0 ? 1 : 0;
  callers_due_ = callers_due_ || unfinished_count == 0;
}

// Publishes how far the tensors of this block have come.
void Engine::Loop::publish_progress_on_loop(int32_t block) {
  for (const int32_t tensor : follower_.plan().block_tensors[block]) {
    const Progress before = std::exchange(progress_[tensor], follower_.progress_of(tensor));
    if (progress_[tensor] == before) continue;
    callers_due_ = true;
    if (progress_[tensor] == Progress::kQueued) queued_.push_back(tensor);
  }
}

// Starts blocks as long as the follower allows one.
void Engine::Loop::launch_on_loop() {
  GC_CHECK(on_loop());
  while (!is_draining()) {
    const std::optional<int32_t> block = follower_.next();
    if (!block) {
      return;
    }
    const Block& carried = follower_.plan().plan.blocks[*block];
    const int64_t launch_ns = steady_now_ns();
    record_launch_on_loop(*block, launch_ns);
    ++started_count_;
    GC_CHECK(started_count_ == first_ticket_ + *block + 1);
    const Operation operation{.ticket = first_ticket_ + *block,
                              .op = carried.op,
                              .buffer = carried.buffer,
                              .ranges = carried.ranges.data(),
                              .range_count = static_cast<int32_t>(carried.ranges.size())};
    // start() is the transport's work, not the engine's: loop_ns excludes it.
    const int64_t begin_ns = thread_cpu_now_ns();
    transport_.start(operation);
    transport_cpu_ns_ += thread_cpu_now_ns() - begin_ns;
  }
}

// A block is due when it is ready and the block before it has been launched or has made room in flight.
void Engine::Loop::record_launch_on_loop(int32_t block, int64_t launch_ns) {
  GC_CHECK(on_loop());
  const FollowedPlan& plan = follower_.plan();
  MutexLock lock(mutex_);
  IterationRecord& record = recorder_.current();
  int64_t ready_ns = 0;
  if (plan.plan.blocks[block].op == Op::kAllGather) {
    ready_ns = record.blocks[plan.partner[block]].finish_ns;
  } else {
    for (const int32_t tensor : plan.block_tensors[block]) {
      ready_ns = std::max(ready_ns, record.ready_ns[tensor]);
    }
  }
  record.blocks[block].ready_ns = ready_ns;
  record.blocks[block].due_ns = std::max(ready_ns, room_since_ns_);
  record.blocks[block].launch_ns = room_since_ns_ = launch_ns;
  ++on_network_count_;
}

// Latches the first failure; later ones are its consequences.
void Engine::Loop::fail_on_loop(ErrorCode code, const std::string& message) {
  GC_CHECK(on_loop());
  if (is_draining()) {
    return;
  }
  failed_ = true;
  {
    MutexLock lock(mutex_);
    failure_.emplace(code, message);
  }
  // Even if nothing else is in flight: the peers must learn that this rank will not go on.
  abort_on_loop(message);
}

void Engine::Loop::abort_on_loop(const std::string& reason) {
  GC_CHECK(on_loop());
  aborted_ = true;
  drain_deadline_ns_ = steady_now_ns() + kDrainNs;  // the abort may take most of that
  transport_.abort(reason.c_str());
}

void Engine::Loop::stop_on_loop() {
  GC_CHECK(on_loop());
  stopping_ = true;
  if (follower_.all_queued()) {
    drain_deadline_ns_ = steady_now_ns() + kDeviceEndsNs;
  } else {
    abort_on_loop("the engine was shut down");
  }
}

// Lets callers see the failure or the end. Not earlier, since they may then free their buffers, which the transport
// must no longer touch.
void Engine::Loop::settle_on_loop() {
  GC_CHECK(on_loop());
  drain_deadline_ns_ = kNever;
  callers_due_ = true;
  MutexLock lock(mutex_);
  settled_ = true;
}

void Engine::Loop::leave_on_loop() {
  GC_CHECK(on_loop());
  // close() requires that everything has completed, and might otherwise never return.
  is_abandoned_ = in_flight_count() > 0;
  if (!is_abandoned_) {
    transport_.close();
  }
}

// These two change the record only, so they need not wake the thread.
void Engine::Loop::began(int64_t ticket) noexcept {
  queue_.push({Event::Kind::kBegan, ticket, steady_now_ns()}, Queue::Wake::kCounted);
}

void Engine::Loop::timed(int64_t ticket, int64_t duration_ns) noexcept {
  queue_.push({Event::Kind::kTimed, ticket, duration_ns}, Queue::Wake::kCounted);
}

void Engine::Loop::queued(int64_t ticket) noexcept {
  queue_.push({Event::Kind::kQueued, ticket, steady_now_ns()}, Queue::Wake::kAtOnce);
}

void Engine::Loop::complete(int64_t ticket, const char* error) noexcept {
  Event event{Event::Kind::kComplete, ticket, steady_now_ns()};
  if (error != nullptr) {
    event.error = error;
  }
  // The queue has room for every completion that can come. If it is full, the transport completes what was never
  // started, and the thread fails the engine when it sees `overflowed`.
  queue_.push(std::move(event), Queue::Wake::kAtOnce);
}

}  // namespace gradcast
