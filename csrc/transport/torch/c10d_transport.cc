#include "transport/torch/c10d_transport.h"

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>

#include <functional>
#include <stdexcept>
#include <utility>

#include "transport/torch/collective.h"
#include "transport/torch/control.h"
#include "transport/torch/exception_text.h"
#include "transport/torch/range_views.h"

namespace gradcast {

namespace {

const char* name_of(Op op) {
  switch (op) {
    case Op::kAllReduce:
      return "all_reduce";
    case Op::kReduceScatter:
      return "reduce_scatter";
    case Op::kAllGather:
      return "all_gather";
  }
  return "operation";
}

std::optional<c10::ScalarType> wire_of(const std::string& name) {
  if (name == "fp32") return std::nullopt;
  if (name == "bf16") return c10::kBFloat16;
  if (name == "fp16") return c10::kHalf;
  throw std::invalid_argument("the wire format is '" + name + "'; one of fp32, bf16, fp16 is expected");
}

}  // namespace

// One operation under way. The callbacks that end it own it, and it must not own the process group: the last owner of a group
// joins its threads, and the callbacks run on these.
struct C10dTransport::Flight {
  int64_t ticket;
  int32_t buffer;
  std::vector<Range> ranges;  // its own: the engine's go with an abort
  std::string what_failed;
  bool is_nccl;
  std::shared_ptr<Outstanding> outstanding;
  Collective collective;

  void complete(const std::exception_ptr& exception) const noexcept {
    if (exception == nullptr) {
      outstanding->complete(ticket, nullptr);
    } else {
      outstanding->complete(ticket, (what_failed + message_of(exception)).c_str());
    }
  }

  void unpack_and_complete() const noexcept {
    try {
      if (collective.unpack) collective.unpack();
      complete(nullptr);
    } catch (...) {
      complete(std::current_exception());
    }
  }

  // The stream waits for kernels that write what is to be sent.
  static void watch_beginning(DeviceStream& stream, const std::shared_ptr<Outstanding>& outstanding, int64_t ticket) {
    stream.watch({[outstanding] { return outstanding->aborted(); },
                  [outstanding, ticket](const std::exception_ptr&) { outstanding->began(ticket); }});
  }

  // The host's part is done; the rest is the device's.
  static void end_on(DeviceStream& stream, const std::shared_ptr<Flight>& flight) {
    const auto enqueue = [flight] {
      flight->collective.work->wait();  // the stream waits, not the host
      if (flight->collective.unpack) flight->collective.unpack();
    };
    const auto passed = [flight](const std::exception_ptr& exception) {
      flight->complete(exception ? exception : failure_of(*flight->collective.work, flight->is_nccl));
    };
    const auto queued = [flight] { flight->outstanding->queued(flight->ticket); };
    const auto given_up = [flight] { return flight->outstanding->aborted(); };
    stream.end({flight->buffer, flight->ranges, enqueue, queued, {given_up, passed}});
  }
};

C10dTransport::C10dTransport(c10::intrusive_ptr<c10d::ProcessGroup> group, const std::vector<at::Tensor>& buffers,
                             const std::string& wire)
    : group_(std::move(group)), rank_(group_->getRank()), world_size_(group_->getSize()), wire_(wire_of(wire)) {
  for (const at::Tensor& tensor : buffers)
    buffers_.push_back(make_buffer(tensor));
  if (wire_) exchanges_ = std::make_shared<Exchanges>(*group_, *wire_);
}

C10dTransport::~C10dTransport() {
  abort("the transport was destroyed before this operation had finished");
  close();
}

C10dTransport::Buffer C10dTransport::make_buffer(const at::Tensor& tensor) const {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.dim() != 1 || !tensor.is_contiguous()) {
    throw std::invalid_argument("a gradient buffer has to be a flat, contiguous tensor");
  }
  const c10::Device device = tensor.device();
  Buffer buffer{tensor, lend(tensor), "", nullptr};
  try {
    buffer.backend = group_->getBackend(device.type())->getBackendName();
  } catch (const c10::Error&) {
    throw std::invalid_argument("the process group has no backend for tensors on " + device.str() +
                                "; make it with one, for instance backend=\"cpu:gloo,cuda:nccl\"");
  }
  if (device.is_cpu()) return buffer;
  if (wire_ && buffer.backend == "gloo") {
    throw std::invalid_argument("over Gloo tensors on " + device.str() +
                                " have no wire format but their own; use another backend, or wire=\"fp32\"");
  }
  for (const Buffer& other : buffers_) {
    if (other.tensor.device() == device) buffer.stream = other.stream;
  }
  if (buffer.stream == nullptr) buffer.stream = std::make_shared<DeviceStream>(device);
  return buffer;
}

const C10dTransport::Buffer& C10dTransport::buffer_at(int32_t index) const {
  if (index < 0 || static_cast<size_t>(index) >= buffers_.size()) {
    throw std::invalid_argument("there is no buffer " + std::to_string(index) + "; the transport has " +
                                std::to_string(buffers_.size()));
  }
  return buffers_[static_cast<size_t>(index)];
}

void C10dTransport::open(CompletionSink* sink) noexcept {
  outstanding_->open(sink);
  for (const Buffer& buffer : buffers_) {
    if (buffer.stream != nullptr) buffer.stream->enter_device();
  }
}

