// A device whose kernels run when a test says so, and a DeviceStream on it. For test_device_stream.py.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "transport/torch/device_stream.h"
#include "transport/torch/exception_text.h"

namespace {

constexpr auto kKind = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kKind, 1);

// A stream is the list of what it was given: kernels, which the test finishes, and places of other streams to wait for.
class FakeDevice {
 public:
  using Place = std::pair<c10::StreamId, size_t>;  // behind so many entries of a stream

  void clear() {
    const std::lock_guard lock(mutex_);
    streams_.clear();
    now_us_ = 0;
  }
  // The device's clock, which the test moves.
  void set_clock(double now_us) {
    const std::lock_guard lock(mutex_);
    now_us_ = now_us;
  }
  double clock() {
    const std::lock_guard lock(mutex_);
    return now_us_;
  }
  // When the stream has passed the place, which it was given at `given_us`.
  double passed_us(const Place& place, double given_us) {
    const std::lock_guard lock(mutex_);
    return std::max(given_us, passed_us_locked(place));
  }
  size_t add_kernel(c10::StreamId stream) { return add(stream, {}); }
  void finish(c10::StreamId stream, size_t kernel) {
    const std::lock_guard lock(mutex_);
    streams_[stream][kernel].finished = true;
    streams_[stream][kernel].finished_us = now_us_;
  }
  Place end_of(c10::StreamId stream) {
    const std::lock_guard lock(mutex_);
    return {stream, streams_[stream].size()};
  }
  void add_wait(c10::StreamId stream, Place place) { add(stream, {.waits_for = place}); }
  bool is_past(Place place) {
    const std::lock_guard lock(mutex_);
    return is_past_locked(place);
  }

 private:
  struct Entry {
    bool finished = false;
    double finished_us = 0;
    std::optional<Place> waits_for{};
  };

  size_t add(c10::StreamId stream, Entry entry) {
    const std::lock_guard lock(mutex_);
    streams_[stream].push_back(std::move(entry));
    return streams_[stream].size() - 1;
  }
  bool is_past_locked(const Place& place) {
    const std::vector<Entry>& entries = streams_[place.first];
    return std::all_of(
        entries.begin(), entries.begin() + static_cast<std::ptrdiff_t>(place.second),
        [&](const Entry& each) { return each.waits_for ? is_past_locked(*each.waits_for) : each.finished; });
  }

  double passed_us_locked(const Place& place) {
    double passed_us = 0;
    for (size_t i = 0; i < place.second; ++i) {
      const Entry& each = streams_[place.first][i];
      passed_us = std::max(passed_us, each.waits_for ? passed_us_locked(*each.waits_for) : each.finished_us);
    }
    return passed_us;
  }

  std::mutex mutex_;
  std::map<c10::StreamId, std::vector<Entry>> streams_;
  double now_us_ = 0;
};

struct FakeEvent {
  FakeDevice::Place place;
  double given_us;
  bool has_time;  // CUDA's events have none unless they are made with it
};

FakeDevice fake;
thread_local c10::StreamId current_stream = 0;
// Device 0 in a thread that has chosen none. Calls for another device go back to it, and it takes memory.
thread_local c10::DeviceIndex current_device = 0;
std::atomic<int> calls_from_device_0 = 0;
std::atomic<int> records = 0;
std::vector<bool> priorities;  // of the streams from the pool
std::mutex asked_mutex;
std::vector<const void*> asked;  // events, by each query

