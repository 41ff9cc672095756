// What ranks tell each other beside blocks: agreements, and rank 0's parameters and buffers.
//
// Every tensor that the process group is given is made here, and Python never knows it. A backend's thread drops its share of
// an operation's tensors some time after the caller has gone on. If Python knew the tensor, that would need the GIL (torch 2.11
// and later), and a thread that asks for the GIL while the interpreter ends is ended inside a noexcept destructor: SIGABRT.
//
// All functions but send and receive are collective. They wait for the other ranks, and throw what the backend throws.
// REQUIRES: nothing else of the group is in flight; the caller does not hold the GIL.
//
// Thread safety: any thread; a group is called by one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace gradcast {

// Every rank's bytes, in rank order. `device`: one that the group has a backend for.
std::vector<std::string> gather(c10d::ProcessGroup& group, const std::string& own, at::Device device);

// Rank 0's bytes. `own` counts on rank 0 alone.
std::string from_first(c10d::ProcessGroup& group, const std::string& own, at::Device device);

// Rank 0's values into these tensors of every rank, in pieces of a few MB: nothing as large as a model is allocated.
// REQUIRES: shapes, dtypes and strides are the same on all ranks.
void copy_from_first(c10d::ProcessGroup& group, const std::vector<at::Tensor>& tensors);

// The sum over the ranks, in place. REQUIRES: `tensor` is contiguous.
void all_reduce(c10d::ProcessGroup& group, const at::Tensor& tensor);

// A contiguous tensor from one rank to another, and the end of waiting for that: an error after `timeout_s`.
void send(c10d::ProcessGroup& group, const at::Tensor& tensor, int peer, double timeout_s);
void receive(c10d::ProcessGroup& group, const at::Tensor& tensor, int peer, double timeout_s);

// The same elements for a backend, as a tensor of its own with its own version counter: autograd must not take an arriving
// value for a change that the user made. On the host it has no share of the memory either: a backend's thread that is its last
// owner would free it, and memory that Python knows needs the GIL for that. The caller keeps `tensor` until the backend is done.
at::Tensor lend(const at::Tensor& tensor);

}  // namespace gradcast
