// Finds other owners of a tensor, from reference counts: nobody has to register.
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

}  // namespace gradcast
