// The window filler turns a list of send windows into a plan: each block carries the most urgent bytes that are ready.
//
// Once the starts and sizes of blocks are fixed, "most urgent first" is the best content for any windows of the
// tensors. So a search only has to find starts and sizes, a short list of numbers.
//
// Source: docs/internals/planner.md, "General windows". Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "cost/pieces.h"
#include "cost/problem.h"
#include "planner/zigzag.h"

namespace gradcast {

// Room for one block. It starts at `start_ns`, but not before the link is free and some bytes are ready, and carries up
// to `size_bytes`.
struct SendWindow {
  double start_ns = 0;
  double size_bytes = 0;
  int32_t buffer = kMostUrgentBuffer;

  static constexpr int32_t kMostUrgentBuffer = -1;  // the buffer of the most urgent bytes that are ready
};

// The send windows of a zigzag's time slots. None is larger than `size_bytes_max`, and a slot becomes at most 200 of
// them; bytes beyond that are left over. Windows in backward and in the centre keep their start times; the others
// follow one another.
std::vector<SendWindow> send_windows_of(const std::vector<TimeSlot>& slots, double size_bytes_max);
// The send windows that reproduce when each block of a plan starts and how much it carries.
std::vector<SendWindow> send_windows_of(const Problem& problem, const std::vector<Block>& blocks);

// Fills send windows. Bytes that no window takes are sent at the end, in blocks of the size that costs least per byte.
// One filler serves many calls, so that a search allocates nothing.
class WindowFiller {
 public:
  explicit WindowFiller(const Problem& problem);

  // The iteration time under play.
  double iteration_ns(const std::vector<SendWindow>& send_windows);
  // When each block of the last run was launched.
  const std::vector<double>& launches_ns() const { return launches_ns_; }
  // The same plan, written out.
  std::vector<Block> blocks(const std::vector<SendWindow>& send_windows);

 private:
  double run(const std::vector<SendWindow>& send_windows, std::vector<Block>* blocks);
  void release_ready(double now_ns);
  bool nothing_available() const;
  int32_t most_urgent_buffer() const;
  void send(const SendWindow& send_window, std::vector<Block>* blocks);

  const Problem& problem_;
  double cheapest_bytes_;
  std::vector<int32_t> by_ready_;
  size_t next_ready_ = 0;
  std::vector<std::vector<int32_t>> available_;  // per buffer: a min-heap of tensors, by urgency
  std::vector<int64_t> left_bytes_;
  std::vector<Piece> pieces_;  // of the block at hand
  VirtualLink link_;
  std::vector<double> launches_ns_;
  double iteration_ns_ = 0;
};

}  // namespace gradcast
