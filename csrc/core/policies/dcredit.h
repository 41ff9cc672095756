// dcredit: every gap between two gradients gets a credit of its own: the units that the link carries in it, start-up
// cost included in the budget.
//
// In the slot between two consecutive ready times the most urgent units of what is ready are sent, as many as are
// needed to fill what is left of the slot; after the last gradient everything that is left goes tensor by tensor, most
// urgent first. The closest published relative of prophet on all-reduce.
//
// Source: D-Credit (IEEE TNSE 2025); Get_Credit and D_Credit of the authors' code (ZJU-CNLAB/D-Credit).
//
// The rules of the code: a slot too short for the start-up cost still sends one unit; otherwise the number of units is
// rounded up, so a slot may be overrun by less than one unit, and the next slot is shorter by that.
//
// Choices: the units of one slot travel as one operation (per buffer), since the rule counts one start-up per slot; a
// cost that is piecewise is inverted as it is. The model has one operation at a time, whatever in_flight is. The size
// of a unit is ByteScheduler's partition, which the authors tune; the default 0 takes the best of the values listed in
// dcredit.cc.
//
// Thread safety: pure; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "cost/problem.h"

namespace gradcast {

struct DcreditOptions {
  int64_t unit_bytes = 0;  // 0: tuned
};

std::vector<Block> dcredit(const Problem& problem, const DcreditOptions& options);

}  // namespace gradcast
