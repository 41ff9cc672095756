#include "planner/window_filler.h"

#include <algorithm>
#include <functional>
#include <limits>

namespace gradcast {
namespace {

// Cutting into more blocks than this is for costs that no network has, and would make every change of a search slow.
constexpr int kTilesMax = 200;

// The size of block with the lowest cost per byte: one of the breakpoints, or as large as possible.
double cheapest_size_bytes(const Problem& problem) {
  const OpCost& cost = problem.link.all_reduce;
  const auto per_byte_ns = [&](int64_t bytes) { return cost.cost_ns(bytes) / static_cast<double>(bytes); };
  double best_bytes = std::numeric_limits<double>::infinity();
  double best_ns = per_byte_ns(problem.total_bytes);
  for (const LinkPiece& piece : cost.pieces) {
    const double tiles = static_cast<double>(problem.total_bytes) / static_cast<double>(piece.up_to_bytes);
    if (tiles > 1 && tiles <= kTilesMax && per_byte_ns(piece.up_to_bytes) < best_ns) {
      best_bytes = static_cast<double>(piece.up_to_bytes);
      best_ns = per_byte_ns(piece.up_to_bytes);
    }
  }
  return best_bytes;
}

}  // namespace

std::vector<SendWindow> send_windows_of(const std::vector<TimeSlot>& slots, double size_bytes_max) {
  std::vector<SendWindow> send_windows;
  for (const TimeSlot& slot : slots) {
    double start_ns = slot.side == Side::kForward ? 0 : slot.start_ns;
    double left_bytes = slot.hi_bytes - slot.lo_bytes;
    for (int tile = 0; left_bytes > 0 && tile < kTilesMax; ++tile) {
      send_windows.push_back({start_ns, std::min(left_bytes, size_bytes_max)});
      left_bytes -= size_bytes_max;
      start_ns = 0;
    }
  }
  return send_windows;
}

std::vector<SendWindow> send_windows_of(const Problem& problem, const std::vector<Block>& blocks) {
  std::vector<SendWindow> send_windows;
  for (const Block& block : blocks) {
    send_windows.push_back({block_ready_ns(problem, block), static_cast<double>(block.size_bytes()), block.buffer});
  }
  return send_windows;
}

WindowFiller::WindowFiller(const Problem& problem)
    : problem_(problem),
      cheapest_bytes_(cheapest_size_bytes(problem)),
      by_ready_(by_ready(problem)),
      available_(problem.buffers.size()),
      link_(problem) {}

double WindowFiller::iteration_ns(const std::vector<SendWindow>& send_windows) {
  return run(send_windows, nullptr);
}

std::vector<Block> WindowFiller::blocks(const std::vector<SendWindow>& send_windows) {
  std::vector<Block> blocks;
  run(send_windows, &blocks);
  return blocks;
}

double WindowFiller::run(const std::vector<SendWindow>& send_windows, std::vector<Block>* blocks) {
  left_bytes_ = problem_.bytes;
  next_ready_ = 0;
  link_ = VirtualLink(problem_);
  launches_ns_.clear();
  iteration_ns_ = problem_.backward_ns + problem_.forward_ns;
  for (auto& heap : available_) {
    heap.clear();
  }
  for (const SendWindow& send_window : send_windows) {
    double now_ns = std::max(link_.free_ns(), send_window.start_ns);
    release_ready(now_ns);
    if (nothing_available()) {
      if (next_ready_ == by_ready_.size()) {
        break;
      }
      now_ns = problem_.ready_ns[by_ready_[next_ready_]];
      release_ready(now_ns);
    }
    send(send_window, blocks);
  }
  release_ready(std::numeric_limits<double>::infinity());
  while (!nothing_available()) {
    send({0, cheapest_bytes_, most_urgent_buffer()}, blocks);
  }
  return iteration_ns_;
}

void WindowFiller::release_ready(double now_ns) {
  for (; next_ready_ < by_ready_.size() && problem_.ready_ns[by_ready_[next_ready_]] <= now_ns; ++next_ready_) {
    const int32_t tensor = by_ready_[next_ready_];
    auto& heap = available_[problem_.buffer[tensor]];
    heap.push_back(tensor);
    std::push_heap(heap.begin(), heap.end(), std::greater<>());
  }
}

bool WindowFiller::nothing_available() const {
  return std::all_of(available_.begin(), available_.end(), [](const auto& heap) { return heap.empty(); });
}

int32_t WindowFiller::most_urgent_buffer() const {
  int32_t best = 0;
  for (size_t buffer = 1; buffer < available_.size(); ++buffer) {
    const auto& heap = available_[buffer];
    if (!heap.empty() && (available_[best].empty() || heap[0] < available_[best][0])) {
      best = static_cast<int32_t>(buffer);
    }
  }
  return best;
}

void WindowFiller::send(const SendWindow& send_window, std::vector<Block>* blocks) {
  const bool chosen = send_window.buffer != SendWindow::kMostUrgentBuffer && !available_[send_window.buffer].empty();
  const int32_t buffer = chosen ? send_window.buffer : most_urgent_buffer();
  const auto element_bytes = static_cast<double>(problem_.buffers[buffer].element_bytes);
  auto& heap = available_[buffer];
  double room_bytes = std::max(send_window.size_bytes, element_bytes);
  double ready_ns = 0;
  int64_t size_bytes = 0;
  int64_t end_bytes = 0;  // of the last piece, in its buffer
  bool packed = false;
  pieces_.clear();
  while (!heap.empty() && room_bytes >= element_bytes) {
    const int32_t tensor = heap[0];
    int64_t take_bytes = left_bytes_[tensor];
    if (static_cast<double>(take_bytes) > room_bytes) {
      take_bytes = static_cast<int64_t>(room_bytes / element_bytes) * problem_.buffers[buffer].element_bytes;
    }
    // The rest of a tensor is always its tail: pieces are taken from the front.
    const int64_t from_bytes = problem_.bytes[tensor] - left_bytes_[tensor];
    packed = packed || (!pieces_.empty() && end_bytes != problem_.offset_bytes[tensor] + from_bytes);
    end_bytes = problem_.offset_bytes[tensor] + from_bytes + take_bytes;
    pieces_.push_back({tensor, from_bytes, from_bytes + take_bytes});
    ready_ns = std::max(ready_ns, problem_.ready_ns[tensor]);
    size_bytes += take_bytes;
    room_bytes -= static_cast<double>(take_bytes);
    left_bytes_[tensor] -= take_bytes;
    if (left_bytes_[tensor] > 0) {
      break;
    }
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    heap.pop_back();
  }
  // Like play: the block starts when its content is ready, which may be before the send_window that it was chosen for.
  const double finish_ns = link_.launch(ready_ns, size_bytes, Op::kAllReduce, packed);
  launches_ns_.push_back(link_.launch_ns());
  for (const Piece& piece : pieces_) {
    if (left_bytes_[piece.tensor] == 0) {
      iteration_ns_ = std::max(iteration_ns_, finish_ns + problem_.forward_ns - problem_.need_ns[piece.tensor]);
    }
  }
  if (blocks != nullptr) {
    blocks->push_back(joint_blocks(problem_, pieces_, "the most urgent bytes that are ready").front());
  }
}

}  // namespace gradcast
