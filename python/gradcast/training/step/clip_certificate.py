"""A certificate that clipping by the norm of all gradients changes nothing, before all of them have arrived.

torch's ``clip_grad_norm_(parameters, c)`` multiplies every gradient by min(1, c / (T + 1e-6)), where T is the p-norm of
the tensors' p-norms. Rank r sends x_r, and the sum s arrives. By the triangle inequality ||s|| <= sum_r ||x_r||. Ranks
add these norms up with the gradients, one number per tensor, so every rank can bound T: by the norms of the gradients
that have arrived, and by the sums for all others. If the bound is at most c - 1e-6, the factor is 1 in every bit.

The norms that torch computes are rounded, and the bound must hold for those. With u = 2^-24 (2^-53 for float64), a sum
of m positive terms, one after the other, lies within exp(±m u) of the exact one: each addition errs by at most u of its
result. A norm therefore lies within ``_growth``, and the bound of one tensor is inflated

* by the growth of each rank's own norm, which may be too small, and that of torch's norm of s, which may be too large;
* by (1 + eps)^W for the W additions that made s, and on a 16-bit wire by (1 + eps)^2 for its two roundings;
* by the same once more for the sum of the norms, which are sent in the first parameter's dtype;
* by a small absolute amount for what underflows.

docs/internals/clipping.md includes this text.

Thread safety: pure but for tensors on the device.
"""

import math
from collections.abc import Sequence

import torch

# Exact for these: the triangle inequality needs p >= 1, and the growth of other powers is not known.
CERTIFIED_NORM_TYPES = (1.0, 2.0, math.inf)
_TORCH_EPSILON = 1e-6  # in clip_grad_norm_
_SLACK = 1e-9  # for the float64 arithmetic of the bound itself
_SQUARE_UNDERFLOW = 2.0**-62  # squares of smaller float32 numbers may count as 0
_WIRE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class ClipCertificate:
    """The bounds for one set of parameters. All norms are 1-d float64 tensors on the parameters' device, by index."""

    def __init__(
        self, parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float, world_size: int, wire: str
    ) -> None:
        self._norm_type = norm_type
        device, sent_in = parameters[0].device, parameters[0].dtype
        pairs = [_inflation(parameter, norm_type, world_size, wire, sent_in) for parameter in parameters]
        self._factors, self._offsets = torch.tensor(pairs, dtype=torch.float64, device=device).unbind(1)
        types = [torch.finfo(dtype) for dtype in {parameter.dtype for parameter in parameters}]
        self._eps = eps = max(info.eps for info in types)
        # A norm beyond the range of its type is inf.
        self._limit = min([max_norm - 2 * _TORCH_EPSILON, *(info.max / 2 for info in types)])
        adds = _longest_sum(len(parameters), device, is_vectorized=False)
        self._total_growth = _growth(adds, norm_type, torch.float32) * (1 + 8 * eps) + _SLACK

    def bounds(self, sums: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        """Upper bounds of the norms that torch computes for the gradients that arrive, which are multiplied by
        ``factor``. ``sums``: of the ranks' own norms."""
        bounds = sums.double() * self._factors + self._offsets
        # One more rounding of each element, and one more underflow.
        return bounds if factor == 1.0 else bounds * (factor * (1 + self._eps)) + self._offsets

    def bound_of(self, index: int, norm: torch.Tensor) -> torch.Tensor:
        """An upper bound of a norm that torch computes for parameter ``index``, from another one of the same tensor."""
        return norm.to(self._factors) * self._factors[index] + self._offsets[index]

    def total(self, bounds: torch.Tensor) -> torch.Tensor:
        """An upper bound of torch's norm of all gradients: one element."""
        return torch.linalg.vector_norm(bounds, self._norm_type) * self._total_growth

    def hold(self, bounds: torch.Tensor, others: torch.Tensor | float = 0.0) -> torch.Tensor:
        """One element: True if the factor is certainly 1. False if a bound is NaN. ``others``: the sum of ``power`` of
        the other shards."""
        own = self.power(bounds)
        return self.holds_power(own.clamp(min=others) if self._norm_type == math.inf else own + others)

    def power(self, bounds: torch.Tensor, shards: int = 1) -> torch.Tensor:
        """The p-th power of ``total``, which the ranks of a module in ``shards`` parts add up: one element. For p = inf
        the norm, of which they take the maximum. torch rounds norms once more where it adds up theirs."""
        total = self.total(bounds) * (1.0 if shards == 1 else 1 + (shards + 8) * self._eps)
        return total if self._norm_type == math.inf else total**self._norm_type

    def holds_power(self, power: torch.Tensor) -> torch.Tensor:
        """One element: True if the factor of gradients with this power, or a smaller one, is certainly 1."""
        return (power if self._norm_type == math.inf else power ** (1 / self._norm_type)) <= self._limit


def _inflation(
    parameter: torch.Tensor, norm_type: float, world_size: int, wire: str, sent_in: torch.dtype
) -> tuple[float, float]:
    """The factor of the sum of the ranks' norms, and the number that is then added."""
    dtype, count = parameter.dtype, parameter.numel()
    # torch's kernel for the 2-norm of these types; all others add up element by element.
    is_vectorized = norm_type == 2 and dtype in (torch.float32, torch.bfloat16) and parameter.is_contiguous()
    adds = _longest_sum(count, parameter.device, is_vectorized=is_vectorized)
    norm = _growth(adds, norm_type, dtype) * (1 + torch.finfo(dtype).eps)
    sums, smallest = _of_sum(dtype, world_size, wire)
    sums_of_norms, smallest_norm = _of_sum(sent_in, world_size, wire)
    factor = norm**2 * sums * sums_of_norms
    # Of each element's sum, twice, and of each rank's norm.
    spread = count if norm_type == 1 else math.sqrt(count)
    offset = 4 * world_size * factor * (spread * (smallest + _SQUARE_UNDERFLOW) + smallest + smallest_norm)
    return factor * (1 + _SLACK), offset


def _of_sum(dtype: torch.dtype, world_size: int, wire: str) -> tuple[float, float]:
    """The largest ratio of the exact sum over the ranks to the arrived one, and the size that may count as 0 in it."""
    info = torch.finfo(dtype)
    ratio, smallest = (1 + info.eps) ** world_size, info.tiny * info.eps
    if dtype == torch.float32 and wire in _WIRE_DTYPES:
        info = torch.finfo(_WIRE_DTYPES[wire])
        ratio, smallest = ratio * (1 + info.eps) ** 2, max(smallest, info.tiny * info.eps)
    return ratio, smallest


def _growth(adds: float, norm_type: float, dtype: torch.dtype) -> float:
    """The largest ratio of a computed norm to the exact one, or of the exact one to the computed one."""
    if norm_type == math.inf:
        return 1.0
    unit = 2.0**-53 if dtype == torch.float64 else 2.0**-24  # 16-bit gradients are added up in float32
    exponent = (adds + 4) * unit / norm_type
    return math.exp(exponent) if exponent < 700 else math.inf


def _longest_sum(count: int, device: torch.device, *, is_vectorized: bool) -> float:
    """The largest number of ``count`` terms that torch's norms add up one after the other."""
    if device.type == "cuda":  # at most 512 per thread, then in a tree; sums of blocks once more (not run on a GPU)
        return 512 + count / 2**17
    if is_vectorized and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        return count / 8 + 64  # at least eight lanes, which are then added up, and a rest
    return count
