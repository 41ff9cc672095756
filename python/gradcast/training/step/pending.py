"""Pending tensors: values that are not finished yet. Any use of one waits until they are.

A pending tensor keeps its identity and its memory. Only its Python class is replaced, by a subclass whose
``__torch_function__`` sees every operation that reads or writes the tensor, in C++ and Python alike, before it runs.
The operation asks the tensor's owner to finish it, which restores the class, and then runs as usual. So clipping,
``state_dict``, ``deepcopy``, evaluation and modules that read their weights in unusual ways all see finished values.
Queries that do not depend on the values (shape, ``.grad``, ...) do not wait.

Accesses for which PyTorch does not ask the class are not caught: a raw pointer taken before the tensor became pending,
to_dlpack() and TorchScript while it is pending. owners.h detects views and aliases that were taken before.

Thread safety: any thread; an owner serializes its own work.
"""

import contextlib
import dataclasses
import functools
import inspect
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from gradcast.training.compat import extension, function_transforms

# Attributes and methods of Tensor whose result is known while the values are not.
_ATTRIBUTES = (
    "shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad", "grad_fn", "ndim", "names", "itemsize",
    "nbytes", "is_cpu", "is_cuda", "is_meta", "is_mps", "is_mkldnn", "is_nested", "is_quantized", "is_sparse",
    "is_sparse_csr", "is_xla", "is_xpu", "output_nr", "retains_grad", "_backward_hooks", "_post_accumulate_grad_hooks",
)  # fmt: skip
_METHODS = (
    "size", "dim", "ndimension", "numel", "nelement", "stride", "element_size", "is_contiguous", "storage_offset",
    "is_floating_point", "is_complex", "is_same_size", "get_device", "register_hook",
    "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "__len__", "__hash__",
)  # fmt: skip
_FUNCTIONS = (torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size, torch.is_tensor)
_TORCH_C: Any = torch._C  # the stubs lack some of it
_GRADIENT = inspect.getattr_static(torch.Tensor, "grad").__get__
_ZERO_GRADS = frozenset(inspect.unwrap(it.zero_grad).__code__ for it in (torch.optim.Optimizer, torch.nn.Module))
_FRAMES_BETWEEN = 4  # of torch, between the caller and this module
_ZEROING = frozenset({torch.Tensor.zero_, torch._foreach_zero_})


def _without_values() -> frozenset[Any]:
    found: set[Any] = set(_FUNCTIONS)
    for name in _ATTRIBUTES:
        attribute = getattr(torch.Tensor, name, None)
        for accessor in ("__get__", "__set__"):
            if hasattr(attribute, accessor):
                found.add(getattr(attribute, accessor))
    found |= {getattr(torch.Tensor, name) for name in _METHODS if hasattr(torch.Tensor, name)}
    return frozenset(found)


_WITHOUT_VALUES = _without_values()


class Owner(Protocol):
    """The object that finishes pending tensors."""

    def resolve(self, tensors: list[torch.Tensor]) -> None:
        """Finishes these pending tensors and calls ``clear`` for them, or raises."""

    def zero_later(self, tensor: torch.Tensor) -> bool:
        """Returns whether the owner zeroes this pending tensor itself, once its values are no longer needed."""
        return False

    def gradient_read(self, tensor: torch.Tensor, *, zeroing: bool) -> None:
        """Notes that the program reads the ``.grad`` of this pending tensor. Finishes it if that is not known yet.
        ``zeroing``: zero_grad() only asks whether there is a gradient; it does not use the value."""
        return


# The classes that an owner's tensors have, by their own class. Only a class knows the owner, and it does not keep the
# owner alive: a module that is no longer trained can be freed with everything that belongs to it.
_classes: "weakref.WeakKeyDictionary[Owner, dict[type, type]]" = weakref.WeakKeyDictionary()
# Ids of pending parameters of which it is not known yet whether they have a gradient.
_without_known_gradient: set[int] = set()


