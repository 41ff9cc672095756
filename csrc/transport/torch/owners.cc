#include "transport/torch/owners.h"

#include <c10/core/CPUAllocator.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_map>

namespace py = pybind11;

namespace gradcast {

namespace {

const at::Tensor& tensor_at(const py::list& tensors, size_t position) {
  PyObject* object = PyList_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(position));
  if (!THPVariable_Check(object)) throw py::type_error("a list of tensors is expected");
  return THPVariable_Unpack(object);
}

// References in Python, without the one by which a tensor keeps its Python object while C++ owns it, too.
int64_t python_references(const py::list& tensors, size_t position, const at::Tensor& tensor) {
  return Py_REFCNT(PyList_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(position))) -
         (tensor.use_count() > 1 ? 1 : 0);
}

// Whether nobody but its entry refers to a value of an optimizer's state, or could notice that it changes.
bool is_own_value(PyObject* value) {
  if (value == Py_None || PyFloat_CheckExact(value) || PyLong_CheckExact(value) || PyBool_Check(value)) return true;
  if (!THPVariable_Check(value) || Py_REFCNT(value) != 1 || THPVariable_Unpack(value).use_count() != 1) return false;
  if (THPVariable_CheckExact(value)) return true;
  const py::object local = py::getattr(value, "_local_tensor", py::none());  // a DTensor's part, and ours
  return THPVariable_CheckExact(local.ptr()) && Py_REFCNT(local.ptr()) == 2 &&
         THPVariable_Unpack(local.ptr()).use_count() == 1;
}

bool is_own_entry(PyObject* entry) {
  if (!PyDict_CheckExact(entry) || Py_REFCNT(entry) != 1) return false;
  PyObject *key = nullptr, *value = nullptr;
  for (Py_ssize_t position = 0; PyDict_Next(entry, &position, &key, &value) != 0;)
    if (!is_own_value(value)) return false;
  return true;
}

// A storage that was asked for in Python keeps its Python object, which nobody need refer to.
size_t owners_of(const c10::Storage& storage) {
  const bool is_known_only = storage.unsafeGetStorageImpl()->pyobj_slot()->has_unique_reference();
  return storage.use_count() - (is_known_only ? 1 : 0);
}

}  // namespace

std::vector<int64_t> held_elsewhere(const py::list& tensors, std::optional<int64_t> python_references_known,
                                    bool are_gradients) {
  std::vector<int64_t> held;
  std::unordered_map<const c10::StorageImpl*, size_t> in_memory;
  const size_t count = tensors.size();
  const auto in_same_memory = [&](const at::Tensor& tensor) {
    if (in_memory.empty())
      for (size_t i = 0; i < count; ++i)
        ++in_memory[tensor_at(tensors, i).storage().unsafeGetStorageImpl()];
    return in_memory[tensor.storage().unsafeGetStorageImpl()];
  };
  for (size_t i = 0; i < count; ++i) {
    const at::Tensor& tensor = tensor_at(tensors, i);
    const bool is_accumulated = torch::autograd::impl::try_get_grad_accumulator(tensor) != nullptr;
    const size_t known = 1 + (are_gradients ? 1 : 0) + (is_accumulated ? 1 : 0);
    const bool by_python =
        python_references_known && python_references(tensors, i, tensor) > 1 + *python_references_known;
    const size_t owners = owners_of(tensor.storage());
    const bool by_memory = owners > 1 && owners > in_same_memory(tensor);
    if (by_python || by_memory || tensor.use_count() > known) held.push_back(static_cast<int64_t>(i));
  }
  return held;
}

bool any_view_held(const py::list& views, const py::list& parameters) {
  if (views.size() != parameters.size()) throw py::value_error("as many views as parameters are expected");
  for (size_t i = 0; i < views.size(); ++i) {
    const at::Tensor& view = tensor_at(views, i);
    if (tensor_at(parameters, i).grad().is_same(view)) continue;
    const bool is_accumulated = torch::autograd::impl::try_get_grad_accumulator(view) != nullptr;
    if (python_references(views, i, view) > 1 || view.use_count() > (is_accumulated ? 2 : 1)) return true;
    if (owners_of(view.storage()) > 1) return true;
  }
  return false;
}

std::vector<int64_t> foreign_memory(const py::list& tensors) {
  const c10::DeleterFnPtr own = c10::GetCPUAllocator()->raw_deleter();
  std::vector<int64_t> found;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const c10::Storage& storage = tensor_at(tensors, i).storage();
    if (storage.device_type() == c10::kCPU && storage.data_ptr().get_deleter() != own)
      found.push_back(static_cast<int64_t>(i));
  }
  return found;
}

std::optional<py::set> entries_held(const py::dict& attributes) {
  PyObject* state = PyDict_GetItemString(attributes.ptr(), "state");
  if (state == nullptr || !PyDict_Check(state)) return std::nullopt;
  const bool is_held = Py_REFCNT(state) > 1;
  py::set held;
  PyObject *parameter = nullptr, *entry = nullptr;
  for (Py_ssize_t position = 0; PyDict_Next(state, &position, &parameter, &entry) != 0;)
    if (is_held || !is_own_entry(entry)) held.add(py::reinterpret_steal<py::object>(PyLong_FromVoidPtr(parameter)));
  return held;
}

}  // namespace gradcast
