// What will happen in virtual time, earliest first; of two events at one time, the one that was pushed first.
//
// Thread safety: pure; any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <queue>
#include <vector>

#include "gradcast/error.h"

namespace gradcast::sim {

struct Event {
  enum class Kind : int32_t { kBegin, kReady, kComplete, kLeave };
  double time_ns = 0;
  int64_t number = 0;   // given by the queue
  int64_t subject = 0;  // of kReady the tensor, of kComplete the operation
  int32_t rank = 0;
  Kind kind = Kind::kBegin;
};

class EventQueue {
 public:
  // REQUIRES: not before the last event that was popped.
  void push(Event event) {
    GC_CHECK(event.time_ns >= now_ns_);
    event.number = pushed_count_++;
    events_.push(event);
    size_peak_ = std::max(size_peak_, static_cast<int64_t>(events_.size()));
  }

  // REQUIRES: !empty().
  Event pop() {
    GC_CHECK(!events_.empty());
    const Event event = events_.top();
    events_.pop();
    now_ns_ = event.time_ns;
    return event;
  }

  bool empty() const { return events_.empty(); }
  int64_t size_peak() const { return size_peak_; }

 private:
  struct IsLater {
    bool operator()(const Event& a, const Event& b) const {
      return a.time_ns != b.time_ns ? a.time_ns > b.time_ns : a.number > b.number;
    }
  };

  std::priority_queue<Event, std::vector<Event>, IsLater> events_;
  int64_t pushed_count_ = 0;
  int64_t size_peak_ = 0;
  double now_ns_ = 0;
};

}  // namespace gradcast::sim
