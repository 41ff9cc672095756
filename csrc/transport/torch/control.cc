#include "transport/torch/control.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "transport/torch/collective.h"

namespace gradcast {

namespace {

// Small tensors are sent together in pieces of this size, large ones in slices of it.
constexpr int64_t kPieceBytes = 8 << 20;
constexpr int kTag = 0;

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(1e3 * seconds));
}

at::Tensor number(int64_t value, at::Device device) {
  return at::empty({1}, at::kLong).fill_(value).to(device);
}

// `text`, filled up to `size` bytes.
at::Tensor bytes(const std::string& text, int64_t size, at::Device device) {
  at::Tensor host = at::empty({size}, at::kByte);
  std::memcpy(host.data_ptr(), text.data(), std::min(text.size(), static_cast<size_t>(size)));
  return host.to(device);
}

std::string text_of(const at::Tensor& bytes, int64_t size) {
  const at::Tensor host = bytes.cpu();
  return {static_cast<const char*>(host.const_data_ptr()), static_cast<size_t>(size)};
}

void broadcast(c10d::ProcessGroup& group, const at::Tensor& tensor) {
  std::vector<at::Tensor> message = {tensor};
  group.broadcast(message)->wait();  // from rank 0 by default
}

std::vector<at::Tensor> all_gather(c10d::ProcessGroup& group, const at::Tensor& own) {
  std::vector<std::vector<at::Tensor>> everyone(1);
  for (int rank = 0; rank < group.getSize(); ++rank)
    everyone[0].push_back(at::empty_like(own));
  std::vector<at::Tensor> message = {own};
  group.allgather(everyone, message)->wait();
  return everyone[0];
}

// All elements in the order of memory, without a copy where the memory has no gaps. Then `is_copy` is false.
struct Elements {
  explicit Elements(const at::Tensor& tensor)
      : is_copy(!tensor.is_non_overlapping_and_dense()),
        flat(is_copy ? tensor.detach().reshape({-1}) : tensor.detach().as_strided({tensor.numel()}, {1})) {}

  bool is_copy;
  at::Tensor flat;
};

// Slices of tensors of one kind that are sent as one message.
class Slices {
 public:
  explicit Slices(c10d::ProcessGroup& group) : group_(group) {}

  int64_t room_for(const at::Tensor& flat) const {
    return std::max<int64_t>(1, kPieceBytes / flat.element_size()) - size_;
  }

  void add(at::Tensor slice) {
    size_ += slice.numel();
    slices_.push_back(std::move(slice));
  }

  void send() {
    if (slices_.size() == 1) {
      broadcast(group_, lend(slices_[0]));
      // As any other change in place: autograd refuses a backward pass that needs the old values.
      if (group_.getRank() > 0) slices_[0].unsafeGetTensorImpl()->bump_version();
    } else if (size_ > 0) {
      const at::Tensor message = at::empty({size_}, slices_[0].options());
      for_each([](const at::Tensor& slice, const at::Tensor& part) { part.copy_(slice); }, message);
      broadcast(group_, message);
      if (group_.getRank() > 0) {
        for_each([](const at::Tensor& slice, const at::Tensor& part) { slice.copy_(part); }, message);
      }
    }
    slices_.clear();
    size_ = 0;
  }

 private:
  template <typename Action>
  void for_each(const Action& action, const at::Tensor& message) const {
    int64_t first = 0;
    for (const at::Tensor& slice : slices_) {
      action(slice, message.narrow(0, first, slice.numel()));
      first += slice.numel();
    }
  }

  c10d::ProcessGroup& group_;
  std::vector<at::Tensor> slices_;
  int64_t size_ = 0;
};

void send_in_pieces(const at::Tensor& flat, Slices& slices) {
  int64_t sent = 0;
  while (sent < flat.numel()) {
    if (slices.room_for(flat) == 0) slices.send();
    const int64_t count = std::min(slices.room_for(flat), flat.numel() - sent);
    slices.add(flat.narrow(0, sent, count));
    sent += count;
  }
}

}  // namespace

