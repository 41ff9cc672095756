// What the engine itself costs: a network on which every operation ends at once.
//
// Thread safety: any thread.
#pragma once

namespace gradcast {

struct Overhead {
  double block_ns = 0;  // from one block to the next, the engine's thread alone
  double ready_ns = 0;  // of the caller, to say that a gradient exists
};

Overhead engine_overhead();

}  // namespace gradcast
