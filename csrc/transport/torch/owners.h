// Finds other owners of a tensor and other users of a gradient, from reference counts and hooks: nobody has to
// register.
//
// Thread safety: any thread that holds the GIL.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace gradcast {

// The positions of those tensors that somebody else holds: in Python (a variable, a list), in C++ (saved by autograd,
// DLPack, TorchScript), or by their memory (detach(), a view, NumPy). Not counted are the list itself,
// `python_references` more references in Python, autograd's node that accumulates the gradient, other tensors of the
// list in the same memory, and, if `are_gradients`, the one owner in C++ that each .grad has. nullopt: references in
// Python do not count.
std::vector<int64_t> held_elsewhere(const pybind11::list& tensors, std::optional<int64_t> python_references,
                                    bool are_gradients);

// How many hooks run after the accumulation of each parameter's gradient. Only C++ and Node.register_hook() install
// such hooks: DistributedDataParallel's reducer, and whatever else reduces gradients.
std::vector<int64_t> accumulation_hooks(const pybind11::list& parameters);

}  // namespace gradcast
