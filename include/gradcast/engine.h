// The engine follows a plan: it starts each block in plan order as soon as its gradients exist, and reports what has
// arrived.
//
// Callers post events ("this gradient exists") and wait. One named thread owns the follower, the transport and the
// record of what happened. The engine never takes Python's GIL and sleeps when nothing happens. It starts blocks in the
// plan's order only, so ranks that follow the same plan start the same operations in the same order, at any
// timing of their own.
//
// Errors: the engine latches the first one, aborts the transport and drains every operation that was started exactly
// once. Each later call that begins, waits or follows throws that error. A waiting caller gets it only when nothing is
// in flight any more, because until then the transport may touch the buffers. A failed engine stays failed.
//
// Thread safety: any thread, except where a function says otherwise.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "gradcast/plan.h"
#include "gradcast/profile.h"
#include "gradcast/transport.h"

namespace gradcast {

struct EngineOptions {
  std::string thread_name = "gradcast";  // not empty; the system shows at most 15 characters
  int32_t timeline_iterations = 16;      // how many iterations timeline() keeps, 1 to 2^20
  // Blocks that a device holds in its queue count no more as the plan's `in_flight`, since its queue keeps their order.
  // So many blocks in all may be started and unfinished then, 1 to 1,024. By default all of a plan's, as with DDP: the
  // host would wait for the device otherwise.
  int32_t queue_window = 1024;
};

// Times of the steady clock in ns; 0 for what has not happened. If a device had still to write the gradients when the
// block was handed to the transport, the first three times are the moment at which it had. If the block stood in a
// device's queue behind others, it was pending and launched when one of these made room.
struct BlockRecord {
  int64_t ready_ns = 0;   // its gradients existed; for an all-gather, its reduce-scatter had finished
  int64_t due_ns = 0;     // it was ready and no earlier block was in its way
  int64_t launch_ns = 0;  // handed to the transport
  int64_t finish_ns = 0;  // completed
  int64_t device_ns = 0;  // a duration: on the device that carried it, by its clock, where the transport tells
};

struct IterationRecord {
  int64_t iteration = 0;
  int64_t plan_version = 0;
  std::vector<int64_t> ready_ns;    // per tensor of the profile
  std::vector<BlockRecord> blocks;  // per block of the plan
};

struct EngineCounters {
  int64_t iterations = 0;    // finished
  int64_t blocks = 0;        // finished
  int64_t bytes = 0;         // in finished blocks
  int64_t link_ns = 0;       // time during which at least one block was pending
  int64_t loop_ns = 0;       // CPU time of the engine's thread without the transport's start()
  int64_t record_bytes = 0;  // memory of the record
};

class Engine {
 public:
  // Starts the thread. Throws Error{kInvalidOption} for options out of range.
  // REQUIRES: `transport` outlives the engine, is not open yet, and has no other user.
  Engine(Transport& transport, const EngineOptions& options);
  ~Engine();  // shutdown()
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Follows `plan` from the next iteration on. Returns its version: 1 for the first plan, one more for each. Throws
  // Error{kInvalidPlan} unless check_plan(plan, profile) passes and each all-gather carries exactly the ranges of one
  // reduce-scatter (a rank owns a part of a block, so other cuts would gather bytes without a sum); the error of
  // check_profile; Error{kInvalidUse} while blocks of the last iteration are not finished.
  int64_t follow(const Profile& profile, const Plan& plan);

  // Opens an iteration: no gradient exists, nothing has arrived. Returns its number, from 0. Blocks of the last one may
  // still stand in a device's queue, but those of the one before must have finished, which wait({}) waits for.
  // Throws Error{kInvalidUse} while there are others, or without a plan.
  int64_t begin();

  // The gradient of this tensor exists from now on, in its place in the buffer. To be called once per tensor and
  // iteration; costs less than a microsecond. Throws Error{kInvalidUse} for an unknown tensor, for a second call, or if
  // no iteration is open.
  void on_ready(int32_t tensor);

  // Waits until these tensors, or all tensors, have come as far as `until`; for kArrived also until every block of the
  // iteration before has finished. Returns false if the timeout passes first; a negative timeout never passes. Throws
  // the latched error, and Error{kInvalidUse} for an unknown tensor or before the first begin().
  bool wait(std::span<const int32_t> tensors, int64_t timeout_ns, Progress until = Progress::kArrived);
  bool wait_all(int64_t timeout_ns, Progress until = Progress::kArrived);

  // The tensors that have been kQueued in this iteration, in that order, from the given position on, up to the first
  // whose last block comes later than the last block of the given tensors. A device stream that is ordered behind the
  // given tensors is ordered behind these, too. Never waits. Throws Error{kInvalidUse} as wait() does.
  std::vector<int32_t> queued_no_later_than(std::span<const int32_t> tensors, int64_t position) const;

  // The tensors that have arrived in this iteration, in order of arrival, from the given position on. Never waits.
  std::vector<int32_t> arrivals(int64_t position) const;

  // True while blocks of any iteration are unfinished and may still finish. False after a failure.
  bool busy() const;

  // Describes what an unfinished iteration is waiting for: "block 3 of 7 (layer4.conv2.weight … fc.bias, 12.4 MB) is on
  // the network since 31.2 s", or "block 3 of 7 (…) waits for the gradient of fc.bias". Empty if nothing is open.
  std::string waiting_for() const;

  // The last iterations, oldest first, the open one included.
  std::vector<IterationRecord> timeline() const;
  EngineCounters counters() const;

  // Ends the thread within two seconds. Idempotent. Aborts operations in flight, unless a device ends all of them by
  // itself soon; waiting callers get Error{kCommunication}. Afterwards every function but timeline() and counters()
  // throws Error{kInvalidUse}.
  void shutdown();

  // The steady clock of the records, in ns. Python's time.perf_counter_ns() reads the same clock on Linux.
  static int64_t now_ns();

 private:
  class Loop;
  std::unique_ptr<Loop> loop_;
};

}  // namespace gradcast
