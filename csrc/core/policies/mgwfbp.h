// mgwfbp: merged-gradient wait-free backpropagation: neighbours in ready order travel together where that saves time.
//
// Walking through the gradients in ready order, the group that is being formed takes the next gradient in when the
// link would still be busy with the group by then, and either the group could not have started by then (waiting is
// free), or it would have started less than one start-up cost earlier (waiting costs less than it saves).
//
// Source: Shi, Chu, Li, "MG-WFBP" (INFOCOM 2019; TPDS 2021), algorithm 1; _generate_groups_mgwfbp of the authors'
// code.
//
// Choices: a "layer" of the paper is one tensor, as in its code. A group may span buffers and is then one operation
// per buffer; its cost is the sum. Where the link is piecewise, the start-up cost is that of the group's size. The
// paper's model has one operation at a time, whatever in_flight is.
//
// Thread safety: pure; any thread.
#pragma once

#include <vector>

#include "cost/problem.h"

namespace gradcast {

struct MgwfbpOptions {};

std::vector<Block> mgwfbp(const Problem& problem, const MgwfbpOptions& options);

}  // namespace gradcast
