// Casts between floating types, and sums in fp32, on the host.
//
// ATen's own kernels do the work, so that the bits are those of Tensor.to(). They get pieces so small that ATen starts
// no thread pool: it would start one for each of our threads, beside the trainer's.
//
// Thread safety: pure; any thread. An Adder belongs to one thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace gradcast {

// REQUIRES: flat host tensors of the same size.
void cast(const at::Tensor& target, const at::Tensor& source);

class Adder {
 public:
  Adder();

  // Sets `target` to the sum of the terms, taken in fp32 and in their order, and rounded once. REQUIRES: as above; one
  // term or more.
  void sum(const at::Tensor& target, const std::vector<at::Tensor>& terms);

 private:
  at::Tensor total_, term_;  // of one piece
};

}  // namespace gradcast
