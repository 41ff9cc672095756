// Descriptions of blocks for people, in error messages and for iterations that stand still.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <string>

#include "engine/follower.h"
#include "gradcast/engine.h"

namespace gradcast {

// "block 3 of 7 (layer4.conv2.weight … fc.bias, 12.4 MB)", counted from 1; for halves of an all-reduce "block 3 of 7
// (all-gather of fc.weight, 2.0 MB)".
std::string block_text(const FollowedPlan& plan, int32_t block);

// What an open iteration waits for: its oldest block on the network, or else the missing gradients of its next block.
// Empty if all blocks have finished.
std::string waiting_text(const FollowedPlan& plan, const IterationRecord& record, int64_t now_ns);

}  // namespace gradcast
