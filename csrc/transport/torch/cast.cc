#include "transport/torch/cast.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace gradcast {

namespace {

// The most that ATen does on the calling thread alone (at::internal::GRAIN_SIZE); 128 KiB of fp32, which a core's cache
// holds.
constexpr int64_t kPieceSize = 32768;

template <typename Work>
void for_each_piece(int64_t size, const Work& work) {
  for (int64_t first = 0; first < size; first += kPieceSize)
    work(first, std::min(kPieceSize, size - first));
}

}  // namespace

void cast(const at::Tensor& target, const at::Tensor& source) {
  for_each_piece(target.numel(), [&](int64_t first, int64_t count) {
    target.narrow(0, first, count).copy_(source.narrow(0, first, count));
  });
}

Adder::Adder() : total_(at::empty({kPieceSize}, at::kFloat)), term_(at::empty({kPieceSize}, at::kFloat)) {}

void Adder::sum(const at::Tensor& target, const std::vector<at::Tensor>& terms) {
  for_each_piece(target.numel(), [&](int64_t first, int64_t count) {
    const at::Tensor total = total_.narrow(0, 0, count), term = term_.narrow(0, 0, count);
    total.copy_(terms.front().narrow(0, first, count));
    for (size_t i = 1; i < terms.size(); ++i) {
      term.copy_(terms[i].narrow(0, first, count));
      total.add_(term);
    }
    target.narrow(0, first, count).copy_(total);
  });
}

}  // namespace gradcast
