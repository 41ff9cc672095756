// The parts of the Python module `_core`, one function per topic, and what they share.
//
// The module is thin: it converts, and adds no logic. Every object is a value that does not change after construction,
// as a plan must not, and lists come out as tuples: `profile.tensors[0].bytes = 5` fails instead of changing a copy.
// Whatever may take longer than a moment releases the GIL.
//
// Thread safety: pure; any thread.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

namespace gradcast {

void bind_link(pybind11::module_& module);
void bind_link_fit(pybind11::module_& module);
void bind_networks(pybind11::module_& module);
void bind_profile(pybind11::module_& module);
void bind_plan(pybind11::module_& module);
void bind_play(pybind11::module_& module);
void bind_bound(pybind11::module_& module);
void bind_policy(pybind11::module_& module);
void bind_engine(pybind11::module_& module);
void bind_monitor(pybind11::module_& module);

using ReleaseGil = pybind11::call_guard<pybind11::gil_scoped_release>;

// A read-only attribute that shows a vector as a tuple.
template <typename Class, typename Owner, typename Element>
void def_tuple(Class& bound_class, const char* name, std::vector<Element> Owner::*member) {
  bound_class.def_property_readonly(
      name, [member](const Owner& owner) { return pybind11::tuple(pybind11::cast(owner.*member)); });
}

// How Python shows the object: the class and the named attributes, "LinkPiece(alpha_ns=5.0, …)". Of a long list it
// shows the length: a plan with all its blocks would fill the screen.
template <typename Class>
void def_repr(Class& bound_class, const std::vector<std::string>& attributes) {
  bound_class.def("__repr__", [attributes](const pybind11::object& self) {
    std::string text;
    for (const std::string& attribute : attributes) {
      const pybind11::object value = self.attr(attribute.c_str());
      const size_t size = pybind11::isinstance<pybind11::tuple>(value) ? pybind11::len(value) : 0;
      text += (text.empty() ? "" : ", ") + attribute + "=";
      text += size > 4 ? "<" + std::to_string(size) + " of them>" : std::string(pybind11::repr(value));
    }
    return pybind11::type::of(self).attr("__name__").template cast<std::string>() + "(" + text + ")";
  });
}

}  // namespace gradcast
