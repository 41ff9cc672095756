// The inside of the engine: one thread that owns the follower and the transport, and the state that callers share with
// it.
//
// Callers and the transport post events into one bounded queue. The thread answers by starting blocks and by updating
// the shared state, on which callers wait. loop.cc is the thread, loop_calls.cc what callers run, engine.cc the public
// class.
//
// Invariants:
// 1. Only the thread calls the follower and the transport's open, start and close.
// 2. Tickets ascend: block k of the open iteration has the ticket first_ticket_ + k. Lower ones are of the iteration
//    before, whose blocks a device may still end. A completion with any other ticket is an error of the transport.
// 3. Once failed_ or stopping_ is set, nothing is started any more; what is in flight is drained.
// 4. Callers see a failure only after settled_ is set: until then the transport may touch their buffers.
// 5. Lock order: join_mutex_, then mutex_, then the queue's own.
//
// Thread safety: any thread, except functions that end in _on_loop: loop thread only.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "engine/bounded_queue.h"
#include "engine/follower.h"
#include "engine/recorder.h"
#include "gradcast/engine.h"
#include "gradcast/error.h"
#include "gradcast/transport.h"
#include "platform/clock.h"
#include "platform/sync.h"

namespace gradcast {

// Texts for error messages, and for iterations that stand still: describe.cc.
// "block 3 of 7 (layer4.conv2.weight … fc.bias, 12.4 MB)", counted from 1; for halves of an all-reduce "block 3 of 7
// (all-gather of fc.weight, 2.0 MB)".
std::string block_text(const FollowedPlan& plan, int32_t block);

// The cause of an open iteration's wait: its oldest block on the network, or else the missing gradients of its next
// block. Empty if all blocks have finished.
std::string waiting_text(const FollowedPlan& plan, const IterationRecord& record, int64_t now_ns);

class Engine::Loop final : public CompletionSink {
 public:
  Loop(Transport& transport, const EngineOptions& options);
  ~Loop() { shutdown(); }

  // See Engine.
  int64_t follow(const Profile& profile, const Plan& plan) GC_EXCLUDES(mutex_);
  int64_t begin() GC_EXCLUDES(mutex_);
  void on_ready(int32_t tensor) GC_EXCLUDES(mutex_);
  using Tensors = std::optional<std::span<const int32_t>>;  // without them: all
  bool wait(Tensors tensors, int64_t timeout_ns, Progress until) GC_EXCLUDES(mutex_);
  std::vector<int32_t> queued_no_later_than(std::span<const int32_t> tensors, int64_t position) const
      GC_EXCLUDES(mutex_);
  std::vector<int32_t> arrivals(int64_t position) const GC_EXCLUDES(mutex_);
  bool busy() const GC_EXCLUDES(mutex_);
  std::string waiting_for() const GC_EXCLUDES(mutex_);
  std::vector<IterationRecord> timeline() const GC_EXCLUDES(mutex_);
  EngineCounters counters() const GC_EXCLUDES(mutex_);
  void shutdown() GC_EXCLUDES(mutex_, join_mutex_);

  void began(int64_t ticket) noexcept override;
  void queued(int64_t ticket) noexcept override;
  void timed(int64_t ticket, int64_t duration_ns) noexcept override;
  void complete(int64_t ticket, const char* error) noexcept override;

  // After shutdown(): the transport still holds operations back and may complete them into this object, which must not
  // be destroyed.
  bool is_abandoned() const { return is_abandoned_; }

 private:
  struct Event {
    enum class Kind { kBegin, kReady, kBegan, kQueued, kTimed, kComplete };
    Kind kind = Kind::kBegin;
    int64_t subject = 0;  // of kReady the tensor, of a transport's events the ticket
    int64_t time_ns = 0;  // of kBegan and kComplete; of kTimed the duration
    std::optional<std::string> error{};
    std::shared_ptr<const FollowedPlan> plan{};  // of kBegin
  };
  using Queue = BoundedQueue<Event>;

  // The thread.
  void run_on_loop();
  void run_turn_on_loop(const Queue::Condition& condition);
  template <typename Action>
  void attempt_on_loop(const Action& action);
  void handle_on_loop(const Event& event);
  void begin_on_loop(const Event& event);
  void progress_on_loop(Follower& follower, int32_t block, const Event& event) GC_EXCLUDES(mutex_);
  void complete_on_loop(Follower& follower, int32_t block, const Event& event);
  void finish_on_loop(Follower& follower, int32_t block, int64_t finish_ns) GC_EXCLUDES(mutex_);
  void launch_on_loop();
  void record_launch_on_loop(int32_t block, int64_t launch_ns) GC_EXCLUDES(mutex_);
  void publish_progress_on_loop(int32_t block) GC_REQUIRES(mutex_);
  void fail_on_loop(ErrorCode code, const std::string& message) GC_EXCLUDES(mutex_);
  void stop_on_loop();
  void abort_on_loop(const std::string& reason);
  void settle_on_loop() GC_EXCLUDES(mutex_);
  void leave_on_loop();
  // True after a failure and at the end, when nothing is started any more.
  bool is_draining() const { return failed_ || stopping_; }
  int32_t in_flight_count() const { return follower_.in_flight_count() + earlier_.in_flight_count(); }
  // True if callers count this follower's iteration as the open one. They may have begun the next before the thread is
  // notified.
  bool is_open(const Follower& follower) const GC_REQUIRES(mutex_) {
    return &follower == &follower_ && iteration_on_loop_ == iteration_;
  }
  IterationRecord& record_of(const Follower& follower) GC_REQUIRES(mutex_) {
    return is_open(follower) ? recorder_.current() : recorder_.previous();
  }
  bool on_loop() const { return std::this_thread::get_id() == loop_id_; }

