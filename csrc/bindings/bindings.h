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
#include <type_traits>
#include <vector>

namespace gradcast {

void bind_link(pybind11::module_& module);
void bind_profile(pybind11::module_& module);
void bind_plan(pybind11::module_& module);
void bind_engine(pybind11::module_& module);
void bind_monitor(pybind11::module_& module);

using ReleaseGil = pybind11::call_guard<pybind11::gil_scoped_release>;

// Read-only attributes, given as name, member, name, member, and so on; a vector becomes a tuple. Returns the names.
template <typename Class>
std::vector<std::string> def_fields(Class&) {
  return {};
}
template <typename Class, typename Owner, typename Value, typename... More>
std::vector<std::string> def_fields(Class& bound_class, const char* name, Value Owner::*member, More... more) {
  if constexpr (requires(Value value) { value.push_back(value.front()); } && !std::is_same_v<Value, std::string>) {
    bound_class.def_property_readonly(
        name, [member](const Owner& owner) { return pybind11::tuple(pybind11::cast(owner.*member)); });
  } else {
    bound_class.def_readonly(name, member);
  }
  std::vector<std::string> names = def_fields(bound_class, more...);
  names.insert(names.begin(), name);
  return names;
}

// The object's __repr__: the class and the named attributes, "LinkPiece(alpha_ns=5.0, …)". Of a long list it has the
// length: a plan with all its blocks would fill the screen.
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

// replace(field=value, …): a copy made by the constructor from these arguments and, for the others, the object's own
// attributes of the same names.
template <typename Class>
void def_replace(Class& bound_class, const std::vector<std::string>& arguments) {
  bound_class.def("replace", [arguments](const pybind11::object& self, const pybind11::kwargs& changes) {
    pybind11::dict values;
    for (const std::string& argument : arguments) {
      values[argument.c_str()] = self.attr(argument.c_str());
    }
    values.attr("update")(changes);
    return pybind11::type::of(self)(**values);
  });
}

// Unknown fields of a JSON object, as a dict for Python and in the core's form. `known`: the names of the others.
pybind11::dict extra_of(const std::string& extra_json);
std::string extra_json_from(const pybind11::dict& extra, const std::vector<std::string>& known);

// A class of such attributes alone, which Python also shows by them.
template <typename Record, typename... Fields>
pybind11::class_<Record> def_record(pybind11::module_& module, const char* name, Fields... fields) {
  pybind11::class_<Record> bound_class(module, name);
  def_repr(bound_class, def_fields(bound_class, fields...));
  return bound_class;
}

}  // namespace gradcast
