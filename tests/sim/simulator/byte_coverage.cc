// Sorts the ranges of an iteration once and walks them, looking for an overlap or a gap.
#include "tests/sim/simulator/byte_coverage.h"

#include <algorithm>

namespace gradcast::sim {
namespace {

std::string byte_text(size_t buffer, int64_t byte) {
  return "byte " + std::to_string(byte) + " of buffer " + std::to_string(buffer);
}

// The first byte that the ranges carry more than once, or not at all.
std::optional<std::string> fault_of(std::vector<Range>& ranges, size_t buffer, int64_t size_bytes, const char* verb) {
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.lo_bytes < b.lo_bytes; });
  int64_t done_bytes = 0;
  for (const Range& range : ranges) {
    if (range.lo_bytes < done_bytes) {
      return byte_text(buffer, range.lo_bytes) + " is " + verb + " more than once";
    }
    if (range.lo_bytes > done_bytes) {
      break;
    }
    done_bytes = range.hi_bytes;
  }
  if (done_bytes < size_bytes) {
    return byte_text(buffer, done_bytes) + " is never " + verb;
  }
  return done_bytes > size_bytes ? std::optional(byte_text(buffer, size_bytes) + " does not exist") : std::nullopt;
}

}  // namespace

ByteCoverage::ByteCoverage(const Profile& profile) {
  for (const Tensor& tensor : profile.tensors) {
    buffers_.resize(std::max(buffers_.size(), static_cast<size_t>(tensor.buffer) + 1));
    buffers_[tensor.buffer].size_bytes += tensor.bytes;
  }
}

void ByteCoverage::add(const Block& block) {
  BufferBytes& bytes = buffers_[block.buffer];
  if (block.op != Op::kAllGather) {
    bytes.reduced.insert(bytes.reduced.end(), block.ranges.begin(), block.ranges.end());
  }
  if (block.op != Op::kReduceScatter) {
    bytes.finished.insert(bytes.finished.end(), block.ranges.begin(), block.ranges.end());
  }
}

std::optional<std::string> ByteCoverage::finish() {
  std::optional<std::string> fault;
  for (size_t buffer = 0; buffer < buffers_.size(); ++buffer) {
    BufferBytes& bytes = buffers_[buffer];
    if (!fault) {
      fault = fault_of(bytes.reduced, buffer, bytes.size_bytes, "reduced");
    }
    if (!fault) {
      fault = fault_of(bytes.finished, buffer, bytes.size_bytes, "finished");
    }
    bytes.reduced.clear();
    bytes.finished.clear();
  }
  return fault;
}

}  // namespace gradcast::sim
