// The bytes of one operation: its ranges of a buffer as views, read and written as if they lay in one row.
//
// Thread safety: pure; any thread. Two threads that touch the same bytes are the caller's affair.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "gradcast/transport.h"

namespace gradcast {

class Row {
 public:
  // Throws std::invalid_argument for ranges that are not ascending, outside of the buffer, or not of whole elements.
  Row(const at::Tensor& buffer, const Range* ranges, int32_t range_count);

  int64_t element_count() const { return element_count_; }
  // True for one range, which travels in place.
  bool in_place() const { return views_.size() == 1; }
  const at::Tensor& view() const { return views_.front(); }

  // A new tensor of that many elements, at least one: elements [first, first + count) of the row, then zeros.
  at::Tensor read(int64_t first, int64_t count, int64_t padded_count) const;
  // Elements [first, first + count) of the row become the first ones of `target`, which may be of another type.
  void read_into(const at::Tensor& target, int64_t first, int64_t count) const;
  // Elements [first, first + count) of the row become the first ones of `source`, which may be of another type.
  void write(int64_t first, int64_t count, const at::Tensor& source) const;

 private:
  template <typename Copy>
  void for_each_part(int64_t first, int64_t count, const Copy& copy) const;

  std::vector<at::Tensor> views_;
  int64_t element_count_ = 0;
};

}  // namespace gradcast