// Texts differ in length, and all-gathers want equal lengths: sizes are sent first, then padded texts, if any.
std::vector<std::string> gather(c10d::ProcessGroup& group, const std::string& own, at::Device device) {
  const at::NoGradGuard no_grad;
  std::vector<int64_t> sizes;
  for (const at::Tensor& size : all_gather(group, number(static_cast<int64_t>(own.size()), device)))
    sizes.push_back(size.item<int64_t>());
  const int64_t largest = *std::max_element(sizes.begin(), sizes.end());
  if (largest == 0) return std::vector<std::string>(sizes.size());
  const std::vector<at::Tensor> messages = all_gather(group, bytes(own, largest, device));
  std::vector<std::string> texts;
  for (size_t rank = 0; rank < sizes.size(); ++rank)
    texts.push_back(text_of(messages[rank], sizes[rank]));
  return texts;
}

std::string from_first(c10d::ProcessGroup& group, const std::string& own, at::Device device) {
  const at::NoGradGuard no_grad;
  const at::Tensor length = number(static_cast<int64_t>(own.size()), device);
  broadcast(group, length);
  const auto size = length.item<int64_t>();
  const at::Tensor message = bytes(own, size, device);
  broadcast(group, message);
  return text_of(message, size);
}

void copy_from_first(c10d::ProcessGroup& group, const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  // By kind, in the order in which the kinds first appear, which is the same on all ranks.
  std::vector<at::Tensor> rest = tensors;
  while (!rest.empty()) {
    const at::Tensor first = rest[0];
    const auto is_alike = [&](const at::Tensor& each) {
      return each.scalar_type() == first.scalar_type() && each.device() == first.device();
    };
    const auto others = std::stable_partition(rest.begin(), rest.end(), is_alike);
    Slices slices(group);
    for (auto each = rest.begin(); each != others; ++each) {
      const Elements elements(*each);
      send_in_pieces(elements.flat, slices);
      if (!elements.is_copy) continue;
      slices.send();
      if (group.getRank() > 0) each->detach().copy_(elements.flat.view(each->sizes()));
    }
    slices.send();
    rest.erase(rest.begin(), others);
  }
}

void all_reduce(c10d::ProcessGroup& group, const at::Tensor& tensor) {
  std::vector<at::Tensor> message = {lend(tensor)};
  group.allreduce(message)->wait();
}

void send(c10d::ProcessGroup& group, const at::Tensor& tensor, int peer, double timeout_s) {
  std::vector<at::Tensor> message = {lend(tensor)};
  group.send(message, peer, kTag)->wait(milliseconds(timeout_s));
}

void receive(c10d::ProcessGroup& group, const at::Tensor& tensor, int peer, double timeout_s) {
  std::vector<at::Tensor> message = {lend(tensor)};
  group.recv(message, peer, kTag)->wait(milliseconds(timeout_s));
}

Numbers::Numbers(int world_size, at::Device device) {
  if (!device.is_cpu()) stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device);
  const at::NoGradGuard no_grad;
  const c10::OptionalStreamGuard guard(stream_);
  const auto options = at::TensorOptions(at::kDouble);
  own_ = at::empty({1}, options.device(device));
  everyone_ = at::empty({world_size}, options.device(device));
  on_host_ = device.is_cpu() ? everyone_ : at::empty({world_size}, options.pinned_memory(true));
}

void Numbers::begin(c10d::ProcessGroup& group, double own) {
  const at::NoGradGuard no_grad;
  const c10::OptionalStreamGuard guard(stream_);
  own_.fill_(own);
  work_ = all_gather_flat(group, everyone_, own_);
}

std::vector<double> Numbers::wait() {
  const c10::OptionalStreamGuard guard(stream_);
  work_->wait();
  if (stream_) on_host_.copy_(everyone_);  // waits
  work_.reset();                           // it holds the group's connections
  const auto* numbers = on_host_.const_data_ptr<double>();
  return {numbers, numbers + on_host_.numel()};
}

at::Tensor lend(const at::Tensor& tensor) {
  if (!tensor.is_cpu()) return tensor.variable_data();
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.options().requires_grad(false));
}

}  // namespace gradcast
