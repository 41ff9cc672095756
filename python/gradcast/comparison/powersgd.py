"""Traffic and predicted step of torch's PowerSGD hook for DistributedDataParallel. Pure.

The hook sends three all-reduces for each bucket, each after the one before: the gradients that it does not compress,
and the factors P and Q of the others. Over Gloo several buckets mix up their messages, so a prediction is for a single
bucket. It omits the time that the factors take to compute.

Source: torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py; Vogels et al., "PowerSGD" (NeurIPS 2019).
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from gradcast import _core
from gradcast.comparison.compare import compute_ns
from gradcast.errors import Error

# The rank that the doctor tries, as the paper does for language models.
USUAL_RANK = 4
# PowerSGDState's default.
MIN_COMPRESSION_RATE = 2.0


def with_shapes(profile: _core.Profile, shapes: Mapping[str, Sequence[int]]) -> _core.Profile:
    return profile.replace(
        tensors=[
            tensor.replace(extra={**tensor.extra, "shape": list(shapes[tensor.name])})
            if tensor.name in shapes
            else tensor
            for tensor in profile.tensors
        ]
    )


def has_shapes(profile: _core.Profile) -> bool:
    return any(tensor.extra.get("shape") is not None for tensor in profile.tensors)


def sent_elements(shape: Sequence[int], rank: int) -> tuple[int, int, int]:
    """Returns the elements of a gradient that are sent uncompressed, in P, and in Q."""
    count = math.prod(shape)
    if not shape or count == 0:
        return count, 0, 0
    rows, columns = shape[0], count // shape[0]
    rank = min(rows, columns, rank)
    if (rows + columns) * rank * MIN_COMPRESSION_RATE < count:
        return 0, rows * rank, columns * rank
    return count, 0, 0


def sent_bytes(profile: _core.Profile, rank: int) -> list[int]:
    """The sizes of the all-reduces in order, three for each data type, at least one element. Raises Error."""
    return [elements * element_bytes for element_bytes, each in _sent(profile, rank) for elements in each]


def step_ns(profile: _core.Profile, link: _core.LinkModel, rank: int) -> float:
    """Predicts a step: all gradients in one bucket, sent after backward. Raises Error as sent_bytes() does."""
    return compute_ns(profile) + sum(link.all_reduce.cost_ns(size) for size in sent_bytes(profile, rank))


def _shape(tensor: _core.Tensor, element_bytes: int) -> list[int]:
    """The shape of a gradient; without one it counts as flat."""
    shape = tensor.extra.get("shape")
    return [tensor.bytes // element_bytes] if shape is None else [int(size) for size in shape]


def _sent(profile: _core.Profile, rank: int) -> Iterator[tuple[int, list[int]]]:
    if not has_shapes(profile):
        raise Error(
            f"the profile {profile.name} does not hold the shapes of parameters, on which PowerSGD depends; "
            "measure it again, or omit --powersgd"
        )
    by_buffer: dict[int, list[_core.Tensor]] = {}
    for tensor in profile.tensors:
        if tensor.name.startswith("gradcast."):  # sent with the gradients, by gradcast alone
            continue
        by_buffer.setdefault(tensor.buffer, []).append(tensor)
    for tensors in by_buffer.values():
        # Gradients that were measured with 8-bit numbers are counted in groups of fp32.
        element_bytes = tensors[0].element_bytes if tensors[0].element_bytes <= 8 else 4
        shapes = [_shape(tensor, element_bytes) for tensor in tensors]
        sums = [sum(each) for each in zip(*(sent_elements(shape, rank) for shape in shapes), strict=True)]
        yield element_bytes, [max(1, elements) for elements in sums]
