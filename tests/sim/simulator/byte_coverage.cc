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

Ledger::Ledger(const Profile& profile) {
  for (const Tensor& tensor : profile.tensors) {
    books_.resize(std::max(books_.size(), static_cast<size_t>(tensor.buffer) + 1));
    books_[tensor.buffer].size_bytes += tensor.bytes;
  }
}

void Ledger::enter(const Block& block) {
  Book& book = books_[block.buffer];
  if (block.op != Op::kAllGather) {
    book.reduced.insert(book.reduced.end(), block.ranges.begin(), block.ranges.end());
  }
  if (block.op != Op::kReduceScatter) {
    book.finished.insert(book.finished.end(), block.ranges.begin(), block.ranges.end());
  }
}

std::optional<std::string> Ledger::close() {
  std::optional<std::string> fault;
  for (size_t buffer = 0; buffer < books_.size(); ++buffer) {
    Book& book = books_[buffer];
    if (!fault) {
      fault = fault_of(book.reduced, buffer, book.size_bytes, "reduced");
    }
    if (!fault) {
      fault = fault_of(book.finished, buffer, book.size_bytes, "finished");
    }
    book.reduced.clear();
    book.finished.clear();
  }
  return fault;
}

}  // namespace gradcast::sim
