#include "transport/torch/c10d_transport.h"

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <future>
#include <map>
#include <span>
#include <stdexcept>
#include <thread>
#include <utility>

#include "platform/thread.h"
#include "transport/torch/collective.h"
#include "transport/torch/control.h"
#include "transport/torch/exception_text.h"
#include "transport/torch/range_views.h"

namespace gradcast {

namespace {

Encoding wire_of(const std::string& name) {
  if (name == "fp32") return Encoding::kFloat32;
  if (name == "bf16") return Encoding::kBFloat16;
  if (name == "fp16") return Encoding::kFloat16;
  if (name == "int8") return Encoding::kInt8;
  throw std::invalid_argument("the wire format is '" + name + "'; one of fp32, bf16, fp16, int8 is expected");
}

// The most that the engine waits for a backend's abort(), so that a program ends in time.
constexpr std::chrono::seconds kAbortWithin(1);

// Aborts the group on a thread of its own: NCCL's abort() may wait until the group's timeout. Returns whether it has
// ended; otherwise the thread is left behind and the group must live until the process ends.
bool abort_in_time(c10d::ProcessGroup& group) noexcept {
  try {
    // Keeps what it throws: the operations have their error already, and a backend that cannot abort adds nothing to it.
    std::packaged_task<void()> task([&group] { group.abort(); });
    const std::future<void> end = task.get_future();
    std::thread thread([task = std::move(task)]() mutable {
      name_this_thread("gradcast-abort");
      task();
    });
    const bool has_ended = end.wait_for(kAbortWithin) == std::future_status::ready;
    has_ended ? thread.join() : thread.detach();
    return has_ended;
  } catch (const std::exception&) {
    return true;  // there is no thread to be had, and nothing was begun
  }
}

}  // namespace

// One operation under way, owned by the callbacks that end it. It must not own the process group: the last owner of a
// group joins the group's threads, and the callbacks run on these threads.
struct C10dTransport::Flight {
  int64_t ticket;
  int32_t buffer;
  std::vector<Range> ranges;  // copied: the engine's are gone after an abort
  std::string what_failed;
  bool is_nccl;
  std::shared_ptr<CompletionGate> gate;
  Collective collective;
  DeviceStream::Mark beginning;

