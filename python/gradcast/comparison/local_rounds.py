"""Predicted step with local steps (``Options(local=...)``), which change the algorithm. Pure."""

import math

from gradcast import _core
from gradcast.comparison.compare import compute_ns
from gradcast.local_steps import make_schedule, predicted_step_ns

# Below, int8 leaves no communication that compute does not hide (four times fewer bytes).
WORTHWHILE_RATIO = 4.0
KNOWN = (
    "with H = 500 on 8 workers DiLoCo reports language models as good as those of synchronous training (arXiv "
    "2311.08105); data that differs between ranks makes local steps worse (arXiv 1910.00189): "
    'LocalSteps(every="auto") then averages more often'
)


def communication_ns(profile: _core.Profile, link: _core.LinkModel, every: int, *, is_streamed: bool = True) -> float:
    """Returns the network time of all fragments of a round, one after the other."""
    sizes = [(tensor.bytes // tensor.element_bytes, tensor.element_bytes) for tensor in profile.tensors]
    schedule = make_schedule(sizes, every, None if is_streamed else 0)
    widths = [tensor.element_bytes for tensor in profile.tensors]
    fragments = (sum((p.hi - p.lo) * widths[p.parameter] for p in each) for each in schedule.fragments)
    return sum(link.all_reduce.cost_ns(size) for size in fragments)


def step_ns(profile: _core.Profile, link: _core.LinkModel, every: int, *, is_streamed: bool = True) -> float:
    sent_ns = communication_ns(profile, link, every, is_streamed=is_streamed)
    return predicted_step_ns(compute_ns(profile), sent_ns, every, is_streamed=is_streamed)


def ratio(profile: _core.Profile, link: _core.LinkModel) -> float:
    """Communication over compute, with all gradients in one operation."""
    return link.all_reduce.cost_ns(sum(tensor.bytes for tensor in profile.tensors)) / compute_ns(profile)


def suggested_every(profile: _core.Profile, link: _core.LinkModel) -> int:
    """The multiple of 10 with which a fifth more communication would still hide behind compute."""
    return 10 * max(1, math.ceil(1.2 * ratio(profile, link) / 10))
