// The communication streams of a device whose kernels run after the host has gone on (CUDA).
//
// Operations start on the first stream, which waits for the kernels that write the bytes to be sent. Their ends are
// waited for on the second one, so that an end is never late because the next operation waits for its gradients. A
// thread named "gradcast-wait" reports when a stream has passed a point.
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
#include <map>
#include <memory>
#include <thread>
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

  explicit DeviceStream(c10::Device device);
  ~DeviceStream();  // close()
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;

  // The stream to start operations on. It has high priority, because a late block delays the next forward pass.
  c10::Stream stream() const { return stream_; }

  // To be called by each thread that will work for this device. Otherwise c10 leaves the thread with device 0 current,
  // which takes memory there: with many ranks on a host, hundreds of MB for each on the first device. And a program's
  // thread that captures a CUDA graph would meet the events that this thread asks for.
  void enter_device() const noexcept;

  // The calling thread's current stream has been given the kernels that write this range. REQUIRES: written ranges are
  // disjoint or begin with the buffer, until the next forget().
  void on_written(int32_t buffer, Range range) GC_EXCLUDES(writes_mutex_);
  // Orders the stream behind these kernels, as far as the ranges overlap. Returns whether one of them has still to run.
  bool wait_for_writes(int32_t buffer, Range range) GC_EXCLUDES(writes_mutex_);

  // Other ranges are written and arrive from now on: drops what is known of earlier ones. REQUIRES: nothing is in flight.
  void forget() GC_EXCLUDES(writes_mutex_, ends_mutex_);

  // Reports when the stream has passed the point where it is now.
  void watch(StreamPoint here) GC_EXCLUDES(mutex_);
  // The end of an operation. On the waiting thread, with the second stream current: runs `enqueue`, which puts the rest
  // of the operation there and may throw; calls `queued`, which must not throw; and reports when that stream is
  // `past_it`.
  struct Ending {
    int32_t buffer;
    std::vector<Range> ranges;
    std::function<void()> enqueue;
    std::function<void()> queued;
    StreamPoint past_it;
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

  std::shared_ptr<const c10::Event> recorded_on(const c10::Stream& stream) const;
  void post(Task task) GC_EXCLUDES(mutex_);
  void loop() GC_EXCLUDES(mutex_);
  void wait_for_tasks() GC_REQUIRES(mutex_);
  void take(std::deque<Task>& tasks);
  void put_on_stream(const Ending& ending) GC_EXCLUDES(ends_mutex_);
  void note_end(const Ending& ending, const std::shared_ptr<const c10::Event>& event) GC_EXCLUDES(ends_mutex_);

  const c10::Device device_;
  const c10::Stream stream_;
  const c10::Stream end_stream_;

  Mutex writes_mutex_;
  // By buffer and range. An event is recorded again in each iteration.
  using Writes = std::map<std::pair<int64_t, int64_t>, c10::Event>;
  std::map<int32_t, Writes> writes_ GC_GUARDED_BY(writes_mutex_);

  Mutex ends_mutex_;
  RangeMap<std::shared_ptr<const c10::Event>> ends_ GC_GUARDED_BY(ends_mutex_);  // of the last operation on each byte

  StreamPoints watched_;  // the waiting thread's own

  Mutex mutex_;
  CondVar changed_;
  std::deque<Task> tasks_ GC_GUARDED_BY(mutex_);  // for the waiting thread, in the order in which they came
  bool closed_ GC_GUARDED_BY(mutex_) = false;

  std::thread thread_;
};

}  // namespace gradcast
