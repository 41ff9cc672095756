// Notes what a transport reports of its operations, and lets a test wait for it.
//
// Thread safety: any thread.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "gradcast/transport.h"

namespace gradcast {

class RecordingSink final : public CompletionSink {
 public:
  // Operation and error ("" for success), in the order in which they completed.
  using Completions = std::vector<std::pair<int64_t, std::string>>;

  void began(int64_t ticket) noexcept override { note(marks_, ticket, "began"); }
  void queued(int64_t ticket) noexcept override { note(marks_, ticket, "queued"); }
  void complete(int64_t ticket, const char* error) noexcept override {
    note(completions_, ticket, error == nullptr ? "" : error);
  }

  // Waits for so many completions; fewer, if they do not come.
  Completions await(size_t count) const {
    std::unique_lock lock(mutex_);
    wait(lock, [&] { return completions_.size() >= count; });
    return completions_;
  }
  // The operation's error, "" for success; "nothing" if it does not complete.
  std::string end_of(int64_t ticket) const {
    std::unique_lock lock(mutex_);
    std::string end = "nothing";
    wait(lock, [&] {
      for (const auto& [of, error] : completions_) {
        if (of == ticket) end = error;
      }
      return end != "nothing";
    });
    return end;
  }
  // Whether the operation was reported as `mark`, "began" or "queued": by now, or once it is.
  bool has(int64_t ticket, const std::string& mark) const {
    const std::lock_guard lock(mutex_);
    return is_marked(ticket, mark);
  }
  bool becomes(int64_t ticket, const std::string& mark) const {
    std::unique_lock lock(mutex_);
    return wait(lock, [&] { return is_marked(ticket, mark); });
  }

 private:
  void note(Completions& notes, int64_t ticket, const char* text) {
    const std::lock_guard lock(mutex_);
    notes.emplace_back(ticket, text);
    changed_.notify_all();
  }
  template <typename Condition>
  bool wait(std::unique_lock<std::mutex>& lock, const Condition& condition) const {
    return changed_.wait_for(lock, std::chrono::seconds(20), condition);
  }
  bool is_marked(int64_t ticket, const std::string& mark) const {
    return std::find(marks_.begin(), marks_.end(), std::pair(ticket, mark)) != marks_.end();
  }

  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  Completions completions_, marks_;
};

}  // namespace gradcast