void come_back() {
  if (current_device == 0) ++calls_from_device_0;
}

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kKind; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
  c10::Stream getStream(c10::Device) const override { return stream(current_stream); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool has_high_priority) const override {
    static c10::StreamId last = 0;
    priorities.push_back(has_high_priority);
    return stream(++last);
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(std::exchange(current_stream, next.id()));
  }
  void record(void** event, const c10::Stream& on, c10::DeviceIndex, c10::EventFlag flag) const override {
    come_back();
    ++records;
    if (*event == nullptr) *event = new FakeEvent;
    *static_cast<FakeEvent*>(*event) = {fake.end_of(on.id()), fake.clock(), flag == c10::EventFlag::BACKEND_DEFAULT};
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const auto& from = *static_cast<FakeEvent*>(first);
    const auto& to = *static_cast<FakeEvent*>(second);
    TORCH_CHECK(from.has_time && to.has_time, "an event has no time");
    return (fake.passed_us(to.place, to.given_us) - fake.passed_us(from.place, from.given_us)) / 1e3;
  }
  void block(void* event, const c10::Stream& on) const override {
    come_back();
    if (event != nullptr) fake.add_wait(on.id(), static_cast<FakeEvent*>(event)->place);
  }
  bool queryEvent(void* event) const override {
    {
      const std::lock_guard lock(asked_mutex);
      asked.push_back(event);
    }
    return event == nullptr || fake.is_past(static_cast<FakeEvent*>(event)->place);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<FakeEvent*>(event); }
  static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, FakeGuard)

// Starts and ends operations as the transport does, and notes what it is told of them.
class Checked {
 public:
  Checked(bool has_high_priority, bool times) : stream_(kDevice, {has_high_priority, times}) {
    fake.clear();
    stream_.enter_device();  // as a trainer's thread has
  }

  // Blocks, each the ends of its ranges.
  using Ends = std::vector<std::pair<int64_t, int64_t>>;
  void expect(const std::vector<Ends>& blocks) {
    std::vector<gradcast::DeviceStream::Block> expected;
    for (const Ends& each : blocks)
      expected.emplace_back(0, ranges_of(each));
    stream_.expect(expected);
  }
  // Kernels that write, on a stream that is current where autograd runs; 0 in a thread that has chosen none.
  size_t write(int64_t lo, int64_t hi, c10::StreamId stream) {
    const c10::StreamId before = std::exchange(current_stream, stream);
    const size_t kernel = fake.add_kernel(stream);
    stream_.on_written(0, {lo, hi});
    current_stream = before;
    return kernel;
  }
  size_t compute(c10::StreamId stream) { return fake.add_kernel(stream); }
  void finish_write(size_t kernel, c10::StreamId stream) { fake.finish(stream, kernel); }

  bool start(const std::string& name, const Ends& ranges) {
    const bool is_waiting = stream_.wait_for_writes(0, ranges_of(ranges));
    if (is_waiting) stream_.watch(place(name + " began"));
    auto beginning = stream_.beginning();
    const std::lock_guard lock(mutex_);
    beginnings_[name] = std::move(beginning);
    starts_[name] = fake.end_of(stream_.stream().id());
    return is_waiting;
  }
  // What the stream on which operations start has been given: waits.
  size_t waits() { return fake.end_of(stream_.stream().id()).second; }
  // The rest of the operation is a kernel, which runs after its start; its number on its stream is noted.
  void end(const std::string& name, const Ends& ranges, bool fails) {
    const auto enqueue = [this, name, fails] {
      if (fails) throw std::runtime_error("no memory");
      const std::lock_guard lock(mutex_);
      fake.add_wait(current_stream, starts_[name]);
      ends_[name] = {current_stream, fake.add_kernel(current_stream)};
    };
    const auto queued = [this, name] {
      const std::lock_guard lock(mutex_);
      queued_.push_back(name);
    };
    const auto lasted = [this, name](int64_t duration_ns) {
      const std::lock_guard lock(mutex_);
      durations_[name] = duration_ns;
    };
    stream_.end({0, ranges_of(ranges), enqueue, queued, place(name + " ended"), beginnings_[name], lasted});
  }
  // False where it is not on its stream yet.
  bool finish_end(const std::string& name) {
    const std::lock_guard lock(mutex_);
    if (!ends_.contains(name)) return false;
    fake.finish(ends_[name].first, ends_[name].second);
    return true;
  }
  std::vector<std::string> queued() {
    const std::lock_guard lock(mutex_);
    return queued_;
  }
  // Kernels that use these bytes, on the stream that is current for the test; how far behind them is said by
  // `could_run`.
  size_t use(c10::StreamId stream, int64_t lo, int64_t hi) { return use_all(stream, {{lo, hi}}); }
  // The same for several ranges, with one call.
  size_t use_all(c10::StreamId stream, const Ends& ranges) {
    std::vector<std::pair<int32_t, gradcast::Range>> places;
    for (const gradcast::Range& each : ranges_of(ranges))
      places.emplace_back(0, each);
    const c10::StreamId before = std::exchange(current_stream, stream);
    stream_.order_behind(places);
    current_stream = before;
    return fake.end_of(stream).second;
  }
  bool could_run(c10::StreamId stream, size_t kernel) { return fake.is_past({stream, kernel}); }
  // By a thread of its own, which works for the device from its beginning.
  bool start_elsewhere(const std::string& name, const Ends& ranges) {
    bool is_waiting = false;
    std::thread([&] {
      stream_.enter_device();
      is_waiting = start(name, ranges);
    }).join();
    return is_waiting;
  }
  void give_up() { given_up_ = true; }
  void close() { stream_.close(); }
  // By name, ns by the device's clock.
  std::map<std::string, int64_t> durations() {
    const std::lock_guard lock(mutex_);
    return durations_;
  }
  std::vector<std::string> told() {
    const std::lock_guard lock(mutex_);
    return told_;
  }

