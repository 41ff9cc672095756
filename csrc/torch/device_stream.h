// The communication stream of a device whose kernels run after the host has gone on (CUDA).
//
// NOT YET RUN ON A GPU. It is written against the interface of c10 that every such device implements, so that no vendor's
// header is needed. The stream waits for the kernels that write the bytes it is about to send, and a thread named
// "gradcast-wait" tells when the stream has come past the end of an operation: whoever waits for gradcast waits on the host.
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
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "gradcast/types.h"

namespace gradcast {

class DeviceStream {
 public:
  // What is left of an operation when its backend has put it on the device. All three run on the waiting thread.
  struct Ending {
    std::function<void()> enqueue;                     // puts the rest on the stream, which is current; may throw
    std::function<bool()> given_up;                    // true when nobody waits any more
    std::function<void(std::exception_ptr)> finished;  // the stream has come past the rest, or an error; must not throw
  };

  explicit DeviceStream(c10::Device device);
  ~DeviceStream();  // close()
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;

  // To be made current by whoever starts an operation. Of high priority: a late block delays the next forward pass.
  c10::Stream stream() const { return stream_; }

  // The calling thread's current stream has been given the kernels that write this range.
  void on_written(int32_t buffer, Range range);
  // What is put on the stream after this runs after those kernels, where the ranges overlap.
  void wait_for_writes(int32_t buffer, Range range);

  void end(Ending ending);
  // Ends the thread; what it has not begun is dropped. REQUIRES: what it has begun is given up or finishes. Idempotent.
  void close();

 private:
  void loop();
  void finish(const Ending& ending);

  const c10::Device device_;
  const c10::Stream stream_;

  std::mutex writes_mutex_;
  // Recorded again in each iteration, so there is one for each range that was ever written, and none is ever removed.
  std::map<int32_t, std::map<std::pair<int64_t, int64_t>, c10::Event>> writes_;

  std::mutex endings_mutex_;
  std::condition_variable changed_;
  std::deque<Ending> endings_;
  bool closed_ = false;
  std::thread thread_;
};

}  // namespace gradcast
