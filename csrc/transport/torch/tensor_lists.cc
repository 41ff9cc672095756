#include "transport/torch/tensor_lists.h"

#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <utility>

#include "transport/torch/without_torch_function.h"

namespace py = pybind11;

namespace gradcast {

namespace {

PyObject* at_position(const py::list& list, size_t position) {
  return PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(position));
}

const at::Tensor& tensor_of(PyObject* object) {
  if (!THPVariable_Check(object)) throw py::type_error("a list of tensors is expected");
  return THPVariable_Unpack(object);
}

bool is_of(PyObject* object, const py::object& type) {
  return PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(type.ptr())) != 0;
}

void set_class(PyObject* object, const py::handle& type) {
  static PyObject* const name = PyUnicode_InternFromString("__class__");
  if (PyObject_SetAttr(object, name, type.ptr()) != 0) throw py::error_already_set();
}

// Both live as long as the process: so do classes that the attribute may have been put into.
struct GradientAttribute {
  PyObject* torchs;     // torch.Tensor.grad
  PyObject* asked_for;  // a set
};

PyObject* get_gradient(PyObject* tensor, void* closure) {
  const auto& attribute = *static_cast<GradientAttribute*>(closure);
  const auto get = [&] {
    return Py_TYPE(attribute.torchs)
        ->tp_descr_get(attribute.torchs, tensor, reinterpret_cast<PyObject*>(Py_TYPE(tensor)));
  };
  if (PySet_GET_SIZE(attribute.asked_for) > 0) return get();
  const WithoutTorchFunction without;
  return get();
}

int set_gradient(PyObject* tensor, PyObject* value, void* closure) {
  const auto& attribute = *static_cast<GradientAttribute*>(closure);
  const WithoutTorchFunction without;
  return Py_TYPE(attribute.torchs)->tp_descr_set(attribute.torchs, tensor, value);
}

}  // namespace

int64_t mark_pending(const py::object& base, const py::list& tensors, const py::object& class_for) {
  int64_t count = 0;
  py::object last_class, pending_class;
  for (size_t i = 0; i < tensors.size(); ++i) {
    PyObject* tensor = at_position(tensors, i);
    if (tensor == Py_None || is_of(tensor, base)) continue;
    const auto own_class = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(Py_TYPE(tensor)));
    if (!own_class.is(last_class)) {
      last_class = own_class;
      pending_class = class_for(own_class);
    }
    set_class(tensor, pending_class);
    ++count;
  }
  return count;
}

void clear_pending(const py::object& base, const py::list& tensors) {
  py::object last_class, own_class;
  for (size_t i = 0; i < tensors.size(); ++i) {
    PyObject* tensor = at_position(tensors, i);
    if (!is_of(tensor, base)) continue;
    const auto pending_class = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(Py_TYPE(tensor)));
    if (!pending_class.is(last_class)) {
      last_class = pending_class;
      own_class = pending_class.attr("_gradcast_class");
    }
    set_class(tensor, own_class);
  }
}

py::object gradient_attribute(const py::object& base, py::set asked_for) {
  py::object torchs = py::module_::import("torch").attr("Tensor").attr("grad");
  static PyGetSetDef definition = {"grad", get_gradient, set_gradient, nullptr,
                                   new GradientAttribute{torchs.release().ptr(), asked_for.release().ptr()}};
  return py::reinterpret_steal<py::object>(PyDescr_NewGetSet(reinterpret_cast<PyTypeObject*>(base.ptr()), &definition));
}

py::list swap_gradients(const py::list& parameters, const py::list& gradients) {
  if (parameters.size() != gradients.size()) throw py::value_error("as many gradients as parameters are expected");
  py::list before(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    PyObject* given = at_position(gradients, i);
    at::Tensor gradient = given == Py_None ? at::Tensor() : tensor_of(given);
    at::Tensor& place = tensor_of(at_position(parameters, i)).mutable_grad();
    std::swap(gradient, place);
    PyObject* former = THPVariable_Wrap(std::move(gradient));  // None if there was none
    if (former == nullptr) throw py::error_already_set();
    PyList_SET_ITEM(before.ptr(), static_cast<Py_ssize_t>(i), former);
  }
  return before;
}

bool hold_gradients(const py::list& parameters, const py::list& gradients) {
  if (parameters.size() != gradients.size()) return false;
  for (size_t i = 0; i < parameters.size(); ++i) {
    PyObject* expected = at_position(gradients, i);
    const at::Tensor& gradient = tensor_of(at_position(parameters, i)).grad();
    const bool same = expected == Py_None ? !gradient.defined() : gradient.is_same(tensor_of(expected));
    if (!same) return false;
  }
  return true;
}

py::bytes kinds(const py::list& tensors) {
  std::string kinds;
  kinds.reserve((3 + sizeof(void*)) * tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensor_of(at_position(tensors, i));
    const at::Device device = tensor.device();
    kinds.push_back(static_cast<char>(tensor.scalar_type()));
    kinds.push_back(static_cast<char>(device.type()));
    kinds.push_back(static_cast<char>(device.index()));
    const at::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    kinds.append(reinterpret_cast<const char*>(&impl), sizeof(impl));
  }
  return kinds;
}

bool lie_at(const py::list& tensors, const py::buffer& addresses) {
  const py::buffer_info info = addresses.request();
  if (!info.item_type_is_equivalent_to<uint64_t>()) throw py::type_error("an array of 64-bit addresses is expected");
  if (info.size != static_cast<py::ssize_t>(tensors.size())) return false;
  const auto* expected = static_cast<const uint64_t*>(info.ptr);
  for (size_t i = 0; i < tensors.size(); ++i)
    if (reinterpret_cast<uint64_t>(tensor_of(at_position(tensors, i)).const_data_ptr()) != expected[i]) return false;
  return true;
}

bool contain(const py::list& containers, const py::list& expected) {
  size_t position = 0;
  const auto is_next = [&](const PyObject* found) {
    return position < expected.size() && at_position(expected, position++) == found;
  };
  for (size_t i = 0; i < containers.size(); ++i) {
    PyObject* container = at_position(containers, i);
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
