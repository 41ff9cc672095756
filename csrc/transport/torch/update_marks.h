// Marks by which a part of an optimizer's step is seen to do what only a whole step may do.
//
// Thread safety: any thread that holds the GIL.
#pragma once

#include <cstdint>
#include <optional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>

namespace gradcast {

// Another value after each draw from the host's default generator of random numbers.
std::tuple<uint64_t, uint32_t, uint32_t, bool> random_position();

// The number of operations that this rank has begun in the group. nullopt: a backend of it does not count them.
std::optional<uint64_t> operations_begun(c10d::ProcessGroup& group);

}  // namespace gradcast
