// The communication streams of a device whose kernels run after the host has gone on (CUDA): one on which operations start,
// one on which their ends are waited for, so that no end is late because the next operation waits for its gradients.
//
// NOT YET RUN ON A GPU, but on a device of the tests' own. It is written against the interface of c10 that every such device
// implements, so that no vendor's header is needed. The first stream waits for the kernels that write the bytes it is about
// to send, and a thread named "gradcast-wait" tells when it has come past that, and the other one past the end of an
// operation.
//
// What comes after an operation need not wait on the host either: its end is an event on the second stream, which any other
// stream can wait for as soon as it is there.
//
// Thread safety: any thread.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "gradcast/types.h"
#include "transport/common/range_map.h"

namespace gradcast {

class DeviceStream {
 public:
  // A place on a stream that somebody waits for. Both run on the waiting thread.
  struct Place {
    std::function<bool()> given_up;                  // true when nobody waits any more
    std::function<void(std::exception_ptr)> passed;  // the stream has come past it, or an error; must not throw
  };

  explicit DeviceStream(c10::Device device);
  ~DeviceStream();  // close()
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;

  // To be made current by whoever starts an operation. Of high priority: a late block delays the next forward pass.
  c10::Stream stream() const { return stream_; }

  // To be called by a thread that will work for this device. What it does would otherwise end with device 0 as its current
  // one, which takes memory there: with many ranks on a host, hundreds of MB for each on the first device.
  void enter_device() const noexcept;

  // The calling thread's current stream has been given the kernels that write this range.
  void on_written(int32_t buffer, Range range);
  // What is put on the stream after this runs after those kernels, where the ranges overlap. Returns whether one of them
  // has still to run.
  bool wait_for_writes(int32_t buffer, Range range);

  // Waits for the place where the stream is now.
  void watch(Place here);
  // An operation on these ranges. On the waiting thread: runs `enqueue`, which may throw, with the other stream current, so
  // that it puts the rest of the operation there; calls `queued`, which must not throw; and waits for the operation's end.
  struct Ending {
    int32_t buffer;
    std::vector<Range> ranges;
    std::function<void()> enqueue;
    std::function<void()> queued;
    Place past_it;
  };
  void end(Ending ending);
  // What is put on the calling thread's current stream after this runs behind the ends of operations on this range, as far
  // as they were `queued` before. REQUIRES: of two operations that share bytes, the second was started after the end of the
  // first.
  void order_behind(int32_t buffer, Range range);
  // Ends the thread; what it has not begun is dropped. REQUIRES: what it has begun is given up or finishes. Idempotent.
  void close();

 private:
  struct Watched {
    bool is_past();

    std::shared_ptr<const c10::Event> event;
    Place place;
    std::exception_ptr error{};
  };
  using News = std::variant<Watched, Ending>;

  Watched recorded(const c10::Stream& stream, Place place) const;
  void loop();
  void take(std::deque<News>& news);
  void put_on_stream(const Ending& ending);
  void note_end(const Ending& ending, const std::shared_ptr<const c10::Event>& event);
  void look();

  const c10::Device device_;
  const c10::Stream stream_;
  const c10::Stream end_stream_;

  std::mutex writes_mutex_;
  // Recorded again in each iteration, so there is one for each range that was ever written, and none is ever removed.
  std::map<int32_t, std::map<std::pair<int64_t, int64_t>, c10::Event>> writes_;

  std::mutex ends_mutex_;
  LastMarks<std::shared_ptr<const c10::Event>> ends_;  // of the last operation on each byte

  std::list<Watched> watched_;  // the waiting thread's own

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_: for the thread, in the order in which they came.
  std::deque<News> news_;
  bool closed_ = false;

  std::thread thread_;
};

}  // namespace gradcast