class _Pending:
    """Mixed into a tensor's own class; see the module docstring."""

    grad: Any

    @classmethod
    @torch.compiler.disable  # compiled code calls Python for this operation
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in _ZEROING:
            return _zero(args[0])
        if function == _GRADIENT:
            _read_gradient(args[0])
        elif function not in _WITHOUT_VALUES:
            resolve((args, kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    # These two look at type(self) before they read a value.
    def __deepcopy__(self, memo: dict) -> Any:
        resolve(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        resolve(self)
        return self.__reduce_ex__(protocol)


def _pending_class(owner: Owner, own_class: type) -> type:
    classes = _classes.setdefault(owner, {})
    if own_class not in classes:
        members = {"__module__": own_class.__module__, "_gradcast_class": own_class}
        members["_gradcast_owner"] = weakref.ref(owner)
        if hasattr(own_class, "_local_tensor"):
            members["_local_tensor"] = _part_of(own_class)
        classes[own_class] = type(own_class.__name__, (_Pending, own_class), members)
    return classes[own_class]


def _part_of(own_class: Any) -> property:
    """The attribute of a DTensor by which to_local() and full_tensor() read it without an operation."""
    own = own_class._local_tensor

    def read(tensor: torch.Tensor) -> torch.Tensor:
        resolve(tensor)
        return own.__get__(tensor)

    def write(tensor: torch.Tensor, part: torch.Tensor) -> None:
        resolve(tensor)
        own.__set__(tensor, part)

    return property(read, write)


@functools.cache
def _native() -> Any:
    """C++, since there are hundreds of tensors in each step."""
    native = extension.load()
    # Reading or setting .grad asks __torch_function__ only as long as something is to be done about that.
    _Pending.grad = native.gradient_attribute(_Pending, _without_known_gradient)
    function_transforms.before_wrapping(resolve)
    return native


def mark(tensors: Sequence[torch.Tensor | None], owner: Owner, *, gradients_known: bool = True) -> int:
    """Makes any use of these tensors wait for ``owner``, except of those that are pending already. Returns how many
    were not. ``gradients_known``: otherwise reads of their ``.grad`` are reported to ``owner``."""
    if not gradients_known:
        ask_for_gradients(tensors)
    return _native().mark_pending(_Pending, tensors, functools.partial(_pending_class, owner))


def ask_for_gradients(tensors: Sequence[torch.Tensor | None]) -> None:
    """Makes reads of the ``.grad`` of these pending tensors call their owner until ``clear``."""
    _without_known_gradient.update(map(id, tensors))


def clear(tensors: Sequence[torch.Tensor | None]) -> None:
    """Marks tensors as finished. Those that are not pending stay as they are."""
    if _without_known_gradient:
        _without_known_gradient.difference_update(map(id, tensors))
    _native().clear_pending(_Pending, tensors)


def is_pending(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, _Pending)


def resolve(values: Any) -> None:
    """Finishes every pending tensor in ``values``, at any depth."""
    by_owner: dict[int, tuple[Owner, list[torch.Tensor]]] = {}
    for tensor in tensors_in(values):
        owner = _owner_of(tensor)
        if owner is not None:
            by_owner.setdefault(id(owner), (owner, []))[1].append(tensor)
    if not by_owner:
        return
    with not_traced():
        for owner, tensors in by_owner.values():
            owner.resolve(tensors)


def not_traced() -> contextlib.AbstractContextManager[None]:
    """Context that keeps the work of finishing a tensor out of the record of torch.jit.trace()."""
    state = _TORCH_C._get_tracing_state()
    return contextlib.nullcontext() if state is None else _tracing_stopped(state)


@contextlib.contextmanager
def _tracing_stopped(state: Any) -> Iterator[None]:
    _TORCH_C._set_tracing_state(None)
    try:
        yield
    finally:
        _TORCH_C._set_tracing_state(state)


def _zero(tensors: Any) -> Any:
    """Zeroes without waiting, for zero_grad(set_to_none=False): an owner that still needs the values does it later."""
    for tensor in [tensors] if isinstance(tensors, torch.Tensor) else tensors:
        owner = _owner_of(tensor)
        if owner is None or not owner.zero_later(tensor):
            resolve(tensor)
            with torch._C.DisableTorchFunctionSubclass():
                tensor.zero_()
    return tensors if isinstance(tensors, torch.Tensor) else None


def _read_gradient(tensor: torch.Tensor) -> None:
    owner = _owner_of(tensor)
    if owner is not None:
        owner.gradient_read(tensor, zeroing=_is_zeroing())


def _is_zeroing() -> bool:
    frame = sys._getframe(2)
    for _ in range(_FRAMES_BETWEEN):
        if frame is None or frame.f_code in _ZERO_GRADS:
            return frame is not None
        frame = frame.f_back
    return False


def _owner_of(tensor: torch.Tensor) -> Owner | None:
    """The owner, or None if another thread has just finished the tensor or if its owner no longer exists."""
    known = getattr(type(tensor), "_gradcast_owner", None) if isinstance(tensor, _Pending) else None
    if known is None:
        return None
    owner = known()
    if owner is None:
        clear([tensor])
    return owner


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors at any depth of lists, tuples, sets, dicts and dataclasses."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, torch.Tensor):
            yield each
        elif isinstance(each, dict):
            left += reversed(list(each.values()))
        elif isinstance(each, (list, tuple, set, frozenset)):
            left += reversed(list(each))
        elif dataclasses.is_dataclass(each) and not isinstance(each, type):
            left += reversed([getattr(each, field.name, None) for field in dataclasses.fields(each)])
