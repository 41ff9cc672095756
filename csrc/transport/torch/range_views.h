// The ranges of one operation as views of its buffer, read and written as if they were one contiguous tensor.
//
// Thread safety: pure; any thread. Two threads that touch the same bytes are the caller's affair.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

#include "gradcast/types.h"

namespace gradcast {

class RangeViews {
 public:
  // REQUIRES: fault_of() (transport/common/host_memory.h) finds nothing.
  RangeViews(const at::Tensor& buffer, std::span<const Range> ranges);

  int64_t element_count() const { return element_count_; }
  // True for a single range. It is sent from where it lies; several ranges have to be packed.
  bool in_place() const { return views_.size() == 1; }
  const at::Tensor& front() const { return views_.front(); }

  // Elements are counted from 0 over all ranges.
  // Returns a new tensor of `padded_count` elements: elements [first, first + count), then zeros.
  at::Tensor read(int64_t first, int64_t count, int64_t padded_count) const;
  // Copies elements [first, first + count) to the start of `target`, which may have another floating type.
  void read_into(const at::Tensor& target, int64_t first, int64_t count) const;
  // Overwrites elements [first, first + count) with the start of `source`, which may have another floating type.
  void write(int64_t first, int64_t count, const at::Tensor& source) const;

 private:
  template <typename Copy>
  void for_each_part(int64_t first, int64_t count, const Copy& copy) const;

  std::vector<at::Tensor> views_;
  int64_t element_count_ = 0;
};

}  // namespace gradcast
