#include <algorithm>
#include <cmath>

#include "cost/pieces.h"
#include "planner/search.h"

namespace gradcast {
namespace {

// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a fixed sequence, so that a plan is a function of its profile.
class Sequence {
 public:
  uint64_t next() {
    uint64_t word = (state_ += 0x9e3779b97f4a7c15ULL);
    word = (word ^ (word >> 30)) * 0xbf58476d1ce4e5b9ULL;
    word = (word ^ (word >> 27)) * 0x94d049bb133111ebULL;
    return word ^ (word >> 31);
  }
  size_t below(size_t count) { return static_cast<size_t>(next() % count); }
  double share() { return static_cast<double>(next() >> 11) * 0x1p-53; }

 private:
  uint64_t state_ = 0;
};

class Changes {
 public:
  explicit Changes(const Problem& problem) : problem_(problem), ready_ns_(distinct(problem.ready_ns)) {}

  // One change at a random place. `launches_ns`: when the blocks of the unchanged send windows are launched.
  void apply(std::vector<SendWindow>& send_windows, const std::vector<double>& launches_ns) {
    const size_t k = sequence_.below(send_windows.size());
    const double launch_ns = k < launches_ns.size() ? launches_ns[k] : send_windows[k].start_ns;
    switch (sequence_.below(problem_.buffer_count() > 1 ? 8 : 6)) {
      case 0:
        return merge(send_windows, k);
      case 1:
        return split(send_windows, k);
      case 2:
        return shift(send_windows, k);
      case 3:
        send_windows[k].start_ns = nearby_ready_ns(launch_ns);
        return;
      case 4:
        return end_at_event(send_windows[k], launch_ns);
      case 5:
        return resize(send_windows[k]);
      case 6:
        send_windows[k].buffer = static_cast<int32_t>(sequence_.below(problem_.buffers.size() + 1)) - 1;
        return;
      default:
        std::swap(send_windows[k], send_windows[sequence_.below(send_windows.size())]);
        return;
    }
  }

 private:
  void merge(std::vector<SendWindow>& send_windows, size_t k) {
    if (k + 1 == send_windows.size()) {
      return;
    }
    send_windows[k].size_bytes += send_windows[k + 1].size_bytes;
    if (sequence_.below(2) == 0) {
      send_windows[k].start_ns = send_windows[k + 1].start_ns;
    }
    send_windows.erase(send_windows.begin() + static_cast<std::ptrdiff_t>(k) + 1);
  }

  void split(std::vector<SendWindow>& send_windows, size_t k) {
    SendWindow second = send_windows[k];
    const double share = sequence_.share();
    second.size_bytes *= 1 - share;
    send_windows[k].size_bytes *= share;
    second.start_ns = sequence_.below(2) == 0 ? 0 : nearby_ready_ns(second.start_ns);
    send_windows.insert(send_windows.begin() + static_cast<std::ptrdiff_t>(k) + 1, second);
  }

  // Moves the cut between two neighbours, by a little more often than by a lot.
  void shift(std::vector<SendWindow>& send_windows, size_t k) {
    if (k + 1 == send_windows.size()) {
      return;
    }
    SendWindow& from = send_windows[sequence_.below(2) == 0 ? k : k + 1];
    SendWindow& to = &from == &send_windows[k] ? send_windows[k + 1] : send_windows[k];
    const double share = sequence_.share();
    const double moved_bytes = from.size_bytes * share * share * share;
    from.size_bytes -= moved_bytes;
    to.size_bytes += moved_bytes;
  }

  double nearby_ready_ns(double time_ns) {
    constexpr int64_t kReach = 4;
    const auto at = std::lower_bound(ready_ns_.begin(), ready_ns_.end(), time_ns) - ready_ns_.begin();
    const auto step = static_cast<int64_t>(sequence_.below(2 * kReach + 1)) - kReach;
    return ready_ns_[std::clamp<int64_t>(at + step, 0, static_cast<int64_t>(ready_ns_.size()) - 1)];
  }

  void end_at_event(SendWindow& send_window, double start_ns) {
    const double bytes = divisible_capacity_bytes(problem_.link.all_reduce, nearby_ready_ns(start_ns) - start_ns);
    if (bytes > 0) {
      send_window.size_bytes = std::min(bytes, static_cast<double>(problem_.total_bytes));
    }
  }

  void resize(SendWindow& send_window) {
    const auto& pieces = problem_.link.all_reduce.pieces;
    if (pieces.size() > 1 && sequence_.below(2) == 0) {
      send_window.size_bytes = static_cast<double>(pieces[sequence_.below(pieces.size() - 1)].up_to_bytes);
      return;
    }
    send_window.size_bytes = std::max(1.0, send_window.size_bytes * std::exp2(2 * sequence_.share() - 1));
  }

  const Problem& problem_;
  std::vector<double> ready_ns_;
  Sequence sequence_;
};

}  // namespace

std::vector<SendWindow> local_search(const Problem& problem, WindowFiller& filler, std::vector<SendWindow> send_windows,
                                     const LocalSearchOptions& options) {
  Changes changes(problem);
  double best_ns = filler.iteration_ns(send_windows);
  std::vector<double> launches_ns = filler.launches_ns();
  for (int64_t e = 0; e < options.evaluations && best_ns > options.target_ns && !send_windows.empty(); ++e) {
    std::vector<SendWindow> changed = send_windows;
    changes.apply(changed, launches_ns);
    const double changed_ns = filler.iteration_ns(changed);
    // Equal is taken too: plateaus are wide, and crossing them is half of the way.
    if (changed_ns <= best_ns) {
      best_ns = changed_ns;
      send_windows = std::move(changed);
      launches_ns = filler.launches_ns();
    }
  }
  return send_windows;
}

}  // namespace gradcast
