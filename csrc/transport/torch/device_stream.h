// The communication streams of a device whose kernels run after the host has gone on (CUDA).
//
// Operations start on the first stream, which waits for the kernels that write the bytes to be sent. Their ends are
// waited for on the second one, so that an end is never late because the next operation waits for its gradients. A
// thread named "gradcast-wait" reports when a stream has passed a point. It asks for the first open point of each
// stream only.
//
// What writes a block is marked by one event per stream that has written to it, recorded where the last of the block's
// bytes are given to a stream. An event per gradient would cost the thread of autograd a call of the device's for each.
// An event recorded where the block starts would come too late: a block waits for room in flight while backward runs
// ahead, and would then wait for all kernels that backward has queued meanwhile. If several streams have written, the
// events of the others come somewhat later than their last gradient of the block; never too early.
//
// If operations are timed, an event of the device's clock is recorded where one may begin, and its end is one. An
// operation lasts from there, or from the end of the one before it if that is later, since the device carries one at a
// time. By the polls of the waiting thread, an operation of 20 us would seem to take up to 70.
//
// Work that follows an operation need not wait on the host either: the end is an event on the second stream, and any
// other stream can wait for it as soon as it is recorded.
//
// Tested on a device of the tests' own on every change; it has run on an H100. It is written against the interface of
// c10 that every such device implements, so that no vendor's header is needed.
//
// Thread safety: any thread.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <thread>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "gradcast/types.h"
#include "platform/sync.h"
#include "transport/common/range_map.h"
#include "transport/common/stream_points.h"

namespace gradcast {

class DeviceStream {
 public:
  // The action at a point of a stream. Both functions run on the waiting thread.
  struct StreamPoint {
    std::function<bool()> given_up;                  // true once nobody waits for this point any more
    std::function<void(std::exception_ptr)> passed;  // the stream has passed it, or an error; must not throw
  };

  // `has_high_priority`: operations that run on the stream itself run before compute. `times`: operations are timed.
  struct Settings {
    bool has_high_priority = true;
    bool times = false;
  };

  explicit DeviceStream(c10::Device device) : DeviceStream(device, Settings{}) {}
  DeviceStream(c10::Device device, Settings settings);
  ~DeviceStream();  // close()
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;

  // The stream to start operations on.
  c10::Stream stream() const { return stream_; }

  // To be called by each thread that will work for this device. Otherwise c10 leaves the thread with device 0 current,
  // which takes memory there: with many ranks on a host, hundreds of MB for each on the first device. And a program's
  // thread that captures a CUDA graph would meet the events that this thread asks for.
  void enter_device() const noexcept;

  // A block: a buffer and ranges of it.
  using Block = std::pair<int32_t, std::vector<Range>>;
  // These blocks are written and started from now on: drops what is known of earlier ones. REQUIRES: they are disjoint,
  // and nothing is in flight.
  void expect(const std::vector<Block>& blocks) GC_EXCLUDES(writes_mutex_, ends_mutex_);
  // The calling thread's current stream has been given the kernels that write this range. REQUIRES: the range is part of
  // expected blocks; until these start, it is written once.
  void on_written(int32_t buffer, Range range) GC_EXCLUDES(writes_mutex_);
  // Orders the stream behind the kernels that have written the block. Returns whether one of them has still to run.
  // Throws std::invalid_argument for bytes that no expected block has.
  bool wait_for_writes(int32_t buffer, std::span<const Range> ranges) GC_EXCLUDES(writes_mutex_);

  using Mark = std::shared_ptr<const c10::Event>;
  // The moment from which an operation that starts now may run; nullptr if operations are not timed.
  Mark beginning() const;

  // Reports when the stream has passed the point where it is now.
  void watch(StreamPoint here) GC_EXCLUDES(mutex_);
  // The end of an operation. On the waiting thread, with the second stream current: runs `enqueue`, which puts the rest
  // of the operation there and may throw; calls `queued`, which must not throw; and reports when that stream is
  // `past_it`, before that how long the operation was under way since its `beginning`, if there is one.
  struct Ending {
    int32_t buffer;
    std::vector<Range> ranges;
    std::function<void()> enqueue;
    std::function<void()> queued;
    StreamPoint past_it;
    Mark beginning{};
    std::function<void(int64_t)> lasted{};  // ns; must not throw
  };
  void end(Ending ending) GC_EXCLUDES(mutex_);
  // Orders the calling thread's current stream behind the operations on these ranges whose `queued` has been called.
  // Ranges of one operation cost one wait. REQUIRES: of two operations that share bytes, the second was started after the
  // end of the first.
  void order_behind(const std::vector<std::pair<int32_t, Range>>& places) GC_EXCLUDES(ends_mutex_);
  // Ends the thread and drops what it has not begun. Idempotent. REQUIRES: what it has begun is given up or finishes.
  void close() GC_EXCLUDES(mutex_);

 private:
  using Task = std::variant<StreamPoints::Point, Ending>;
  using Marks = std::unordered_map<c10::Stream, Mark>;
  // Writes to a block since it was started last.
  struct Writes {
    int64_t size_bytes;  // of the block
    int64_t written_bytes = 0;
    std::vector<c10::Stream> unmarked{};  // streams that have written since the last mark
    std::vector<Mark> marks{};
  };

  Mark recorded_on(const c10::Stream& stream, c10::EventFlag flag = c10::EventFlag::PYTORCH_DEFAULT) const;
  c10::EventFlag end_flag() const;
  void mark(Writes& block, Marks& recorded) const;  // under writes_mutex_
  void post(Task task) GC_EXCLUDES(mutex_);
  void loop() GC_EXCLUDES(mutex_);
  void wait_for_tasks() GC_REQUIRES(mutex_);
  bool is_watching() const { return !begin_points_.empty() || !end_points_.empty(); }
  void take(std::deque<Task>& tasks);
  void put_on_stream(const Ending& ending) GC_EXCLUDES(ends_mutex_);
  void note_end(const Ending& ending, const Mark& event) GC_EXCLUDES(ends_mutex_);

  const c10::Device device_;
  const Settings settings_;
  const c10::Stream stream_;
  const c10::Stream end_stream_;

  Mutex writes_mutex_;
  RangeMap<std::shared_ptr<Writes>> writes_ GC_GUARDED_BY(writes_mutex_);  // of the expected block of each byte

  Mutex ends_mutex_;
  RangeMap<Mark> ends_ GC_GUARDED_BY(ends_mutex_);  // of the last operation on each byte

  // The waiting thread's own.
  StreamPoints begin_points_;  // of the first stream
  StreamPoints end_points_;    // of the second one
  Mark last_end_;              // of the operation that was put there last

  Mutex mutex_;
  CondVar changed_;
  std::deque<Task> tasks_ GC_GUARDED_BY(mutex_);  // for the waiting thread, in the order in which they came
  bool closed_ GC_GUARDED_BY(mutex_) = false;

  std::thread thread_;
};

}  // namespace gradcast
