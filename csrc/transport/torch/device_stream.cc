#include "transport/torch/device_stream.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <stdexcept>

#include "platform/capture.h"
#include "platform/thread.h"

namespace gradcast {

namespace {

// c10's events can be polled, or waited for by spinning, which would cost the trainer a core. Polling at this period
// adds at most as much to an operation of milliseconds.
constexpr int64_t kPollPeriodNs = 50'000;

StreamPoints::Point watched(const std::shared_ptr<const c10::Event>& event, const DeviceStream::StreamPoint& point) {
  return {[event, given_up = point.given_up] { return event->query() || given_up(); }, point.passed};
}

// Reports the time since the later of the two moments. Events that the device has not passed have no times: those of an
// operation that was given up.
void report_duration(const DeviceStream::Ending& ending, const c10::Event* before, const c10::Event& end) {
  if (ending.beginning == nullptr) return;
  try {
    if (!end.query()) return;
    double duration_ms = ending.beginning->elapsedTime(end);
    if (before != nullptr) duration_ms = std::min(duration_ms, before->elapsedTime(end));
    ending.lasted(static_cast<int64_t>(duration_ms * 1e6));
  } catch (const std::exception&) {
    return;  // a device that has failed: the end of the operation tells
  }
}

int64_t common_bytes(Range one, Range other) {
  return std::min(one.hi_bytes, other.hi_bytes) - std::max(one.lo_bytes, other.lo_bytes);
}

}  // namespace

// The thread starts last, when everything it uses exists.
DeviceStream::DeviceStream(c10::Device device, Settings settings)
    : device_(device),
      settings_(settings),
      stream_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, settings.has_high_priority)),
      end_stream_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
      thread_([this] { loop(); }) {}

DeviceStream::~DeviceStream() {
  close();
}

void DeviceStream::enter_device() const noexcept {
  c10::impl::VirtualGuardImpl(device_.type()).uncheckedSetDevice(device_);
  stay_out_of_captures();
}

void DeviceStream::expect(const std::vector<Block>& blocks) {
  // Destroyed without the locks, as in note_end().
  decltype(writes_) writes;
  decltype(ends_) ends;
  decltype(writes_)::Values none;
  for (const auto& [buffer, ranges] : blocks) {
    const auto block = std::make_shared<Writes>(size_bytes(ranges));
    for (const Range& range : ranges)
      writes.set(buffer, range, block, none);
  }
  {
    MutexLock lock(writes_mutex_);
    std::swap(writes, writes_);
  }
  MutexLock lock(ends_mutex_);
  std::swap(ends, ends_);
}

void DeviceStream::on_written(int32_t buffer, Range range) {
  const c10::Stream writer = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  Marks recorded;  // one serves all blocks that carry a part of this gradient
  MutexLock lock(writes_mutex_);
  writes_.for_each(buffer, range, [&](Range part, const std::shared_ptr<Writes>& block) {
    if (std::ranges::find(block->unmarked, writer) == block->unmarked.end()) block->unmarked.push_back(writer);
    block->written_bytes += common_bytes(part, range);
    if (block->written_bytes >= block->size_bytes) mark(*block, recorded);
  });
}

bool DeviceStream::wait_for_writes(int32_t buffer, std::span<const Range> ranges) {
  std::vector<Mark> marks;
  int64_t expected_bytes = 0;
  {
    Marks recorded;
    MutexLock lock(writes_mutex_);
    for (const Range& range : ranges) {
      writes_.for_each(buffer, range, [&](Range part, const std::shared_ptr<Writes>& block) {
        expected_bytes += common_bytes(part, range);
        mark(*block, recorded);  // in case that not all of its bytes are written
        std::ranges::move(block->marks, std::back_inserter(marks));
        *block = {block->size_bytes};
      });
    }
  }
  if (expected_bytes != size_bytes(ranges)) throw std::invalid_argument("these bytes are no block of the plan");
  for (const Mark& each : marks)
    each->block(stream_);
  return !std::ranges::all_of(marks, [](const Mark& each) { return each->query(); });
}

