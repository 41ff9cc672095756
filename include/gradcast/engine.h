// The engine follows a plan: it starts each block in plan order as soon as its gradients exist, and says what has arrived.
//
// Callers post events ("this gradient exists") and wait; one named thread owns the follower, the transport and the record of
// what happened. The engine never takes Python's GIL, sleeps when nothing happens, and starts blocks in the plan's order
// only, so all ranks that follow the same plan start the same operations in the same order whatever their own timing is.
//
// Errors: the first one is latched; the transport is aborted, every operation that was started is drained exactly once, and
// the error is raised by each later call that begins, waits or follows. Who waits hears of it when nothing is in flight any
// more, since until then the transport may touch the buffers. An engine that failed stays failed.
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
  std::string thread_name = "gradcast";  // at most 15 characters are shown by the system
  int32_t timeline_iterations = 16;      // of which the record is kept; at least 1
};

// Times of the steady clock, ns; 0 for what has not happened. A block that was handed to the transport before a device had
// written its gradients became ready, was due and was launched when the device had.
struct BlockRecord {
  int64_t ready_ns = 0;   // what it waits for existed: its gradients, or of an all-gather the sums of its scatter
  int64_t due_ns = 0;     // it was ready and no block before it was in its way
  int64_t launch_ns = 0;  // it was handed to the transport
  int64_t finish_ns = 0;  // its completion came
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
  int64_t link_ns = 0;       // in which at least one of them was due and not finished
  int64_t loop_ns = 0;       // CPU time of the engine's thread, the transport's start() left out
  int64_t record_bytes = 0;  // held by the record of what happened
};

class Engine {
 public:
  // REQUIRES: `transport` outlives the engine, is not open yet, and is used by nobody else. Starts the thread.
  // Throws Error{kInvalidOption} for options out of range.
  Engine(Transport& transport, const EngineOptions& options);
  ~Engine();  // shutdown()
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Follows `plan` from the next iteration on. Returns its version: 1 for the first plan, one more for each.
  // Throws Error{kInvalidPlan} unless check_plan(plan, profile) passes and each all-gather carries exactly the ranges of one
  // reduce-scatter (a rank owns a part of a block, so other cuts would gather what nobody has summed); the error of
  // check_profile; Error{kInvalidUse} while blocks of the last iteration are not finished.
  int64_t follow(const Profile& profile, const Plan& plan);

  // Opens an iteration: no gradient exists, nothing has arrived. Returns its number, from 0.
  // Throws Error{kInvalidUse} while blocks of the last one are not finished, or without a plan.
  int64_t begin();

  // The gradient of this tensor exists from now on, in its place in the buffer. Once per tensor and iteration; costs less
  // than a microsecond. Throws Error{kInvalidUse} for an unknown tensor, a second time, or when no iteration is open.
  void on_ready(int32_t tensor);

  // Returns true when all of these tensors (all tensors: wait_all) have come so far, false when the time is over first. A
  // negative timeout waits without end. Throws the latched error; Error{kInvalidUse} for an unknown tensor or before the
  // first begin().
  bool wait(std::span<const int32_t> tensors, int64_t timeout_ns, Progress until = Progress::kArrived);
  bool wait_all(int64_t timeout_ns, Progress until = Progress::kArrived);

  // The tensors that are kQueued by blocks no later than those of the given ones: whoever puts work behind these on a device
  // waits no longer for them. Never waits. Throws Error{kInvalidUse} as wait() does.
  std::vector<int32_t> coming_with(std::span<const int32_t> tensors) const;

  // The tensors that have arrived in this iteration, in the order of arrival, from the given position on. Never waits.
  std::vector<int32_t> arrivals(int64_t position) const;

  // True while an iteration is open whose blocks are not all finished and may still finish: not after a failure.
  bool busy() const;

  // What an unfinished iteration is waiting for, for people: "block 3 of 7 (layer4.conv2.weight … fc.bias, 12.4 MB) is on
  // the network since 31.2 s", or "block 3 of 7 (…) waits for the gradient of fc.bias". Empty if nothing is open.
  std::string waiting_for() const;

  // The last iterations, oldest first, the open one included.
  std::vector<IterationRecord> timeline() const;
  EngineCounters counters() const;

  // Ends the thread. Operations in flight are aborted, where a device does not end all of them by itself soon; waiters get Error{kCommunication}. Idempotent; returns within two
  // seconds. Every other function then throws Error{kInvalidUse}, except timeline() and counters().
  void shutdown();

  // The clock of the records: steady, ns. Python's time.perf_counter_ns() is the same clock on Linux.
  static int64_t now_ns();

 private:
  class Loop;
  std::unique_ptr<Loop> loop_;
};

}  // namespace gradcast
