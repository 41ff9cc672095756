// Points of a device's streams that are watched until the streams have passed them.
//
// Thread safety: any thread, one at a time.
#pragma once

#include <exception>
#include <functional>
#include <iterator>
#include <list>
#include <utility>

namespace gradcast {

class StreamPoints {
 public:
  struct Point {
    std::function<bool()> is_past;                   // the stream has passed it, or nobody waits for it any more
    std::function<void(std::exception_ptr)> passed;  // called once then, with what is_past() has thrown; must not throw
  };

  // REQUIRES: a stream's points are added in the order in which it passes them.
  void add(Point point) { watched_.push_back({std::move(point), nullptr}); }
  bool empty() const { return watched_.empty(); }

  // For points of one stream: asks no further than the first that it has not passed.
  void report_passed_in_order() {
    while (!watched_.empty() && is_past(watched_.front())) {
      const Watched first = std::move(watched_.front());
      watched_.pop_front();
      first.point.passed(first.error);
    }
  }

  // For points of several streams.
  void report_passed() {
    std::list<Watched> passed;
    // Asks the last ones first. If a point is passed, so are all that it waits for; those are reported before it.
    for (auto each = watched_.end(); each != watched_.begin();) {
      const auto here = std::prev(each);
      if (is_past(*here)) {
        passed.splice(passed.begin(), watched_, here);
      } else {
        each = here;
      }
    }
    for (const Watched& each : passed)
      each.point.passed(each.error);
  }

 private:
  struct Watched {
    Point point;
    std::exception_ptr error;
  };

  static bool is_past(Watched& watched) {
    try {
      return watched.point.is_past();
    } catch (...) {
      watched.error = std::current_exception();
      return true;
    }
  }

  std::list<Watched> watched_;
};

}  // namespace gradcast
