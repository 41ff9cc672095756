// Messages between ranks that are no blocks: agreements, and rank 0's parameters and buffers.
//
// Every tensor that the process group is given is made here, and Python never sees it. A backend's thread drops its
// reference to an operation's tensors some time after the caller has gone on. For a tensor that Python knows this needs
// the GIL (torch 2.11 and later), and a thread that asks for the GIL while the interpreter ends is terminated inside a
// noexcept destructor: SIGABRT.
//
// All functions but send and receive are collective. They wait for the other ranks, and throw what the backend throws.
// REQUIRES: nothing else of the group is in flight, but for Numbers; the caller does not hold the GIL.
//
// Thread safety: any thread; a group is called by one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace gradcast {

// Every rank's bytes, in rank order. `device`: one that the group has a backend for.
std::vector<std::string> gather(c10d::ProcessGroup& group, const std::string& own, at::Device device);

// Rank 0's bytes. `own` is ignored on other ranks.
std::string from_first(c10d::ProcessGroup& group, const std::string& own, at::Device device);

// Copies rank 0's values into these tensors of every rank, in pieces of a few MB, so that nothing as large as a model
// is allocated. REQUIRES: shapes, dtypes and strides are the same on all ranks.
void copy_from_first(c10d::ProcessGroup& group, const std::vector<at::Tensor>& tensors);

// Sums `tensor` over the ranks, in place. REQUIRES: it is contiguous.
void all_reduce(c10d::ProcessGroup& group, const at::Tensor& tensor);

// Sends a contiguous tensor to one rank, or receives one. Throws what the backend throws if it takes longer than
// `timeout_s`.
void send(c10d::ProcessGroup& group, const at::Tensor& tensor, int peer, double timeout_s);
void receive(c10d::ProcessGroup& group, const at::Tensor& tensor, int peer, double timeout_s);

// One number of each rank, again and again. It is sent beside blocks that are started after it: `begin` does not wait.
//
// On a device it has a stream of its own, so that waiting for it does not wait for compute. NOT YET RUN ON A GPU.
class Numbers {
 public:
  // `device`: one that the group has a backend for.
  Numbers(int world_size, at::Device device);
  // Sends this rank's. REQUIRES: nothing else of the group is in flight, and the last ones were waited for.
  void begin(c10d::ProcessGroup& group, double own);
  // In rank order. Throws what the backend throws.
  std::vector<double> wait();

 private:
  std::optional<c10::Stream> stream_;
  at::Tensor own_, everyone_;
  at::Tensor on_host_;  // pinned where `everyone_` is on a device, else the same
  c10::intrusive_ptr<c10d::Work> work_;
};

// Another tensor for the same elements, to be given to a backend. It has its own version counter, so that autograd does
// not take an arriving value for a change by the user. On the host it does not own the memory: a backend's thread could
// be its last owner, and freeing memory that Python knows needs the GIL. The caller keeps `tensor` until the backend is
// done.
at::Tensor lend(const at::Tensor& tensor);

}  // namespace gradcast
