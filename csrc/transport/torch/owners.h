// Who else holds a tensor or uses a gradient as it is made: read from reference counts and hooks, so that nobody has to register.
//
// Thread safety: any thread that holds the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace gradcast {

// The positions of those tensors that somebody else holds: in Python (a variable, a list), in C++ (what autograd has saved,
// DLPack, TorchScript), or by their memory (detach(), a view, NumPy). Known, and not counted, are: the list itself and
// `python_references` more, autograd's node that accumulates the gradient, other tensors of the list in the same memory, and
// one owner in C++ where `are_gradients` says that each is some parameter's .grad. nullopt: references in Python do not count.
std::vector<int64_t> held_elsewhere(const pybind11::list& tensors, std::optional<int64_t> python_references,
                                    bool are_gradients);

// How many hooks there are behind the accumulation of each parameter's gradient, which only C++ and Node.register_hook() put
// there: those of DistributedDataParallel's reducer, and of whatever else reduces gradients.
std::vector<int64_t> accumulation_hooks(const pybind11::list& parameters);

}  // namespace gradcast
