// Points of one stream of a device that are watched until the stream has passed them.
//
// Thread safety: any thread, one at a time.
#pragma once

#include <deque>
#include <exception>
#include <functional>
#include <utility>

namespace gradcast {

class StreamPoints {
 public:
  struct Point {
    std::function<bool()> is_past;                   // the stream has passed it, or nobody waits for it any more
    std::function<void(std::exception_ptr)> passed;  // called once then, with what is_past() has thrown; must not throw
  };

  // REQUIRES: points are added in the order in which the stream passes them.
  void add(Point point) { watched_.push_back(std::move(point)); }
  bool empty() const { return watched_.empty(); }

  // Asks no further than the first that the stream has not passed.
  void report_passed() {
    while (!watched_.empty()) {
      std::exception_ptr error;
      try {
        if (!watched_.front().is_past()) return;
      } catch (...) {
        error = std::current_exception();
      }
      const Point first = std::move(watched_.front());
      watched_.pop_front();
      first.passed(error);
    }
  }

 private:
  std::deque<Point> watched_;
};

}  // namespace gradcast
