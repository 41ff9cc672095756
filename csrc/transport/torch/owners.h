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

// True if somebody else holds one of these views that is not the .grad of its parameter: in Python beyond the list, in
// C++, or its memory, which no two views share.
bool any_view_held(const pybind11::list& views, const pybind11::list& parameters);

// Positions of tensors in host memory that torch has not allocated in its usual way: shared between processes, mapped
// from a file, or another library's.
std::vector<int64_t> foreign_memory(const pybind11::list& tensors);

// Ids of the keys of an optimizer's state whose entries somebody may read without the optimizer: somebody refers to the
// state, to the entry, or to a tensor in it, or holds such a tensor in C++, or there is something else in the entry
// than tensors and numbers. `attributes`: those of the optimizer. nullopt: the state is not among them.
std::optional<pybind11::set> entries_held(const pybind11::dict& attributes);

}  // namespace gradcast
