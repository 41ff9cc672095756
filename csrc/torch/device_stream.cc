#include "device_stream.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pthread.h>

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
      thread_([this] { loop(); }) {}

DeviceStream::~DeviceStream() {
  close();
}

void DeviceStream::on_written(int32_t buffer, Range range) {
  const c10::Stream writer = c10::impl::VirtualGuardImpl(device_.type()).getStream(device_);
  const std::lock_guard lock(writes_mutex_);
  auto& events = writes_[buffer];
  const auto place = events.try_emplace({range.lo_bytes, range.hi_bytes}, device_.type()).first;
  place->second.record(writer);
}

void DeviceStream::wait_for_writes(int32_t buffer, Range range) {
  const std::lock_guard lock(writes_mutex_);
  for (const auto& [written, event] : writes_[buffer]) {
    if (written.first >= range.hi_bytes) break;
    if (written.second > range.lo_bytes) event.block(stream_);
  }
}

void DeviceStream::end(Ending ending) {
  {
    const std::lock_guard lock(endings_mutex_);
    endings_.push_back(std::move(ending));
  }
  changed_.notify_one();
}

void DeviceStream::close() {
  {
    const std::lock_guard lock(endings_mutex_);
    closed_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void DeviceStream::loop() {
  pthread_setname_np(pthread_self(), "gradcast-wait");
  std::unique_lock lock(endings_mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closed_ || !endings_.empty(); });
    if (closed_) return;
    const Ending ending = std::move(endings_.front());
    endings_.pop_front();
    lock.unlock();
    finish(ending);
    lock.lock();
  }
}

void DeviceStream::finish(const Ending& ending) {
  try {
    const c10::StreamGuard guard(stream_);
    ending.enqueue();
    c10::Event past(device_.type());
    past.record(stream_);
    while (!past.query() && !ending.given_up())
      std::this_thread::sleep_for(kPollPeriod);
  } catch (...) {
    ending.finished(std::current_exception());
    return;
  }
  ending.finished(nullptr);
}

}  // namespace gradcast
