"""Links, profiles and steps made by hand."""

from conftest import link_of
from gradcast import _core


def compute_steps(ranks, disturbed=None):
    """Four steps of ``ranks``: backward, forward, update in ms; those of one step take ten times as long."""
    from gradcast.training.measure.compute_cost import Compute

    return [
        [Compute(*(1e6 * ms * (10 if step == disturbed else 1) for ms in rank)) for rank in ranks] for step in range(4)
    ]


def profile_of(backward_ms, forward_ms, update_ms):
    tensors = [
        _core.Tensor(name=name, bytes=size, ready_ns=1e6 * ready_ms, need_ns=1e6 * need_ms, update_ns=1e6 * own_ms)
        for name, size, ready_ms, need_ms, own_ms in (
            ("first", 4_000_000, backward_ms, 0, 0.25 * update_ms),
            ("last", 12_000_000, 0.5 * backward_ms, 0.5 * forward_ms, 0.75 * update_ms),
        )
    ]
    return _core.Profile(
        name="hand-made", forward_ns=1e6 * forward_ms, backward_ns=1e6 * backward_ms, tensors=tensors, world_size=3,
        link=link_of(1e5, 8.0),
    )  # fmt: skip