  void complete(const std::exception_ptr& exception) const noexcept {
    if (exception == nullptr) {
      gate->complete(ticket, nullptr);
    } else {
      gate->complete(ticket, (what_failed + exception_text(exception)).c_str());
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

  // Reports when the stream has passed the kernels that write the operation's bytes.
  static void watch_beginning(DeviceStream& stream, const std::shared_ptr<CompletionGate>& gate, int64_t ticket) {
    stream.watch(
        {[gate] { return gate->aborted(); }, [gate, ticket](const std::exception_ptr&) { gate->began(ticket); }});
  }

  // The host's part is done. Puts the rest on the device's stream and reports when the stream has passed it.
  static void end_on(DeviceStream& stream, const std::shared_ptr<Flight>& flight) {
    const auto enqueue = [flight] {
      flight->collective.work->wait();  // the stream waits, not the host
      if (flight->collective.unpack) flight->collective.unpack();
    };
    const auto passed = [flight](const std::exception_ptr& exception) {
      flight->complete(exception ? exception : failure_of(*flight->collective.work, flight->is_nccl));
    };
    const auto queued = [flight] { flight->gate->queued(flight->ticket); };
    const auto given_up = [flight] { return flight->gate->aborted(); };
    const auto lasted = [flight](int64_t duration_ns) { flight->gate->timed(flight->ticket, duration_ns); };
    stream.end({flight->buffer, flight->ranges, enqueue, queued, {given_up, passed}, flight->beginning, lasted});
  }
};

C10dTransport::C10dTransport(c10::intrusive_ptr<c10d::ProcessGroup> group, const std::vector<at::Tensor>& buffers,
                             const std::string& wire, const std::vector<int>& host_of, RunsOn runs_on,
                             DeviceStream::Settings settings)
    : group_(std::move(group)),
      rank_(group_->getRank()),
      world_size_(group_->getSize()),
      wire_(wire_of(wire)),
      runs_on_(runs_on),
      settings_(settings) {
  for (const at::Tensor& tensor : buffers) {
    buffers_.push_back(make_buffer(tensor));
    extents_.push_back({static_cast<int64_t>(tensor.nbytes()), static_cast<int64_t>(tensor.element_size())});
  }
  if (wire_ != Encoding::kFloat32 || !host_of.empty()) wire_worker_ = std::make_shared<WireWorker>(*group_, host_of);
}

C10dTransport::~C10dTransport() {
  abort("the transport was destroyed before this operation had finished");
  close();
}

// All buffers on one device share its streams, so that their blocks start and end in order.
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
  if (wire_ != Encoding::kFloat32 && buffer.backend == "gloo") {
    throw std::invalid_argument("over Gloo tensors on " + device.str() +
                                " have no wire format but their own; use another backend, or wire=\"fp32\"");
  }
  if (wire_ == Encoding::kInt8) {
    throw std::invalid_argument("tensors on " + device.str() +
                                " cannot be sent as 8-bit numbers, which is for the CPU so far; use wire=\"bf16\"");
  }
  for (const Buffer& other : buffers_) {
    if (other.tensor.device() == device) buffer.stream = other.stream;
  }
  if (buffer.stream == nullptr) buffer.stream = std::make_shared<DeviceStream>(device, settings_);
  return buffer;
}

C10dTransport::Buffer& C10dTransport::buffer_at(int32_t index) {
  if (index < 0 || static_cast<size_t>(index) >= buffers_.size()) {
    throw std::invalid_argument("there is no buffer " + std::to_string(index) + "; the transport has " +
                                std::to_string(buffers_.size()));
  }
  return buffers_[static_cast<size_t>(index)];
}

// Runs on the engine's thread, the one that will call start(), so this is the thread that must enter the device.
void C10dTransport::open(CompletionSink* sink) noexcept {
  gate_->open(sink);
  for (const Buffer& buffer : buffers_) {
    if (buffer.stream != nullptr) buffer.stream->enter_device();
  }
}

void C10dTransport::start(const Operation& operation) noexcept {
  if (!gate_->add(operation.ticket)) return;
  try {
    launch(operation);
  } catch (...) {
    const std::string error =
        std::string(to_string(operation.op)) + " could not start: " + exception_text(std::current_exception());
    gate_->complete(operation.ticket, error.c_str());
  }
}

// Only all-reduces of fp32: halves of an all-reduce would round more often than once each way. On a device, the backend
// knows the hosts itself.
bool C10dTransport::goes_as_messages(const Operation& operation, const Buffer& buffer) const {
  return wire_worker_ != nullptr && operation.op == Op::kAllReduce && buffer.tensor.scalar_type() == at::kFloat &&
         (buffer.stream == nullptr || wire_ != Encoding::kFloat32);
}

// Three ways to the end: with a wire format on the host the wire worker ends the operation; on a device the waiting
// thread of the stream does; otherwise the callback of the backend's future does.
void C10dTransport::launch(const Operation& operation) {
  if (const auto fault = fault_of(operation, extents_)) throw std::invalid_argument(*fault);
  const Buffer& buffer = buffer_at(operation.buffer);
  const std::span<const Range> ranges = ranges_of(operation);
  c10::OptionalStreamGuard guard;
  if (buffer.stream != nullptr) {
    if (buffer.stream->wait_for_writes(operation.buffer, ranges)) {
      Flight::watch_beginning(*buffer.stream, gate_, operation.ticket);
    }
    guard.reset_stream(buffer.stream->stream());
  }
  const RangeViews views(buffer.tensor, ranges);
  const auto flight =
      std::make_shared<Flight>(operation.ticket, operation.buffer, std::vector<Range>(ranges.begin(), ranges.end()),
                               failure_text(operation, rank_, world_size_, buffer.backend), buffer.backend == "nccl",
                               gate_, Collective{}, nullptr);
  if (buffer.stream != nullptr) flight->beginning = buffer.stream->beginning();
  if (buffer.stream != nullptr && goes_as_messages(operation, buffer)) {
    const auto type = wire_ == Encoding::kBFloat16 ? c10::kBFloat16 : c10::kHalf;
    flight->collective = start_wire_all_reduce_on_stream(*group_, views, type, runs_on_);
  } else if (goes_as_messages(operation, buffer)) {
    wire_worker_->start({buffer.tensor, buffer.residual, flight->ranges, wire_, buffer.segments},
                        [flight](const std::exception_ptr& exception) { flight->complete(exception); });
    return;
  } else {
    flight->collective = wire_worker_ ? wire_worker_->start_collective(operation.op, views)
                                      : start_collective(*group_, operation.op, views, runs_on_);
  }
  const auto future = flight->collective.work->getFuture();
  // A backend keeps a work alive while it runs. Without a stream the flight must not own the work as well, which would
  // be a cycle: the work owns the future, the future owns this callback, and the callback owns the flight.
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

// Completes everything first, then tells the backend.
void C10dTransport::abort(const char* reason) noexcept {
  struct LeakedOnAbort {
    c10::intrusive_ptr<c10d::ProcessGroup> group;
    std::vector<Buffer> buffers;
    std::shared_ptr<WireWorker> wire_worker;
  };
  // Copied first: the transport may be destroyed as soon as everything has completed.
  auto leaked = std::make_unique<LeakedOnAbort>(group_, buffers_, wire_worker_);
  const CompletionGate::Aborted aborted = gate_->abort(reason);
  if (aborted.count == 0 && !aborted.after_failure) return;
  if (leaked->wire_worker != nullptr) leaked->wire_worker->abort();
  const bool has_ended = leaked->group == nullptr || abort_in_time(*leaked->group);
  if (aborted.count == 0 && has_ended) return;
  // WORKAROUND(torch 2.11 to 2.15, Gloo): it has no abort. Its destructor waits for the operations that it can no
  // longer finish, until the timeout of the group, half an hour, so that the program would not end; and until then its
  // threads may write into the buffers. So neither the group nor the buffers, nor the memory of the wire worker, are
  // ever destroyed.
  static_cast<void>(leaked.release());
}

void C10dTransport::close() noexcept {
  gate_->close();
  if (wire_worker_ != nullptr) wire_worker_->close();
  for (const Buffer& buffer : buffers_) {
    if (buffer.stream != nullptr) buffer.stream->close();
  }
  // If this is the last owner, the group's threads are joined here. They need nothing of Python.
  group_.reset();
}

void C10dTransport::on_written(int32_t buffer, int64_t lo_bytes, int64_t hi_bytes) {
  const Buffer& written = buffer_at(buffer);
  if (written.stream != nullptr) written.stream->on_written(buffer, {lo_bytes, hi_bytes});
}

void C10dTransport::order_behind(const std::vector<Place>& places) {
  std::map<DeviceStream*, std::vector<std::pair<int32_t, Range>>> by_stream;
  for (const auto& [buffer, lo_bytes, hi_bytes] : places) {
    DeviceStream* const stream = buffer_at(buffer).stream.get();
    if (stream != nullptr) by_stream[stream].push_back({buffer, {lo_bytes, hi_bytes}});
  }
  for (const auto& [stream, used] : by_stream)
    stream->order_behind(used);
}

void C10dTransport::expect(const std::vector<std::pair<int32_t, std::vector<Ends>>>& blocks) {
  std::map<DeviceStream*, std::vector<DeviceStream::Block>> by_stream;
  for (const auto& [buffer, ranges] : blocks) {
    DeviceStream* const stream = buffer_at(buffer).stream.get();
    if (stream == nullptr) continue;
    DeviceStream::Block& block = by_stream[stream].emplace_back(buffer, std::vector<Range>());
    for (const auto& [lo_bytes, hi_bytes] : ranges)
      block.second.push_back({lo_bytes, hi_bytes});
  }
  for (const auto& [stream, expected] : by_stream)
    stream->expect(expected);
}

void C10dTransport::replace_buffer(int32_t buffer, const at::Tensor& tensor) {
  Buffer& changed = buffer_at(buffer);
  const bool has_size = static_cast<int64_t>(tensor.nbytes()) == extents_[static_cast<size_t>(buffer)].size_bytes;
  if (!(has_size || tensor.numel() == 0) || tensor.scalar_type() != changed.tensor.scalar_type() ||
      tensor.device() != changed.tensor.device()) {
    throw std::invalid_argument("a buffer can be replaced by one of the same size, type and device only");
  }
  changed = make_buffer(tensor);
}

void C10dTransport::set_groups(int32_t buffer, std::vector<GroupSegment> segments, const at::Tensor& residual) {
  Buffer& changed = buffer_at(buffer);
  if (changed.tensor.scalar_type() != at::kFloat || residual.scalar_type() != at::kFloat ||
      residual.numel() != changed.tensor.numel() || !residual.is_contiguous() || !residual.is_cpu()) {
    throw std::invalid_argument("a residual is a contiguous host tensor of the size and type of an fp32 buffer");
  }
  int64_t end = 0;
  for (const GroupSegment& segment : segments) {
    if (segment.first < end || segment.first % kInt8GroupElements != 0 || segment.count <= 0 ||
        segment.first + segment.count > residual.numel() || segment.first_owner < 0) {
      throw std::invalid_argument("the segments of groups have to be ascending, and to begin at groups of the buffer");
    }
    end = segment.first + segment.count;
  }
  changed.segments = std::make_shared<std::vector<GroupSegment>>(std::move(segments));
  changed.residual = lend(residual);
}

void C10dTransport::send_residual(int32_t buffer, int64_t first, bool sends) {
  std::vector<GroupSegment>& segments = *buffer_at(buffer).segments;
  const auto found = std::ranges::lower_bound(segments, first, {}, &GroupSegment::first);
  if (found == segments.end() || found->first != first) {
    throw std::invalid_argument("no segment of groups begins at element " + std::to_string(first));
  }
  found->sends_residual = sends;
}

}  // namespace gradcast
