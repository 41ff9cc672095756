// What callers run on their own threads: they change the shared state and post events, and never touch follower or
// transport.
#include <algorithm>
#include <utility>

#include "engine/loop.h"

namespace gradcast {
namespace {

// Far more than anyone looks at. Without a limit, a mistyped option would show only when memory has run out.
constexpr int32_t kTimelineIterationsMax = 1 << 20;
constexpr int32_t kQueueWindowMax = 1 << 10;
// Room in the queue for the event that is no gradient and no completion: the beginning of an iteration.
constexpr size_t kOtherEvents = 1;

const EngineOptions& checked(const EngineOptions& options) {
  if (options.thread_name.empty()) {
    throw Error(ErrorCode::kInvalidOption,
                "thread_name is empty; name the engine's thread, for tools that show threads");
  }
  if (options.timeline_iterations < 1 || options.timeline_iterations > kTimelineIterationsMax) {
    throw Error(ErrorCode::kInvalidOption, "timeline_iterations is " + std::to_string(options.timeline_iterations) +
                                               "; it must be 1 to " + std::to_string(kTimelineIterationsMax));
  }
  if (options.queue_window < 1 || options.queue_window > kQueueWindowMax) {
    throw Error(ErrorCode::kInvalidOption, "queue_window is " + std::to_string(options.queue_window) +
                                               "; it must be 1 to " + std::to_string(kQueueWindowMax));
  }
  return options;
}

std::vector<int32_t>::const_iterator from(const std::vector<int32_t>& tensors, int64_t position) {
  if (position < 0) {
    throw Error(ErrorCode::kInvalidUse,
                "tensors were asked for from position " + std::to_string(position) + "; positions count from 0");
  }
  return tensors.begin() + std::min(position, static_cast<int64_t>(tensors.size()));
}

}  // namespace

Engine::Loop::Loop(Transport& transport, const EngineOptions& options)
    : transport_(transport),
      thread_name_(checked(options).thread_name),
      queue_window_(options.queue_window),
      follower_(queue_window_),
      earlier_(queue_window_),
      queue_(kOtherEvents),
      recorder_(options.timeline_iterations) {
  MutexLock lock(join_mutex_);
  thread_ = std::thread([this] { run_on_loop(); });
}

int64_t Engine::Loop::follow(const Profile& profile, const Plan& plan) {
  check_profile(profile);
  check_plan(plan, profile);
  auto followed = std::make_shared<const FollowedPlan>(profile, plan);
  MutexLock lock(mutex_);
  require_healthy();
  if (is_busy()) {
    throw Error(ErrorCode::kInvalidUse, "a plan takes effect between iterations, and blocks of iteration " +
                                            std::to_string(iteration_) +
                                            " are not finished; wait for all of them first");
  }
  // One event for each gradient of an iteration, and three for each block in flight, also of the iteration before:
  // began, queued, complete.
  const size_t in_flight_max = std::min<size_t>(std::max(plan.in_flight, queue_window_), plan.blocks.size());
  queue_.raise_capacity(kOtherEvents + profile.tensors.size() + 6 * in_flight_max);
  next_plan_ = std::move(followed);
  return ++plan_version_;
}

int64_t Engine::Loop::begin() {
  MutexLock lock(mutex_);
  require_healthy();
  if (next_plan_ == nullptr) {
    throw Error(ErrorCode::kInvalidUse, "an iteration was begun without a plan; call follow first");
  }
  const bool is_last_queued = unfinished_count_ == 0 || are_there(std::nullopt, Progress::kQueued);
  if (earlier_unfinished_count_ > 0 || !is_last_queued) {
    throw Error(ErrorCode::kInvalidUse, "blocks of iteration " +
                                            std::to_string(is_last_queued ? iteration_ - 1 : iteration_) +
                                            " are not finished; wait for all of them before the next one begins");
  }
  earlier_plan_ = std::exchange(plan_, next_plan_);
  ++iteration_;
  earlier_unfinished_count_ = std::exchange(unfinished_count_, plan_->block_count());
  progress_.assign(plan_->tensor_names.size(), Progress::kTravelling);
  queued_.clear();
  arrivals_.clear();
  recorder_.begin(iteration_, plan_version_, plan_->tensor_names.size(), plan_->plan.blocks.size());
  // Posted under the lock, so that no gradient of this iteration is posted before it.
  // The first block needs its gradients; before those the thread has nothing to do.
  const size_t needed = plan_->block_count() > 0 ? plan_->block_tensors.front().size() : 0;
  GC_CHECK(queue_.push({.kind = Event::Kind::kBegin, .plan = plan_}, Queue::Wake::kCounted, needed));
  return iteration_;
}

void Engine::Loop::on_ready(int32_t tensor) {
  {
    MutexLock lock(mutex_);
    require_open();
    require_iteration();
    require_tensor(tensor);
    int64_t& ready_ns = recorder_.current().ready_ns[tensor];
    if (ready_ns != 0) {
      throw Error(ErrorCode::kInvalidUse, "the gradient of " + plan_->tensor_names[tensor] +
                                              " was given twice in iteration " + std::to_string(iteration_) +
                                              "; the first one may be on the network already");
    }
    ready_ns = steady_now_ns();
  }
  GC_CHECK(queue_.push({Event::Kind::kReady, tensor}, Queue::Wake::kCounted));
}

bool Engine::Loop::wait(Tensors tensors, int64_t timeout_ns, Progress until) {
  const int64_t deadline_ns = deadline_after(timeout_ns);
  MutexLock lock(mutex_);
  require_open();
  if (!failure_) {
    require_iteration();
    for (const int32_t tensor : tensors.value_or(std::span<const int32_t>())) {
      require_tensor(tensor);
    }
  }
  ++waiter_count_;
  const Outcome outcome = wait_until(tensors, deadline_ns, until);
  --waiter_count_;
  if (closed_) {
    changed_.notify_all();
  }
  if (outcome == Outcome::kFailed) {
    throw_latched();
  }
  return outcome == Outcome::kThere;
}

// Returns kFailed only when the engine has settled: until then the transport may touch the caller's buffers.
Engine::Loop::Outcome Engine::Loop::wait_until(Tensors tensors, int64_t deadline_ns, Progress until) {
  const int64_t iteration = iteration_;
  while (true) {
    const bool ending = failure_ || closed_;
    if (ending && settled_) {
      return Outcome::kFailed;
    }
    // Another caller may begin the next iteration before this thread wakes; then all of this one is queued.
    const bool is_over = iteration_ != iteration && (until <= Progress::kQueued || earlier_unfinished_count_ == 0);
    if (!ending && (is_over || are_there(tensors, until))) {
      return Outcome::kThere;
    }
    if (steady_now_ns() >= deadline_ns) {
      return Outcome::kTimeout;
    }
    changed_.wait_until(mutex_, deadline_ns);
  }
}

std::vector<int32_t> Engine::Loop::queued_no_later_than(std::span<const int32_t> tensors, int64_t position) const {
  MutexLock lock(mutex_);
  require_open();
  require_iteration();
  int32_t last_block = -1;
  for (const int32_t tensor : tensors) {
    require_tensor(tensor);
    last_block = std::max(last_block, plan_->last_block[tensor]);
  }
  const auto first = from(queued_, position);
  const auto is_later = [&last_of = plan_->last_block, last_block](int32_t tensor) {
    return last_of[tensor] > last_block;
  };
  return {first, std::find_if(first, queued_.end(), is_later)};
}

std::vector<int32_t> Engine::Loop::arrivals(int64_t position) const {
  MutexLock lock(mutex_);
  require_open();
  require_iteration();
  return {from(arrivals_, position), arrivals_.end()};
}

bool Engine::Loop::busy() const {
  MutexLock lock(mutex_);
  require_open();
  return is_busy();
}

std::string Engine::Loop::waiting_for() const {
  MutexLock lock(mutex_);
  require_open();
  if (!is_busy()) return "";
  return earlier_unfinished_count_ > 0 ? waiting_text(*earlier_plan_, recorder_.previous(), steady_now_ns())
                                       : waiting_text(*plan_, recorder_.current(), steady_now_ns());
}

std::vector<IterationRecord> Engine::Loop::timeline() const {
  MutexLock lock(mutex_);
  return recorder_.timeline();
}

EngineCounters Engine::Loop::counters() const {
  MutexLock lock(mutex_);
  EngineCounters counters = counters_;
  counters.record_bytes = recorder_.size_bytes();
  return counters;
}

void Engine::Loop::shutdown() {
  // Held to the end, so that a second caller returns only when the thread has ended.
  MutexLock join_lock(join_mutex_);
  if (!thread_.joinable()) {
    return;
  }
  {
    MutexLock lock(mutex_);
    closed_ = true;
  }
  queue_.close();
  thread_.join();
  // Callers may still be inside wait(), and this object may be destroyed as soon as shutdown() returns.
  MutexLock lock(mutex_);
  while (waiter_count_ > 0) {
    changed_.wait_until(mutex_, kNever);
  }
}

void Engine::Loop::require_open() const {
  if (closed_) {
    throw Error(ErrorCode::kInvalidUse, "the engine has been shut down; make a new one to go on");
  }
}

void Engine::Loop::require_healthy() const {
  require_open();
  if (failure_) {
    throw_latched();
  }
}

void Engine::Loop::require_iteration() const {
  if (iteration_ < 0) {
    throw Error(ErrorCode::kInvalidUse, "no iteration is open; call begin first");
  }
}

void Engine::Loop::require_tensor(int32_t tensor) const {
  if (tensor < 0 || tensor >= plan_->tensor_count()) {
    throw Error(ErrorCode::kInvalidUse, "tensor " + std::to_string(tensor) + " does not exist; the profile has " +
                                            std::to_string(plan_->tensor_count()) + " tensors, counted from 0");
  }
}

// Throws a new exception each time: several threads must not share one object.
void Engine::Loop::throw_latched() const {
  if (failure_) {
    throw Error(*failure_);
  }
  throw Error(ErrorCode::kCommunication, "the engine was shut down while iteration " + std::to_string(iteration_) +
                                             " was waited for; wait for all gradients before shutting down");
}

bool Engine::Loop::is_busy() const {
  return unfinished_count_ + earlier_unfinished_count_ > 0 && !failure_;
}

bool Engine::Loop::are_there(Tensors tensors, Progress until) const {
  if (until == Progress::kArrived && earlier_unfinished_count_ > 0) {
    return false;
  }
  if (!tensors) {
    return std::all_of(progress_.begin(), progress_.end(), [&](Progress progress) { return progress >= until; });
  }
  for (const int32_t tensor : *tensors) {
    if (progress_[tensor] < until) {
      return false;
    }
  }
  return true;
}

}  // namespace gradcast