void C10dTransport::start(const Operation& operation) noexcept {
  if (!outstanding_->add(operation.ticket)) return;
  try {
    launch(operation);
  } catch (...) {
    const std::string error =
        std::string(name_of(operation.op)) + " could not start: " + message_of(std::current_exception());
    outstanding_->complete(operation.ticket, error.c_str());
  }
}

bool C10dTransport::is_cast(const Operation& operation, const Buffer& buffer) const {
  return wire_ && operation.op == Op::kAllReduce && buffer.tensor.scalar_type() == at::kFloat;
}

void C10dTransport::launch(const Operation& operation) {
  const Buffer& buffer = buffer_at(operation.buffer);
  c10::OptionalStreamGuard guard;
  if (buffer.stream != nullptr) {
    bool is_waiting = false;
    for (int32_t i = 0; i < operation.range_count; ++i) {
      is_waiting = buffer.stream->wait_for_writes(operation.buffer, operation.ranges[i]) || is_waiting;
    }
    if (is_waiting) Flight::watch_beginning(*buffer.stream, outstanding_, operation.ticket);
    guard.reset_stream(buffer.stream->stream());
  }
  const Row row(buffer.tensor, operation.ranges, operation.range_count);
  const std::vector<Range> ranges(operation.ranges, operation.ranges + operation.range_count);
  const auto flight =
      std::make_shared<Flight>(operation.ticket, operation.buffer, ranges, what_failed(operation, buffer),
                               buffer.backend == "nccl", outstanding_, Collective{});
  if (buffer.stream != nullptr && is_cast(operation, buffer)) {
    flight->collective = start_exchange_on_stream(*group_, row, *wire_);
  } else if (is_cast(operation, buffer)) {
    exchanges_->start(row, [flight](const std::exception_ptr& exception) { flight->complete(exception); });
    return;
  } else {
    const auto lock = exchanges_ ? exchanges_->lock_group() : std::unique_lock<std::mutex>();
    flight->collective = start_collective(*group_, operation.op, row);
  }
  const auto future = flight->collective.work->getFuture();
  // A backend keeps a work alive while it runs. Where no stream is waited for, the flight must not own it as well: the
  // work owns the future, and the future this callback.
  if (buffer.stream == nullptr) flight->collective.work.reset();
  future->addCallback(
      [flight, stream = buffer.stream](c10::ivalue::Future& finished) noexcept {
        if (finished.hasError()) {
          flight->complete(finished.exception_ptr());
        } else if (stream == nullptr) {
          flight->unpack_and_complete();
        } else {
          Flight::end_on(*stream, flight);
        }
      },
      /*uses_future=*/false);
}

std::string C10dTransport::what_failed(const Operation& operation, const Buffer& buffer) const {
  int64_t size_bytes = 0;
  for (int32_t i = 0; i < operation.range_count; ++i)
    size_bytes += operation.ranges[i].size_bytes();
  return std::string(name_of(operation.op)) + " of " + std::to_string(size_bytes) + " bytes failed on rank " +
         std::to_string(rank_) + " of " + std::to_string(world_size_) + " (" + buffer.backend + "): ";
}

void C10dTransport::abort(const char* reason) noexcept {
  struct Kept {
    c10::intrusive_ptr<c10d::ProcessGroup> group;
    std::vector<Buffer> buffers;
    std::shared_ptr<Exchanges> exchanges;
  };
  // Copied here because the transport may be gone as soon as everything has completed.
  auto kept = std::make_unique<Kept>(group_, buffers_, exchanges_);
  const Outstanding::Ended ended = outstanding_->abort(reason);
  if (ended.count == 0 && !ended.after_failure) return;
  if (kept->exchanges != nullptr) kept->exchanges->abort();
  try {
    if (kept->group) kept->group->abort();
  } catch (...) {
    // The operations have their error, which is the first one; a backend that cannot abort has nothing to add.
  }
  if (ended.count == 0) return;
  // WORKAROUND(torch 2.11 to 2.15, Gloo): it has no abort. Its destructor waits for the operations that it can no longer
  // finish, until the timeout of the group, half an hour, so that the program would not end; and until then its threads may
  // write into the buffers. So neither the group nor the buffers, nor the memory of exchanges, are ever destroyed.
  static_cast<void>(kept.release());
}

void C10dTransport::close() noexcept {
  outstanding_->close();
  if (exchanges_ != nullptr) exchanges_->close();
  for (const Buffer& buffer : buffers_) {
    if (buffer.stream != nullptr) buffer.stream->close();
  }
  // Where nobody else owns the group any more, its threads are waited for here: they need nothing of Python.
  group_.reset();
}

void C10dTransport::on_written(int32_t buffer, Range range) {
  const Buffer& written = buffer_at(buffer);
  if (written.stream != nullptr) written.stream->on_written(buffer, range);
}

void C10dTransport::order_behind(int32_t buffer, Range range) {
  const Buffer& used = buffer_at(buffer);
  if (used.stream != nullptr) used.stream->order_behind(buffer, range);
}

void C10dTransport::replace_buffer(int32_t buffer, const at::Tensor& tensor) {
  const at::Tensor& before = buffer_at(buffer).tensor;
  if (tensor.numel() != before.numel() || tensor.scalar_type() != before.scalar_type() ||
      tensor.device() != before.device()) {
    throw std::invalid_argument("a buffer can be replaced by one of the same size, type and device only");
  }
  buffers_[static_cast<size_t>(buffer)] = make_buffer(tensor);
}

}  // namespace gradcast
