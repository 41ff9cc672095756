// What was last said of each byte of some buffers: the event behind which it has arrived, for instance.
//
// Thread safety: any thread, one at a time.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <utility>

#include "gradcast/types.h"

namespace gradcast {

template <typename Mark>
class LastMarks {
 public:
  using Marks = std::map<int64_t, std::pair<int64_t, Mark>>;  // by beginning: end, mark

  // What was said of other bytes together with some of these is forgotten, too, and moved to `replaced`: to destroy a mark
  // may take a lock. REQUIRES: who says something of bytes comes after whatever was said of them.
  void set(int32_t buffer, Range range, const Mark& mark, Marks& replaced) {
    Marks& marks = marks_[buffer];
    // What begins before this range may reach into it.
    auto each = marks.lower_bound(range.lo_bytes);
    if (each != marks.begin() && std::prev(each)->second.first > range.lo_bytes) --each;
    while (each != marks.end() && each->first < range.hi_bytes)
      replaced.insert(marks.extract(each++));
    marks[range.lo_bytes] = {range.hi_bytes, mark};
  }

  // Of each stretch that has some of these bytes, in their order.
  template <typename Action>
  void over(int32_t buffer, Range range, const Action& action) const {
    const auto marks = marks_.find(buffer);
    if (marks == marks_.end()) return;
    for (const auto& [lo_bytes, end] : marks->second) {
      if (lo_bytes >= range.hi_bytes) return;
      if (end.first > range.lo_bytes) action(end.second);
    }
  }

  void clear() { marks_.clear(); }

 private:
  std::map<int32_t, Marks> marks_;
};

}  // namespace gradcast