// Records on each stream that has written, so the event covers exactly the kernels that it was given so far.
void DeviceStream::mark(Writes& block, Marks& recorded) const {
  for (const c10::Stream& writer : block.unmarked) {
    Mark& event = recorded[writer];
    if (event == nullptr) event = recorded_on(writer);
    block.marks.push_back(event);
  }
  block.unmarked.clear();
}

void DeviceStream::watch(StreamPoint here) {
  post(watched(recorded_on(stream_), here));
}

void DeviceStream::end(Ending ending) {
  post(std::move(ending));
}

void DeviceStream::post(Task task) {
  {
    MutexLock lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  changed_.notify_one();
}

void DeviceStream::order_behind(const std::vector<std::pair<int32_t, Range>>& places) {
  const c10::Stream here = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  std::set<const c10::Event*> waited;
  MutexLock lock(ends_mutex_);
  for (const auto& [buffer, range] : places) {
    ends_.for_each(buffer, range, [&](Range, const Mark& event) {
      if (waited.insert(event.get()).second) event->block(here);
    });
  }
}

void DeviceStream::close() {
  {
    MutexLock lock(mutex_);
    closed_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

DeviceStream::Mark DeviceStream::beginning() const {
  return settings_.times ? recorded_on(stream_, end_flag()) : nullptr;
}

// Of events with times, which cost more than those without.
c10::EventFlag DeviceStream::end_flag() const {
  return settings_.times ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT;
}

DeviceStream::Mark DeviceStream::recorded_on(const c10::Stream& stream, c10::EventFlag flag) const {
  auto event = std::make_shared<c10::Event>(device_.type(), flag);
  event->record(stream);
  return event;
}

void DeviceStream::loop() {
  name_this_thread("gradcast-wait");
  wake_promptly();
  enter_device();
  MutexLock lock(mutex_);
  while (!closed_ || is_watching()) {
    wait_for_tasks();
    std::deque<Task> tasks;
    tasks.swap(tasks_);
    const bool is_closing = closed_;
    lock.unlock();
    if (!is_closing) take(tasks);
    begin_points_.report_passed();
    end_points_.report_passed();
    tasks.clear();  // destroys what belongs to operations, which must not happen under the lock
    lock.lock();
  }
}

// Until there is a task or the end; for one poll period at most while points are watched.
void DeviceStream::wait_for_tasks() {
  if (!is_watching()) {
    while (!closed_ && tasks_.empty())
      changed_.wait(mutex_);
    return;
  }
  const int64_t deadline_ns = steady_now_ns() + kPollPeriodNs;
  while ((closed_ || tasks_.empty()) && steady_now_ns() < deadline_ns)
    changed_.wait_until(mutex_, deadline_ns);
}

void DeviceStream::take(std::deque<Task>& tasks) {
  for (Task& task : tasks) {
    if (auto* point = std::get_if<StreamPoints::Point>(&task)) {
      begin_points_.add(std::move(*point));
    } else {
      put_on_stream(std::get<Ending>(task));
    }
  }
}

// `queued` comes last: whoever is notified may call order_behind() at once, and must find the event.
void DeviceStream::put_on_stream(const Ending& ending) {
  try {
    const c10::StreamGuard guard(end_stream_);
    ending.enqueue();
    const auto event = recorded_on(end_stream_, end_flag());
    note_end(ending, event);
    const auto passed = [this, ending, event, before = std::exchange(last_end_, event)](const auto& error) {
      begin_points_.report_passed();  // it has begun before it has ended
      report_duration(ending, before.get(), *event);
      ending.past_it.passed(error);
    };
    end_points_.add(watched(event, {ending.past_it.given_up, passed}));
    ending.queued();
  } catch (...) {
    ending.past_it.passed(std::current_exception());
  }
}

void DeviceStream::note_end(const Ending& ending, const Mark& event) {
  decltype(ends_)::Values
      replaced;  // destroyed without the lock: tools that watch the device may ask for the GIL there
  MutexLock lock(ends_mutex_);
  for (const Range& range : ending.ranges)
    ends_.set(ending.buffer, range, event, replaced);
}

}  // namespace gradcast
