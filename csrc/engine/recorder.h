// Keeps the record of the last iterations in a ring, so that its memory does not grow.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
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

  // Opens the next record; it replaces the oldest one once the ring is full.
  void begin(int64_t iteration, int64_t plan_version, size_t tensor_count, size_t block_count) {
    if (records_.size() < iterations_max_) {
      current_ = records_.size();
      records_.emplace_back();
    } else {
      current_ = (current_ + 1) % iterations_max_;
    }
    IterationRecord& record = current();
    record.iteration = iteration;
    record.plan_version = plan_version;
    record.ready_ns.assign(tensor_count, 0);
    record.blocks.assign(block_count, BlockRecord{});
  }

  // The open record. REQUIRES: begin() was called.
  IterationRecord& current() { return records_[current_]; }
  const IterationRecord& current() const { return records_[current_]; }

  // Oldest first, the open one included.
  std::vector<IterationRecord> timeline() const {
    std::vector<IterationRecord> timeline;
    for (size_t i = 1; i <= records_.size(); ++i) {
      timeline.push_back(records_[(current_ + i) % records_.size()]);
    }
    return timeline;
  }

  // The memory that the records hold.
  int64_t size_bytes() const {
    size_t size_bytes = records_.capacity() * sizeof(IterationRecord);
    for (const IterationRecord& record : records_) {
      size_bytes += record.ready_ns.capacity() * sizeof(int64_t) + record.blocks.capacity() * sizeof(BlockRecord);
    }
    return static_cast<int64_t>(size_bytes);
  }

 private:
  size_t iterations_max_;
  size_t current_ = 0;
  std::vector<IterationRecord> records_;  // a ring once it is full
};

}  // namespace gradcast
