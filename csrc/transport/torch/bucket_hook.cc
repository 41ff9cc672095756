#include "transport/torch/bucket_hook.h"

#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <utility>
#include <vector>

namespace gradcast {

namespace {

using Future = c10::ivalue::Future;
using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;

// Gloo's futures know of no device, and come before the copies to it have ended.
void wait_for_copies(const Works& works, at::Device device) {
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, false);
  const c10::StreamGuard guard(stream);
  for (const auto& work : works)
    work->synchronize();
  stream.synchronize();
}

}  // namespace

c10::intrusive_ptr<Future> average_bucket(c10d::ProcessGroup& group, const c10d::GradBucket& bucket,
                                          int64_t piece_bytes, c10::IValue result) {
  const at::NoGradGuard no_grad;
  const at::Tensor buffer = bucket.getBuffer();
  buffer.mul_(1.0 / group.getSize());
  Works works;
  c10::List<c10::intrusive_ptr<Future>> futures(c10::FutureType::create(c10::AnyType::get()));
  for (const at::Tensor& piece : buffer.split(std::max<int64_t>(1, piece_bytes / buffer.element_size()))) {
    std::vector<at::Tensor> message = {piece.variable_data()};
    works.push_back(group.allreduce(message));
    futures.push_back(works.back()->getFuture());
  }
  const bool is_nccl = group.getBackend(buffer.device().type())->getBackendName() == "nccl";
  // A future of several knows of no device: what waits for it waits for no stream. NCCL's works end in their order.
  const c10::intrusive_ptr<Future> last = is_nccl ? futures.get(futures.size() - 1) : c10::collectAll(futures);
  const bool is_copied = !buffer.is_cpu() && !is_nccl;
  if (!is_copied) works.clear();
  return last->then(
      [futures, works, is_copied, device = buffer.device(), result = std::move(result)](Future&) -> c10::IValue {
        // Throws what failed on the network; DDP passes it on to the caller of backward(). On a device it puts the
        // stream that torch gives to what follows a future behind the piece.
        for (const c10::intrusive_ptr<Future>& each : futures)
          each->waitAndThrow();
        if (is_copied) wait_for_copies(works, device);
        return result;
      },
      c10::PyObjectType::get());
}

}  // namespace gradcast
