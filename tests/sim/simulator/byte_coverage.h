// Checks that the operations of one iteration carry every byte exactly once. It counts bytes and knows nothing of
// plans.
//
// One instance serves all ranks, because the simulator compares their operations first.
//
// Thread safety: pure; any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "gradcast/plan.h"
#include "gradcast/profile.h"

namespace gradcast::sim {

class ByteCoverage {
 public:
  explicit ByteCoverage(const Profile& profile) {
    for (const Tensor& tensor : profile.tensors) {
      buffers_.resize(std::max(buffers_.size(), static_cast<size_t>(tensor.buffer) + 1));
      buffers_[tensor.buffer].size_bytes += tensor.bytes;
    }
  }

  // An operation that all ranks have started.
  void add(const Block& block) {
    BufferBytes& bytes = buffers_[block.buffer];
    if (block.op != Op::kAllGather) {
      bytes.reduced.insert(bytes.reduced.end(), block.ranges.begin(), block.ranges.end());
    }
    if (block.op != Op::kReduceScatter) {
      bytes.finished.insert(bytes.finished.end(), block.ranges.begin(), block.ranges.end());
    }
  }

  // Ends an iteration. Returns what is wrong with it, if anything, and starts over.
  std::optional<std::string> finish() {
    std::optional<std::string> fault;
    for (size_t buffer = 0; buffer < buffers_.size(); ++buffer) {
      BufferBytes& bytes = buffers_[buffer];
      const std::string end = " of buffer " + std::to_string(buffer);
      fault = fault ? fault : fault_of(bytes.reduced, bytes.size_bytes, end, "reduced");
      fault = fault ? fault : fault_of(bytes.finished, bytes.size_bytes, end, "finished");
      bytes.reduced.clear();
      bytes.finished.clear();
    }
    return fault;
  }

 private:
  struct BufferBytes {
    int64_t size_bytes = 0;
    std::vector<Range> reduced;   // by all-reduces and reduce-scatters
    std::vector<Range> finished;  // by all-reduces and all-gathers
  };

  // The first byte that the ranges carry more than once, or not at all.
  static std::optional<std::string> fault_of(std::vector<Range>& ranges, int64_t size_bytes, const std::string& buffer,
                                             const std::string& verb) {
    std::ranges::sort(ranges, {}, &Range::lo_bytes);
    const auto byte = [&](int64_t at) { return "byte " + std::to_string(at) + buffer; };
    int64_t done_bytes = 0;
    for (const Range& range : ranges) {
      if (range.lo_bytes < done_bytes) {
        return byte(range.lo_bytes) + " is " + verb + " more than once";
      }
      if (range.lo_bytes > done_bytes) {
        break;
      }
      done_bytes = range.hi_bytes;
    }
    if (done_bytes < size_bytes) {
      return byte(done_bytes) + " is never " + verb;
    }
    return done_bytes > size_bytes ? std::optional(byte(size_bytes) + " does not exist") : std::nullopt;
  }

  std::vector<BufferBytes> buffers_;  // by buffer
};

}  // namespace gradcast::sim
