#include "transport/torch/device_stream.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <set>

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

}  // namespace

// The thread starts last, when everything it uses exists.
DeviceStream::DeviceStream(c10::Device device)
    : device_(device),
      stream_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
      end_stream_(c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, /*isHighPriority=*/true)),
      thread_([this] { loop(); }) {}

DeviceStream::~DeviceStream() {
  close();
}

void DeviceStream::enter_device() const noexcept {
  c10::impl::VirtualGuardImpl(device_.type()).uncheckedSetDevice(device_);
  stay_out_of_captures();
}

// Records on the caller's stream, so the event covers exactly the kernels that were queued so far.
void DeviceStream::on_written(int32_t buffer, Range range) {
  const c10::Stream writer = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  MutexLock lock(writes_mutex_);
  auto& events = writes_[buffer];
  const auto place = events.try_emplace({range.lo_bytes, range.hi_bytes}, device_.type()).first;
  place->second.record(writer);
}

bool DeviceStream::wait_for_writes(int32_t buffer, Range range) {
  bool is_waiting = false;
  MutexLock lock(writes_mutex_);
  const Writes& writes = writes_[buffer];
  const auto wait_for = [&](const Writes::value_type& write) {
    if (write.first.second <= range.lo_bytes) return;
    write.second.block(stream_);
    is_waiting = is_waiting || !write.second.query();
  };
  // What begins with the buffer may reach anywhere; of the others, one before this range may reach into it.
  const auto behind_first = writes.lower_bound({1, 0});
  for (auto each = writes.begin(); each != behind_first; ++each)
    wait_for(*each);
  auto each = writes.lower_bound({std::max<int64_t>(range.lo_bytes, 1), 0});
  if (each != behind_first) --each;
  for (; each != writes.end() && each->first.first < range.hi_bytes; ++each)
    wait_for(*each);
  return is_waiting;
}

void DeviceStream::forget() {
  // Destroyed without the locks, as in note_end().
  std::map<int32_t, Writes> writes;
  RangeMap<std::shared_ptr<const c10::Event>> ends;
  {
    MutexLock lock(writes_mutex_);
    std::swap(writes, writes_);
  }
  MutexLock lock(ends_mutex_);
  std::swap(ends, ends_);
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
    ends_.for_each(buffer, range, [&](const auto& event) {
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

std::shared_ptr<const c10::Event> DeviceStream::recorded_on(const c10::Stream& stream) const {
  auto event = std::make_shared<c10::Event>(device_.type());
  event->record(stream);
  return event;
}

void DeviceStream::loop() {
  name_this_thread("gradcast-wait");
  wake_promptly();
  enter_device();
  MutexLock lock(mutex_);
  while (!closed_ || !watched_.empty()) {
    wait_for_tasks();
    std::deque<Task> tasks;
    tasks.swap(tasks_);
    const bool is_closing = closed_;
    lock.unlock();
    if (!is_closing) take(tasks);
    watched_.report_passed();
    tasks.clear();  // destroys what belongs to operations, which must not happen under the lock
    lock.lock();
  }
}

// Until there is a task or the end; for one poll period at most while points are watched.
void DeviceStream::wait_for_tasks() {
  if (watched_.empty()) {
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
      watched_.add(std::move(*point));
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
    const auto event = recorded_on(end_stream_);
    note_end(ending, event);
    watched_.add(watched(event, ending.past_it));
    ending.queued();
  } catch (...) {
    ending.past_it.passed(std::current_exception());
  }
}

void DeviceStream::note_end(const Ending& ending, const std::shared_ptr<const c10::Event>& event) {
  decltype(ends_)::Values
      replaced;  // destroyed without the lock: tools that watch the device may ask for the GIL there
  MutexLock lock(ends_mutex_);
  for (const Range& range : ending.ranges)
    ends_.set(ending.buffer, range, event, replaced);
}

}  // namespace gradcast
