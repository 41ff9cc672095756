#include "tests/support/scripted_world.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace gradcast {
namespace {

using Clock = std::chrono::steady_clock;

struct Script {
  std::chrono::nanoseconds delay{0};
  std::optional<std::string> fault;
};

}  // namespace

class ScriptedWorld::Scripts {
 public:
  std::mutex mutex;
  std::map<std::pair<int32_t, int64_t>, Script> of;  // by rank and operation
};

class ScriptedWorld::RankTransport final : public Transport {
 public:
  RankTransport(std::shared_ptr<Scripts> scripts, std::unique_ptr<Transport> inner)
      : scripts_(std::move(scripts)), inner_(std::move(inner)), thread_([this] { run(); }) {}
  ~RankTransport() override { stop(); }

  int32_t rank() const noexcept override { return inner_->rank(); }
  int32_t world_size() const noexcept override { return inner_->world_size(); }

  void open(CompletionSink* sink) noexcept override {
    sink_ = sink;
    inner_->open(sink);
  }

  void start(const Operation& operation) noexcept override {
    {
      // Under the lock, so that this operation cannot overtake one that the thread is handing on.
      const std::lock_guard lock(mutex_);
      Script script = next_script();
      if (aborted_ || (held_.empty() && script.delay.count() == 0 && !script.fault)) {
        inner_->start(operation);
        return;
      }
      held_.push_back({operation, Clock::now() + script.delay, std::move(script.fault)});
    }
    changed_.notify_one();
  }

  void abort(const char* reason) noexcept override {
    inner_->abort(reason);
    std::deque<Held> held;
    {
      const std::lock_guard lock(mutex_);
      aborted_ = true;
      held.swap(held_);
    }
    for (const Held& each : held) {
      if (!each.completed) {
        inner_->start(each.operation);  // completes at once, with the reason
      }
    }
  }

  void close() noexcept override {
    stop();
    inner_->close();
  }

 private:
  // An operation that has not reached the wire. One that has failed stays at the front and holds back those behind it.
  struct Held {
    Operation operation;
    Clock::time_point due;
    std::optional<std::string> fault;
    bool completed = false;
  };

  Script next_script() {
    const std::lock_guard lock(scripts_->mutex);
    const auto found = scripts_->of.find({rank(), started_count_++});
    return found == scripts_->of.end() ? Script{} : found->second;
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (!stopping_) {
      if (held_.empty() || held_.front().completed) {
        changed_.wait(lock);
      } else if (Clock::now() < held_.front().due) {
        const Clock::time_point due = held_.front().due;
        changed_.wait_until(lock, due);
      } else if (held_.front().fault) {
        held_.front().completed = true;
        sink_->complete(held_.front().operation.ticket, held_.front().fault->c_str());
      } else {
        inner_->start(held_.front().operation);
        held_.pop_front();
      }
    }
  }

  void stop() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_one();
    if (thread_.joinable()) {
      thread_.join();
    }
  }

  const std::shared_ptr<Scripts> scripts_;
  const std::unique_ptr<Transport> inner_;
  CompletionSink* sink_ = nullptr;

  // Guarded by mutex_.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Held> held_;
  int64_t started_count_ = 0;
  bool aborted_ = false;
  bool stopping_ = false;

  std::thread thread_;
};

ScriptedWorld::ScriptedWorld(int32_t world_size, const InprocCost& cost)
    : world_(world_size, cost), scripts_(std::make_shared<Scripts>()) {}

std::unique_ptr<Transport> ScriptedWorld::transport(int32_t rank, std::vector<HostBuffer> buffers) {
  return std::make_unique<RankTransport>(scripts_, world_.transport(rank, std::move(buffers)));
}

void ScriptedWorld::delay(int32_t rank, int64_t operation_index, int64_t delay_ns) {
  const std::lock_guard lock(scripts_->mutex);
  scripts_->of[{rank, operation_index}].delay = std::chrono::nanoseconds(delay_ns);
}

void ScriptedWorld::fail(int32_t rank, int64_t operation_index, const std::string& message) {
  const std::lock_guard lock(scripts_->mutex);
  scripts_->of[{rank, operation_index}].fault = message;
}

}  // namespace gradcast