  // State shared by callers.
  enum class Outcome { kThere, kTimeout, kFailed };

  void require_open() const GC_REQUIRES(mutex_);
  void require_healthy() const GC_REQUIRES(mutex_);
  void require_iteration() const GC_REQUIRES(mutex_);
  void require_tensor(int32_t tensor) const GC_REQUIRES(mutex_);
  [[noreturn]] void throw_latched() const GC_REQUIRES(mutex_);
  bool is_busy() const GC_REQUIRES(mutex_);
  bool are_there(Tensors tensors, Progress until) const GC_REQUIRES(mutex_);
  Outcome wait_until(Tensors tensors, int64_t deadline_ns, Progress until) GC_REQUIRES(mutex_);

  // Constant after construction.
  Transport& transport_;
  const std::string thread_name_;
  const int32_t queue_window_;

  // Loop only.
  std::thread::id loop_id_;
  Follower follower_;
  Follower earlier_;                // of the iteration before, while a device ends its blocks
  int64_t iteration_on_loop_ = -1;  // number of the follower's
  std::vector<Event> batch_;
  int64_t first_ticket_ = 0;  // of the open iteration
  int64_t earlier_first_ticket_ = 0;
  int64_t started_count_ = 0;  // operations started in all iterations
  bool failed_ = false;
  bool stopping_ = false;
  int64_t drain_deadline_ns_ = kNever;  // when the thread stops waiting for completions
  bool aborted_ = false;
  bool callers_due_ = false;      // this turn has changed something that callers wait for
  int64_t transport_cpu_ns_ = 0;  // CPU time spent inside the transport's start() so far
  int64_t room_since_ns_ = 0;     // when an earlier block was last in the way of the next one

  // Has its own lock.
  Queue queue_;

  // State that callers share with the thread.
  mutable Mutex mutex_;
  CondVar changed_;                                                      // an arrival, a failure, the end
  std::shared_ptr<const FollowedPlan> plan_ GC_GUARDED_BY(mutex_);       // of the last iteration
  std::shared_ptr<const FollowedPlan> next_plan_ GC_GUARDED_BY(mutex_);  // of the next one
  int64_t plan_version_ GC_GUARDED_BY(mutex_) = 0;
  int64_t iteration_ GC_GUARDED_BY(mutex_) = -1;
  std::shared_ptr<const FollowedPlan> earlier_plan_ GC_GUARDED_BY(mutex_);  // of the one before that
  int32_t unfinished_count_ GC_GUARDED_BY(mutex_) = 0;                      // blocks of the last iteration
  int32_t earlier_unfinished_count_ GC_GUARDED_BY(mutex_) = 0;              // blocks of the one before
  std::vector<Progress> progress_ GC_GUARDED_BY(mutex_);                    // by tensor
  std::vector<int32_t> queued_ GC_GUARDED_BY(mutex_);                       // in the order in which they were
  std::vector<int32_t> arrivals_ GC_GUARDED_BY(mutex_);
  Recorder recorder_ GC_GUARDED_BY(mutex_);
  EngineCounters counters_ GC_GUARDED_BY(mutex_);
  int32_t on_network_count_ GC_GUARDED_BY(mutex_) = 0;                // blocks; after a failure it counts no more
  std::vector<BlockRecord> lately_on_network_ GC_GUARDED_BY(mutex_);  // finished, and not in link_ns yet
  int64_t link_counted_until_ns_ GC_GUARDED_BY(mutex_) = 0;
  std::optional<Error> failure_ GC_GUARDED_BY(mutex_);
  bool settled_ GC_GUARDED_BY(mutex_) = false;  // after a failure or at the end: nothing is in flight any more
  bool closed_ GC_GUARDED_BY(mutex_) = false;   // shutdown has begun
  int32_t waiter_count_ GC_GUARDED_BY(mutex_) = 0;

  // Written by the thread before it ends, read after it has been joined.
  bool is_abandoned_ = false;

  Mutex join_mutex_;  // taken before mutex_
  std::thread thread_ GC_GUARDED_BY(join_mutex_);
};

}  // namespace gradcast
