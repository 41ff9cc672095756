#include "bench/network.h"

#include <algorithm>
#include <string>
#include <utility>

#include "gradcast/error.h"

namespace gradcast {
namespace {

// Sizes and elements; the memory is still missing.
std::vector<HostBuffer> buffers_of(const std::vector<Tensor>& gradients) {
  std::vector<HostBuffer> buffers;
  for (const Tensor& tensor : gradients) {
    if (tensor.element_bytes != 4 && tensor.element_bytes != 8) {
      throw Error(ErrorCode::kInvalidOption, tensor.name + " has elements of " + std::to_string(tensor.element_bytes) +
                                                 " bytes; the transports of gradcast-bench sum float32 and float64");
    }
    buffers.resize(std::max(buffers.size(), static_cast<size_t>(tensor.buffer) + 1));
    HostBuffer& buffer = buffers[tensor.buffer];
    buffer.size_bytes += tensor.bytes;
    buffer.element = tensor.element_bytes == 8 ? Element::kFloat64 : Element::kFloat32;
  }
  return buffers;
}

}  // namespace

Network::Network(Group& group, const std::vector<Tensor>& gradients, const Sweep& sweep) : sweep_(sweep) {
  const auto allocated = [&](int64_t size_bytes) { return memory_.emplace_back(group.allocate(size_bytes)).get(); };
  std::vector<HostBuffer> buffers = buffers_of(gradients);
  for (HostBuffer& buffer : buffers) {
    buffer.data = allocated(buffer.size_bytes);
  }
  sweep_.buffer = static_cast<int32_t>(buffers.size());
  sweep_.data = allocated(sweep_.size_bytes);
  buffers.push_back({sweep_.data, sweep_.size_bytes, sweep_.element});
  if (sweep_.has_source) {
    sweep_.source = allocated(sweep_.size_bytes);
    buffers.push_back({sweep_.data, sweep_.size_bytes, sweep_.element, sweep_.source});
  }
  transport_ = group.make_transport(std::move(buffers));
  transport_->open(this);
}

Network::~Network() {
  transport_->close();
}

void Network::open(CompletionSink* sink) noexcept {
  MutexLock lock(mutex_);
  sink_ = sink;
}

void Network::began(int64_t ticket) noexcept {
  MutexLock lock(mutex_);
  if (sink_ != nullptr) sink_->began(ticket);
}

void Network::queued(int64_t ticket) noexcept {
  MutexLock lock(mutex_);
  if (sink_ != nullptr) sink_->queued(ticket);
}

void Network::complete(int64_t ticket, const char* error) noexcept {
  MutexLock lock(mutex_);
  if (sink_ != nullptr) sink_->complete(ticket, error);
}

}  // namespace gradcast
