#include "gradcast/play.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "cost/problem.h"
#include "gradcast/error.h"

namespace gradcast {
namespace {

// When the reduce-scatters that already ran finished, by bytes: what an all-gather waits for. A byte is
// reduce-scattered at most once, so the ranges of a buffer are disjoint.
class Scattered {
 public:
  Scattered(const Problem& problem, std::span<const Block> blocks) : pieces_(problem.buffers.size()) {
    for (const Block& block : blocks) {
      if (block.op != Op::kReduceScatter) {
        continue;
      }
      for (const Range& range : block.ranges) {
        pieces_[block.buffer].push_back({range, 0});
      }
    }
    for (auto& pieces : pieces_) {
      std::ranges::sort(pieces, {}, [](const Piece& piece) { return piece.range.lo_bytes; });
    }
  }

  void finish(const Block& block, double finish_ns) {
    for (const Range& range : block.ranges) {
      first_touching(block.buffer, range)->finish_ns = finish_ns;
    }
  }

  double ready_ns(const Block& gather) {
    double ready_ns = 0;
    for (const Range& range : gather.ranges) {
      auto& pieces = pieces_[gather.buffer];
      for (auto at = first_touching(gather.buffer, range); at != pieces.end() && at->range.lo_bytes < range.hi_bytes;
           ++at) {
        ready_ns = std::max(ready_ns, at->finish_ns);
      }
    }
    return ready_ns;
  }

 private:
  struct Piece {
    Range range;
    double finish_ns;
  };

  std::vector<Piece>::iterator first_touching(int32_t buffer, Range range) {
    return std::partition_point(pieces_[buffer].begin(), pieces_[buffer].end(),
                                [&](const Piece& piece) { return piece.range.hi_bytes <= range.lo_bytes; });
  }

  std::vector<std::vector<Piece>> pieces_;
};

std::vector<BlockTimes> play_link(const Problem& problem, std::span<const Block> blocks) {
  std::vector<BlockTimes> times;
  times.reserve(blocks.size());
  Scattered scattered(problem, blocks);
  VirtualLink link(problem);
  for (const Block& block : blocks) {
    const double ready_ns = block.op == Op::kAllGather ? scattered.ready_ns(block) : block_ready_ns(problem, block);
    const double finish_ns = link.launch(ready_ns, block.size_bytes(), block.op, block.ranges.size() > 1);
    times.push_back({ready_ns, link.launch_ns(), finish_ns});
    if (block.op == Op::kReduceScatter) {
      scattered.finish(block, finish_ns);
    }
  }
  return times;
}

// Forward in overlap mode: the clock only ever stands still for the tensor that it has reached. problem.need_ns counts
// the updates of more urgent tensors as work, so the work between two reads is the difference of their needs. Tensors
// that are read together are updated together.
void play_forward(const Problem& problem, Timeline& timeline) {
  double clock_ns = problem.backward_ns;
  double need_ns = 0;
  double updated_ns = -1;       // when the last part ran
  double updated_need_ns = -1;  // for which read
  for (int32_t i = 0; i < problem.tensor_count(); ++i) {
    TensorTimes& tensor = timeline.tensors[i];
    tensor.read_ns = clock_ns + (problem.need_ns[i] - need_ns);
    tensor.wait_ns = std::max(0.0, tensor.arrival_ns - tensor.read_ns);
    clock_ns = std::max(tensor.read_ns, tensor.arrival_ns);
    need_ns = problem.need_ns[i];
    if (tensor.arrival_ns <= updated_ns) continue;
    updated_ns = clock_ns;
    if (need_ns == updated_need_ns) continue;
    updated_need_ns = need_ns;
    if (timeline.parts++ > 0) clock_ns += problem.part_ns;
  }
  timeline.iteration_ns = clock_ns + (problem.forward_ns - need_ns);
}

// The parts that a host makes which is the slower one: it begins its step with nothing left for the device to do, goes
// through both passes at its own pace, and waits for nothing.
int64_t parts_of_slow_host(const Problem& problem, const Timeline& timeline) {
  const double passes_ns = problem.backward_ns + problem.forward_ns;
  const double pace = passes_ns > 0 ? std::min(1.0, problem.host_step_ns / passes_ns) : 1.0;
  double clock_ns = pace * problem.backward_ns + problem.host_block_ns * static_cast<double>(timeline.blocks.size());
  double need_ns = 0;
  double updated_ns = -1;
  int64_t parts = 0;
  for (int32_t i = 0; i < problem.tensor_count(); ++i) {
    clock_ns += pace * (problem.need_ns[i] - std::exchange(need_ns, problem.need_ns[i]));
    if (timeline.tensors[i].arrival_ns <= updated_ns) continue;
    if (parts++ > 0) clock_ns += problem.host_part_ns;
    updated_ns = std::max(clock_ns, timeline.tensors[i].arrival_ns);
  }
  return parts;
}

// Forward in hook mode: it starts when everything has arrived and is updated, and runs through.
void play_hook_forward(const Problem& problem, Timeline& timeline) {
  double updated_ns = problem.backward_ns;
  for (const BlockTimes& block : timeline.blocks) {
    updated_ns = std::max(updated_ns, block.finish_ns);
  }
  timeline.parts = 1;
  timeline.iteration_ns = updated_ns + problem.forward_ns;
  for (const double update_ns : problem.update_ns) {
    updated_ns += update_ns;
  }
  timeline.forward_start_ns = updated_ns;
  for (TensorTimes& tensor : timeline.tensors) {
    tensor.read_ns = updated_ns;
  }
}

}  // namespace

Timeline play(const Problem& problem, std::span<const Block> blocks) {
  Timeline timeline;
  timeline.blocks = play_link(problem, blocks);
  timeline.tensors.resize(problem.tensor_count());
  for (size_t k = 0; k < blocks.size(); ++k) {
    if (blocks[k].op == Op::kReduceScatter) {
      continue;  // only whole sums count as arrival
    }
    for_each_tensor(problem, blocks[k], [&, finish_ns = timeline.blocks[k].finish_ns](int32_t tensor) {
      double& arrival_ns = timeline.tensors[tensor].arrival_ns;
      arrival_ns = std::max(arrival_ns, finish_ns);
    });
  }
  timeline.forward_start_ns = problem.backward_ns;
  if (problem.mode == Mode::kOverlap) {
    play_forward(problem, timeline);
  } else {
    play_hook_forward(problem, timeline);
  }
  timeline.exposed_ns = timeline.iteration_ns - problem.backward_ns - problem.forward_ns;
  const int64_t parts = problem.mode == Mode::kHook ? 1 : parts_of_slow_host(problem, timeline);
  timeline.host_ns = problem.host_ns(parts, std::ssize(blocks));
  timeline.iteration_ns = std::max(timeline.iteration_ns, timeline.host_ns);
  return timeline;
}

double iteration_ns(const Problem& problem, std::span<const Block> blocks) {
  return play(problem, blocks).iteration_ns;
}

Timeline play(const Profile& profile, const LinkModel& link, const Plan& plan) {
  Timeline timeline = play(make_problem(profile, link, plan.mode, plan.in_flight), plan.blocks);
  for (size_t i = 0; plan.mode == Mode::kHook && i < profile.tensors.size(); ++i) {
    timeline.tensors[i].read_ns += profile.tensors[i].need_ns;  // which a hook-mode problem does not know
  }
  return timeline;
}

}  // namespace gradcast
