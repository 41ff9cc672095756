// Refill: turn a list of openings on the link into a plan by always sending the most urgent bytes that are ready.
//
// For given starts and sizes of blocks "most urgent first" is the best content, whatever the windows are. What is left to
// search is then only when blocks start and how much they carry: a short list of numbers.
//
// Source: docs/internals/planner.md, "General windows". Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "cost/pieces.h"
#include "cost/problem.h"
#include "cost/virtual_link.h"
#include "planner/zigzag.h"

namespace gradcast {

// A block that starts at `start_ns` or when the link is free and something is ready, whichever comes last, and carries up to
// `size_bytes`.
struct Opening {
  double start_ns = 0;
  double size_bytes = 0;
  int32_t buffer = kMostUrgentBuffer;

  static constexpr int32_t kMostUrgentBuffer = -1;  // the buffer of the most urgent bytes that are ready
};

// The openings of a zigzag's slots, none larger than `size_bytes_max`, at most 200 for a slot: the rest is left over. Those of
// backward and the centre keep their place in time; the others follow one another.
std::vector<Opening> openings_of(const std::vector<Slot>& slots, double size_bytes_max);
// The openings that reproduce when and how much each block of a plan sends.
std::vector<Opening> openings_of(const Problem& problem, const std::vector<Block>& blocks);

// Fills openings and keeps its memory between calls. What the openings leave over travels at the end, in blocks of the size
// that costs least per byte.
class Refill {
 public:
  explicit Refill(const Problem& problem);

  // The iteration time under play.
  double iteration_ns(const std::vector<Opening>& openings);
  // When each block of the last run was launched.
  const std::vector<double>& launches_ns() const { return launches_ns_; }
  // The same plan, written out.
  std::vector<Block> blocks(const std::vector<Opening>& openings);

 private:
  double run(const std::vector<Opening>& openings, std::vector<Block>* blocks);
  void release_ready(double now_ns);
  bool nothing_available() const;
  int32_t most_urgent_buffer() const;
  void send(const Opening& opening, std::vector<Block>* blocks);
  bool adjoin(const Piece& piece, int32_t tensor, int64_t from_bytes) const;
  void finish(double finish_ns);

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
