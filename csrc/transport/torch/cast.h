// Numbers of one floating type as another one, and sums of them, on the host.
//
// By ATen's own kernels, so that the bits are those of Tensor.to(), in pieces so small that ATen starts no pool of threads:
// it would start one for each thread of ours, beside the trainer's.
//
// Thread safety: pure; any thread. An Adder belongs to one thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace gradcast {

// REQUIRES: flat host tensors of the same size.
void convert(const at::Tensor& target, const at::Tensor& source);

class Adder {
 public:
  Adder();

  // target = the sum of the terms, in fp32 and in their order, rounded once at the end. REQUIRES: as above; at least one term.
  void sum(const at::Tensor& target, const std::vector<at::Tensor>& terms);

 private:
  at::Tensor total_, term_;  // of one piece
};

}  // namespace gradcast
