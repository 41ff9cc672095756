// Keeps the record of the last iterations, in memory that does not grow.
//
// Thread safety: pure; any thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "gradcast/engine.h"
#include "gradcast/error.h"

namespace gradcast {

class Recorder {
 public:
  // Keeps the last `iterations_max` iterations. REQUIRES: iterations_max >= 1.
  explicit Recorder(int32_t iterations_max) : iterations_max_(static_cast<size_t>(iterations_max)) {
    GC_CHECK(iterations_max >= 1);
  }

  // Opens the next record; the oldest one gives it its memory once all are in use.
  void begin(int64_t iteration, int64_t plan_version, size_t tensor_count, size_t block_count) {
    const bool is_full = records_.size() == std::max<size_t>(iterations_max_, 2);
    records_.push_back(is_full ? std::move(records_.front()) : IterationRecord());
    if (is_full) records_.pop_front();
    IterationRecord& record = current();
    record.iteration = iteration;
    record.plan_version = plan_version;
    record.ready_ns.assign(tensor_count, 0);
    record.blocks.assign(block_count, BlockRecord{});
  }

  // The open record. REQUIRES: begin() was called.
  IterationRecord& current() { return records_.back(); }
  const IterationRecord& current() const { return records_.back(); }
  // The one before, whose blocks a device may still end. REQUIRES: begin() was called twice.
  IterationRecord& previous() { return records_[records_.size() - 2]; }
  const IterationRecord& previous() const { return records_[records_.size() - 2]; }

  // Oldest first, the open one included.
  std::vector<IterationRecord> timeline() const {
    return {records_.end() - static_cast<std::ptrdiff_t>(std::min(iterations_max_, records_.size())), records_.end()};
  }

  // The memory that the records hold.
  int64_t size_bytes() const {
    size_t size_bytes = records_.size() * sizeof(IterationRecord);
    for (const IterationRecord& record : records_) {
      size_bytes += record.ready_ns.capacity() * sizeof(int64_t) + record.blocks.capacity() * sizeof(BlockRecord);
    }
    return static_cast<int64_t>(size_bytes);
  }

 private:
  size_t iterations_max_;
  std::deque<IterationRecord> records_;
};

}  // namespace gradcast
