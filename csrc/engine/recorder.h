// Keeps the record of the last iterations in a ring, so that its memory does not grow.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gradcast/engine.h"

namespace gradcast {

class Recorder {
 public:
  // Keeps the last `iterations_max` iterations. REQUIRES: iterations_max >= 1.
  explicit Recorder(int32_t iterations_max);

  // Opens the next record; it replaces the oldest one once the ring is full.
  void begin(int64_t iteration, int64_t plan_version, size_t tensor_count, size_t block_count);

  // The open record. REQUIRES: begin() was called.
  IterationRecord& current() { return records_[current_]; }
  const IterationRecord& current() const { return records_[current_]; }
  bool empty() const { return records_.empty(); }

  // Oldest first, the open one included.
  std::vector<IterationRecord> timeline() const;
  // The memory that the records hold.
  int64_t size_bytes() const;

 private:
  size_t iterations_max_;
  size_t current_ = 0;
  std::vector<IterationRecord> records_;  // a ring once it is full
};

}  // namespace gradcast
