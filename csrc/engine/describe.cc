#include <algorithm>
#include <cstdio>
#include <vector>

#include "engine/loop.h"

namespace gradcast {
namespace {

std::string seconds_text(int64_t duration_ns) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(duration_ns) * 1e-9);
  return text;
}

// "layer4.conv2.weight … fc.bias": the first and the last tensor by offset.
std::string tensors_text(const FollowedPlan& plan, int32_t block) {
  const std::vector<int32_t>& tensors = plan.block_tensors[block];
  const std::string& first = plan.tensor_names[tensors.front()];
  return tensors.size() == 1 ? first : first + " … " + plan.tensor_names[tensors.back()];
}

std::string missing_text(const FollowedPlan& plan, int32_t block, const IterationRecord& record) {
  std::string first;
  int64_t missing_count = 0;
  for (const int32_t tensor : plan.block_tensors[block]) {
    if (record.ready_ns[tensor] == 0) {
      first = missing_count == 0 ? plan.tensor_names[tensor] : first;
      ++missing_count;
    }
  }
  if (missing_count == 0) {
    return " is about to start";
  }
  const std::string others = missing_count == 1 ? "" : " and " + std::to_string(missing_count - 1) + " more";
  return (missing_count == 1 ? " waits for the gradient of " : " waits for the gradients of ") + first + others;
}

}  // namespace

std::string block_text(const FollowedPlan& plan, int32_t block) {
  const Op op = plan.plan.blocks[block].op;
  const char* half = op == Op::kAllReduce ? "" : op == Op::kReduceScatter ? "reduce-scatter of " : "all-gather of ";
  return "block " + std::to_string(block + 1) + " of " + std::to_string(plan.block_count()) + " (" + half +
         tensors_text(plan, block) + ", " + bytes_text(plan.plan.blocks[block].size_bytes()) + ")";
}

std::string waiting_text(const FollowedPlan& plan, const IterationRecord& record, int64_t now_ns) {
  // Blocks start in order, so the first that has not finished is the oldest on the network or the next to start.
  const auto first = std::ranges::find(record.blocks, 0, &BlockRecord::finish_ns);
  if (first == record.blocks.end()) {
    return "";
  }
  const auto block = static_cast<int32_t>(first - record.blocks.begin());
  if (first->launch_ns != 0) {
    return block_text(plan, block) + " is on the network since " + seconds_text(now_ns - first->launch_ns);
  }
  return block_text(plan, block) + missing_text(plan, block, record);
}

}  // namespace gradcast