 private:
  static std::vector<gradcast::Range> ranges_of(const Ends& ends) {
    std::vector<gradcast::Range> ranges;
    for (const auto& [lo, hi] : ends)
      ranges.push_back({lo, hi});
    return ranges;
  }
  gradcast::DeviceStream::StreamPoint place(const std::string& text) {
    return {[this] { return given_up_.load(); },
            [this, text](const std::exception_ptr& error) {
              const std::lock_guard lock(mutex_);
              told_.push_back(text + (error ? " badly" : ""));
            }};
  }

  std::atomic<bool> given_up_ = false;
  std::mutex mutex_;
  std::map<std::string, FakeDevice::Place> starts_, ends_;
  std::map<std::string, gradcast::DeviceStream::Mark> beginnings_;
  std::map<std::string, int64_t> durations_;
  std::vector<std::string> told_, queued_;
  gradcast::DeviceStream stream_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  const auto released = pybind11::call_guard<pybind11::gil_scoped_release>();
  pybind11::class_<Checked>(m, "Checked")
      .def(pybind11::init<bool, bool>(), pybind11::arg("has_high_priority") = true, pybind11::arg("times") = false)
      .def("durations", &Checked::durations)
      .def("expect", &Checked::expect)
      .def("write", &Checked::write, pybind11::arg("lo"), pybind11::arg("hi"), pybind11::arg("stream") = 0)
      .def("compute", &Checked::compute, pybind11::arg("stream") = 0)
      .def("finish_write", &Checked::finish_write, pybind11::arg("kernel"), pybind11::arg("stream") = 0)
      .def("waits", &Checked::waits)
      .def("start", &Checked::start)
      .def("end", &Checked::end, pybind11::arg("name"), pybind11::arg("ranges") = pybind11::tuple(),
           pybind11::arg("fails") = false)
      .def("start_elsewhere", &Checked::start_elsewhere)
      .def("queued", &Checked::queued)
      .def("use", &Checked::use)
      .def("use_all", &Checked::use_all)
      .def("could_run", &Checked::could_run)
      .def("finish_end", &Checked::finish_end)
      .def("give_up", &Checked::give_up)
      .def("close", &Checked::close, released)
      .def("told", &Checked::told);
  m.def("message_of_no_memory", [](const std::string& words) {
    return gradcast::exception_text(
        std::make_exception_ptr(c10::OutOfMemoryError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, words)));
  });
  m.def("records", [] { return records.load(); });
  m.def("set_clock", [](double now_us) { fake.set_clock(now_us); });
  m.def("priorities", [] { return priorities; });
  m.def("queries", [] {
    const std::lock_guard lock(asked_mutex);
    return asked.size();
  });
  // Different events among those that were asked since then.
  m.def("asked_since", [](size_t queries) {
    const std::lock_guard lock(asked_mutex);
    return std::set<const void*>(asked.begin() + static_cast<std::ptrdiff_t>(queries), asked.end()).size();
  });
  m.def("calls_from_device_0", [] { return calls_from_device_0.load(); });
}
