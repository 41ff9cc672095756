#include "transport/torch/device_stream.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pthread.h>
#include <sys/prctl.h>

#include <chrono>

namespace gradcast {

namespace {

// The device-neutral event can be asked, or waited for by spinning; a core of the trainer's is too good for that. This adds
// at most as much to an operation of milliseconds, and sees at once when it is given up.
constexpr auto kPollPeriod = std::chrono::microseconds(50);

}  // namespace

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
}

void DeviceStream::on_written(int32_t buffer, Range range) {
  const c10::Stream writer = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  const std::lock_guard lock(writes_mutex_);
  auto& events = writes_[buffer];
  const auto place = events.try_emplace({range.lo_bytes, range.hi_bytes}, device_.type()).first;
  place->second.record(writer);
}

bool DeviceStream::wait_for_writes(int32_t buffer, Range range) {
  bool is_waiting = false;
  const std::lock_guard lock(writes_mutex_);
  for (const auto& [written, event] : writes_[buffer]) {
    if (written.first >= range.hi_bytes) break;
    if (written.second <= range.lo_bytes) continue;
    event.block(stream_);
    is_waiting = is_waiting || !event.query();
  }
  return is_waiting;
}

void DeviceStream::watch(Place here) {
  Watched watched = recorded(stream_, std::move(here));
  {
    const std::lock_guard lock(mutex_);
    news_.emplace_back(std::move(watched));
  }
  changed_.notify_one();
}

void DeviceStream::end(Ending ending) {
  {
    const std::lock_guard lock(mutex_);
    news_.emplace_back(std::move(ending));
  }
  changed_.notify_one();
}

void DeviceStream::order_behind(int32_t buffer, Range range) {
  const c10::Stream here = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  const std::lock_guard lock(ends_mutex_);
  const c10::Event* last = nullptr;  // ranges of one operation are often neighbours
  ends_.over(buffer, range, [&](const auto& event) {
    if (event.get() == last) return;
    event->block(here);
    last = event.get();
  });
}

void DeviceStream::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

DeviceStream::Watched DeviceStream::recorded(const c10::Stream& stream, Place place) const {
  auto event = std::make_shared<c10::Event>(device_.type());
  event->record(stream);
  return {std::move(event), std::move(place)};
}

void DeviceStream::loop() {
  pthread_setname_np(pthread_self(), "gradcast-wait");
  prctl(PR_SET_TIMERSLACK, 1);  // ns; Linux adds 50 us to each wait otherwise, as much as the wait itself
  enter_device();
  std::unique_lock lock(mutex_);
  while (!closed_ || !watched_.empty()) {
    if (watched_.empty()) {
      changed_.wait(lock, [this] { return closed_ || !news_.empty(); });
    } else {
      changed_.wait_for(lock, kPollPeriod, [this] { return !closed_ && !news_.empty(); });
    }
    std::deque<News> news;
    news.swap(news_);
    const bool is_closing = closed_;
    lock.unlock();
    if (!is_closing) take(news);
    look();
    news.clear();  // destroys what belongs to operations: not under the lock
    lock.lock();
  }
}

void DeviceStream::take(std::deque<News>& news) {
  for (News& each : news) {
    if (auto* watched = std::get_if<Watched>(&each)) {
      watched_.push_back(std::move(*watched));
    } else {
      put_on_stream(std::get<Ending>(each));
    }
  }
}

void DeviceStream::put_on_stream(const Ending& ending) {
  try {
    const c10::StreamGuard guard(end_stream_);
    ending.enqueue();
    Watched watched = recorded(end_stream_, ending.past_it);
    note_end(ending, watched.event);
    watched_.push_back(std::move(watched));
    ending.queued();
  } catch (...) {
    ending.past_it.passed(std::current_exception());
  }
}

void DeviceStream::note_end(const Ending& ending, const std::shared_ptr<const c10::Event>& event) {
  decltype(ends_)::Marks replaced;  // destroyed without the lock: tools that watch the device may ask for the GIL there
  const std::lock_guard lock(ends_mutex_);
  for (const Range& range : ending.ranges)
    ends_.set(ending.buffer, range, event, replaced);
}

void DeviceStream::look() {
  std::list<Watched> passed;
  // The last ones first: what a place waits for has been passed when it has, and is told before it.
  for (auto each = watched_.end(); each != watched_.begin();) {
    const auto here = std::prev(each);
    if (here->is_past()) {
      passed.splice(passed.begin(), watched_, here);
    } else {
      each = here;
    }
  }
  for (const Watched& each : passed)
    each.place.passed(each.error);
}

bool DeviceStream::Watched::is_past() {
  try {
    return event->query() || place.given_up();
  } catch (...) {
    error = std::current_exception();
    return true;
  }
}

}  // namespace gradcast
