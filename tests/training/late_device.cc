// A device for tests, over the host's own transport: every operation is queued at once and runs only a while later, so
// the host is ahead of it wherever it does not wait. What a stream would wait for, the caller waits for here. The
// engine hears of a completion a moment after that, as it does of a device's. A block that was not expected, or whose
// bytes have not all been written once since it was started last, fails.
//
// Thread safety: any thread.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/capsule.h"
#include "gradcast/transport.h"

namespace py = pybind11;

namespace gradcast {
namespace {

using Clock = std::chrono::steady_clock;

class LateTransport final : public Transport, private CompletionSink {
 public:
  LateTransport(py::object inner, int64_t delay_us)
      : owner_(std::move(inner)), inner_(transport_of(owner_)), delay_(delay_us), thread_([this] { run(); }) {}
  ~LateTransport() {
    const py::gil_scoped_release released;
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  int32_t rank() const noexcept override { return inner_.rank(); }
  int32_t world_size() const noexcept override { return inner_.world_size(); }
  void open(CompletionSink* sink) noexcept override {
    sink_ = sink;
    inner_.open(this);
  }
  void start(const Operation& operation) noexcept override {
    {
      const std::lock_guard lock(mutex_);
      const std::vector<Range> ranges(operation.ranges, operation.ranges + operation.range_count);
      const Late late{operation, ranges, Clock::now() + delay_, is_written(operation, ranges)};
      open_[operation.ticket] = late;
      most_open_ = std::max(most_open_, std::ssize(open_));
      waiting_.push_back(late);
    }
    changed_.notify_all();
    sink_->queued(operation.ticket);
  }
  void abort(const char* reason) noexcept override { inner_.abort(reason); }  // what is started later ends by it, too
  void close() noexcept override { inner_.close(); }

  void expect(const std::vector<std::pair<int32_t, std::vector<std::pair<int64_t, int64_t>>>>& blocks) {
    const std::lock_guard lock(mutex_);
    expected_.clear();
    for (const auto& [buffer, ends] : blocks) {
      std::vector<Range> ranges;
      for (const auto& [lo_bytes, hi_bytes] : ends)
        ranges.push_back({lo_bytes, hi_bytes});
      expected_.push_back({buffer, ranges, size_bytes(ranges)});
    }
  }
  void on_written(int32_t buffer, int64_t lo_bytes, int64_t hi_bytes) {
    const std::lock_guard lock(mutex_);
    for (Expected& block : expected_)
      for (const Range& range : block.ranges)
        if (block.buffer == buffer)
          block.missing_bytes -=
              std::max(int64_t{0}, std::min(range.hi_bytes, hi_bytes) - std::max(range.lo_bytes, lo_bytes));
  }
  // Returns when nothing that has been started carries any of these bytes any more: buffer, lo_bytes, hi_bytes.
  void order_behind(const std::vector<std::tuple<int32_t, int64_t, int64_t>>& places) {
    std::unique_lock lock(mutex_);
    const auto carries = [](const Late& each, int32_t buffer, int64_t lo_bytes, int64_t hi_bytes) {
      return each.operation.buffer == buffer && std::ranges::any_of(each.ranges, [&](const Range& carried) {
               return carried.lo_bytes < hi_bytes && lo_bytes < carried.hi_bytes;
             });
    };
    const auto is_behind = [&] {
      return std::none_of(open_.begin(), open_.end(), [&](const auto& each) {
        return std::ranges::any_of(places, [&](const auto& place) {
          const auto& [buffer, lo_bytes, hi_bytes] = place;
          return carries(each.second, buffer, lo_bytes, hi_bytes);
        });
      });
    };
    waited_count_ += is_behind() ? 0 : 1;
    changed_.wait(lock, is_behind);
  }
  // What is started from now on fails, a while after it was queued.
  void fail() {
    const std::lock_guard lock(mutex_);
    fails_ = true;
  }
  // So many operations were started and had not ended, at most.
  int64_t most_open() {
    const std::lock_guard lock(mutex_);
    return most_open_;
  }
  // So many of these calls had to wait.
  int64_t waited_count() {
    const std::lock_guard lock(mutex_);
    return waited_count_;
  }

 private:
  struct Late {
    Operation operation;
    std::vector<Range> ranges;
    Clock::time_point due;
    bool is_written;
  };
  struct Expected {
    int32_t buffer;
    std::vector<Range> ranges;
    int64_t missing_bytes;
  };

  // Once: then it has to be written again. An all-gather follows its reduce-scatter, so it is not asked for.
  bool is_written(const Operation& operation, const std::vector<Range>& ranges) {
    if (operation.op == Op::kAllGather) return true;
    const auto block = std::ranges::find_if(
        expected_, [&](const Expected& each) { return each.buffer == operation.buffer && each.ranges == ranges; });
    return block != expected_.end() && std::exchange(block->missing_bytes, size_bytes(ranges)) == 0;
  }

  void began(int64_t ticket) noexcept override { sink_->began(ticket); }
  void queued(int64_t) noexcept override {}
  void complete(int64_t ticket, const char* error) noexcept override {
    {
      const std::lock_guard lock(mutex_);
      open_.erase(ticket);
    }
    changed_.notify_all();
    std::this_thread::sleep_for(delay_ / 2);
    sink_->complete(ticket, error);
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return ended_ || !waiting_.empty(); });
      if (ended_) return;
      Late late = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      std::this_thread::sleep_until(late.due);
      late.operation.ranges = late.ranges.data();
      if (!late.is_written) {
        complete(late.operation.ticket, "not all of the block's bytes have been written");
      } else {
        fails_ ? complete(late.operation.ticket, "the cable is gone") : inner_.start(late.operation);
      }
      lock.lock();
    }
  }

  const py::object owner_;
  Transport& inner_;
  const std::chrono::microseconds delay_;
  CompletionSink* sink_ = nullptr;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int64_t, Late> open_;  // by ticket
  std::deque<Late> waiting_;
  std::vector<Expected> expected_;
  ptrdiff_t most_open_ = 0;
  int64_t waited_count_ = 0;
  std::atomic<bool> fails_ = false;
  bool ended_ = false;

  std::thread thread_;
};

}  // namespace
}  // namespace gradcast

PYBIND11_MODULE(_late_device, module) {
  using gradcast::LateTransport;
  py::class_<LateTransport>(module, "Transport")
      .def(py::init<py::object, int64_t>(), py::arg("inner"), py::arg("delay_us"))
      .def_property_readonly(
          "capsule", [](const py::object& self) { return gradcast::make_capsule(self.cast<LateTransport&>(), self); })
      .def("expect", &LateTransport::expect)
      .def("on_written", &LateTransport::on_written)
      .def("fail", &LateTransport::fail)
      .def_property_readonly("most_open", &LateTransport::most_open)
      .def("order_behind", &LateTransport::order_behind, py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("waited_count", &LateTransport::waited_count);
}
