#include "transport/torch/range_views.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>

namespace gradcast {

namespace {

// On the host a plain copy: it costs no dispatch, and threads of a backend start no pool of helpers each.
void copy_elements(const at::Tensor& target, const at::Tensor& source) {
  if (target.is_cpu() && target.scalar_type() == source.scalar_type()) {
    std::memcpy(target.data_ptr(), source.const_data_ptr(), target.nbytes());
  } else {
    target.copy_(source, /*non_blocking=*/true);
  }
}

}  // namespace

RangeViews::RangeViews(const at::Tensor& buffer, std::span<const Range> ranges) {
  const auto element_bytes = static_cast<int64_t>(buffer.element_size());
  for (const Range& range : ranges) {
    views_.push_back(buffer.narrow(0, range.lo_bytes / element_bytes, range.size_bytes() / element_bytes));
    element_count_ += views_.back().numel();
  }
}

// Calls copy(part of a view, its position in the tensor that is copied from or to).
template <typename Copy>
void RangeViews::for_each_part(int64_t first, int64_t count, const Copy& copy) const {
  int64_t view_first = 0;
  for (const at::Tensor& view : views_) {
    const int64_t lo = std::max(first, view_first);
    const int64_t hi = std::min(first + count, view_first + view.numel());
    if (lo < hi) copy(view.narrow(0, lo - view_first, hi - lo), lo - first);
    view_first += view.numel();
  }
}

at::Tensor RangeViews::read(int64_t first, int64_t count, int64_t padded_count) const {
  at::Tensor target = at::empty({padded_count}, front().options());
  read_into(target, first, count);
  if (count < padded_count) target.narrow(0, count, padded_count - count).zero_();
  return target;
}

void RangeViews::read_into(const at::Tensor& target, int64_t first, int64_t count) const {
  for_each_part(first, count, [&target](const at::Tensor& part, int64_t place) {
    copy_elements(target.narrow(0, place, part.numel()), part);
  });
}

void RangeViews::write(int64_t first, int64_t count, const at::Tensor& source) const {
  for_each_part(first, count, [&source](const at::Tensor& part, int64_t place) {
    copy_elements(part, source.narrow(0, place, part.numel()));
  });
}

}  // namespace gradcast
