#include "transport/torch/fields.h"

#include <structmember.h>

#include <algorithm>
#include <string>

namespace py = pybind11;

namespace gradcast {

namespace {

PyObject* item(const py::list& list, size_t position) {
  return PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(position));
}

// Where a class has put one of its __slots__.
class Slot {
 public:
  Slot(const py::list& objects, const py::str& name) {
    if (objects.empty()) return;
    type_ = Py_TYPE(item(objects, 0));
    const auto descriptor =
        py::reinterpret_steal<py::object>(PyObject_GetAttr(reinterpret_cast<PyObject*>(type_), name.ptr()));
    if (!descriptor) throw py::error_already_set();
    const auto* member = reinterpret_cast<PyMemberDescrObject*>(descriptor.ptr());
    if (Py_TYPE(descriptor.ptr()) != &PyMemberDescr_Type || member->d_member->type != T_OBJECT_EX)
      throw py::type_error(std::string(name) + " is not a slot of " + type_->tp_name);
    offset_ = member->d_member->offset;
  }

  // The object's reference, borrowed.
  PyObject*& of(PyObject* object) const {
    if (Py_TYPE(object) != type_) throw py::type_error(std::string("an object is not a ") + type_->tp_name);
    PyObject*& field = *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset_);
    if (field == nullptr) throw py::type_error(std::string("a field of a ") + type_->tp_name + " is not set");
    return field;
  }

  void set(PyObject* object, PyObject* value) const {
    PyObject*& field = of(object);
    PyObject* before = field;
    Py_INCREF(value);
    field = value;
    Py_DECREF(before);  // last, since it may run code
  }

 private:
  PyTypeObject* type_ = nullptr;
  Py_ssize_t offset_ = 0;
};

void require_as_many(const py::list& values, const py::list& objects) {
  if (values.size() < objects.size()) throw py::value_error("as many values as objects are expected");
}

}  // namespace

py::list fields(const py::list& objects, const py::str& name) {
  py::list found(objects.size());
  const Slot slot(objects, name);
  for (size_t i = 0; i < objects.size(); ++i) {
    PyObject* value = slot.of(item(objects, i));
    Py_INCREF(value);
    PyList_SET_ITEM(found.ptr(), static_cast<Py_ssize_t>(i), value);
  }
  return found;
}

py::list with_field(const py::list& objects, const py::str& name, const py::object& value, bool is) {
  py::list found;
  const Slot slot(objects, name);
  for (size_t i = 0; i < objects.size(); ++i)
    if ((slot.of(item(objects, i)) == value.ptr()) == is) found.append(py::handle(item(objects, i)));
  return found;
}

py::list with_other_field(const py::list& objects, const py::str& name, const py::list& values) {
  py::list found;
  require_as_many(values, objects);
  const Slot slot(objects, name);
  for (size_t i = 0; i < objects.size(); ++i)
    if (slot.of(item(objects, i)) != item(values, i)) found.append(py::handle(item(objects, i)));
  return found;
}

void set_fields(const py::list& objects, const py::str& name, const py::list& values) {
  require_as_many(values, objects);
  const Slot slot(objects, name);
  for (size_t i = 0; i < objects.size(); ++i)
    slot.set(item(objects, i), item(values, i));
}

py::object change_fields(const py::list& objects, const py::str& name, const py::tuple& before,
                         const py::object& value) {
  const Slot slot(objects, name);
  for (size_t i = 0; i < objects.size(); ++i) {
    PyObject* object = item(objects, i);
    const PyObject* field = slot.of(object);
    if (std::none_of(before.begin(), before.end(), [&](const py::handle& each) { return each.ptr() == field; }))
      return py::reinterpret_borrow<py::object>(object);
    slot.set(object, value.ptr());
  }
  return py::none();
}

bool contain(const py::list& containers, const py::list& expected) {
  size_t position = 0;
  const auto is_next = [&](const PyObject* found) {
    return position < expected.size() && item(expected, position++) == found;
  };
  for (size_t i = 0; i < containers.size(); ++i) {
    PyObject* container = item(containers, i);
    if (PyDict_Check(container)) {
      PyObject *key = nullptr, *value = nullptr;
      for (Py_ssize_t place = 0; PyDict_Next(container, &place, &key, &value) != 0;)
        if (!is_next(value)) return false;
    } else if (PyList_Check(container)) {
      for (Py_ssize_t place = 0; place < PyList_GET_SIZE(container); ++place)
        if (!is_next(PyList_GET_ITEM(container, place))) return false;
    } else {
      throw py::type_error("dicts and lists are expected");
    }
  }
  return position == expected.size();
}

}  // namespace gradcast
