// A map from the bytes of some buffers to values: the event behind which each byte has arrived, for instance.
//
// Thread safety: any thread, one at a time.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <utility>

#include "gradcast/types.h"

namespace gradcast {

template <typename Value>
class RangeMap {
 public:
  using Values = std::map<int64_t, std::pair<int64_t, Value>>;  // by first byte: last byte + 1, value

  // Gives `value` to the bytes of `range`. Every earlier entry that overlaps the range is removed whole, bytes outside
  // of the range included, and moved to `replaced`: destroying a value may take a lock, so the caller chooses when.
  // REQUIRES: an event for a range comes after those for every overlapping range that was set before.
  void set(int32_t buffer, Range range, const Value& value, Values& replaced) {
    Values& values = values_[buffer];
    // The entry before this range may reach into it.
    auto each = values.lower_bound(range.lo_bytes);
    if (each != values.begin() && std::prev(each)->second.first > range.lo_bytes) --each;
    while (each != values.end() && each->first < range.hi_bytes)
      replaced.insert(values.extract(each++));
    values[range.lo_bytes] = {range.hi_bytes, value};
  }

  // Calls `action` with the bytes and the value of each entry that overlaps the range, in ascending order.
  template <typename Action>
  void for_each(int32_t buffer, Range range, const Action& action) const {
    const auto values = values_.find(buffer);
    if (values == values_.end()) return;
    const Values& entries = values->second;
    auto each = entries.lower_bound(range.lo_bytes);
    // The entry before this range may reach into it.
    if (each != entries.begin() && std::prev(each)->second.first > range.lo_bytes) --each;
    for (; each != entries.end() && each->first < range.hi_bytes; ++each)
      action(Range{each->first, each->second.first}, each->second.second);
  }

  void clear() { values_.clear(); }

 private:
  std::map<int32_t, Values> values_;  // by buffer
};

}  // namespace gradcast
