#include "engine/recorder.h"

#include "gradcast/error.h"

namespace gradcast {

Recorder::Recorder(int32_t iterations_max) : iterations_max_(static_cast<size_t>(iterations_max)) {
  GC_CHECK(iterations_max >= 1);
}

void Recorder::begin(int64_t iteration, int64_t plan_version, size_t tensor_count, size_t block_count) {
  if (records_.size() < iterations_max_) {
    current_ = records_.size();
    records_.emplace_back();
  } else {
    current_ = (current_ + 1) % iterations_max_;
  }
  IterationRecord& record = records_[current_];
  record.iteration = iteration;
  record.plan_version = plan_version;
  record.ready_ns.assign(tensor_count, 0);
  record.blocks.assign(block_count, BlockRecord{});
}

std::vector<IterationRecord> Recorder::timeline() const {
  std::vector<IterationRecord> timeline;
  timeline.reserve(records_.size());
  for (size_t i = 1; i <= records_.size(); ++i) {
    timeline.push_back(records_[(current_ + i) % records_.size()]);
  }
  return timeline;
}

int64_t Recorder::size_bytes() const {
  size_t size_bytes = records_.capacity() * sizeof(IterationRecord);
  for (const IterationRecord& record : records_) {
    size_bytes += record.ready_ns.capacity() * sizeof(int64_t) + record.blocks.capacity() * sizeof(BlockRecord);
  }
  return static_cast<int64_t>(size_bytes);
}

}  // namespace gradcast
