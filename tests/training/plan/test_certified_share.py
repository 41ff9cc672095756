"""The share of steps that clipping certifies changes during training: the plan is made again, and bits stay DDP's.

What the warm-up measures, and what a rank says of its steps, is given here, so that no other load decides.
"""

from unittest import mock

import pytest

import gradcast
from conftest import link_of
from gradcast import _core
from training.attached import heard, planning
from training.inside import session_of
from training.needs import torch
from training.pair import Pair
from training.plan.test_adapt import USUAL_NS, expectation, facts, with_slower_baseline

pytest.importorskip("training.needs")
from gradcast.training.measure import compute_cost, network_cost
from gradcast.training.plan import calibration, proposals
from gradcast.training.plan.warmup import Warmup, WarmupResult

WARMUP_STEPS, CALIBRATION_STEPS, SHARE_STEPS = 3, 9, 64
# Steps before which the share is looked at.
FIRST_LOOK = WARMUP_STEPS + CALIBRATION_STEPS + SHARE_STEPS
SECOND_LOOK = FIRST_LOOK + 1 + CALIBRATION_STEPS + SHARE_STEPS
LOUD, QUIET = 1e3, 1e-4


def half_hidden(warmup, _ranks):
    """A profile whose communication takes as long as both passes."""
    total = sum(tensor.bytes for tensor in warmup._profile.tensors)
    count = len(warmup._profile.tensors)
    tensors = [
        _core.Tensor(
            name=each.name,
            bytes=each.bytes,
            buffer=each.buffer,
            element_bytes=each.element_bytes,
            ready_ns=USUAL_NS / 2 * (count - position) / count,
            need_ns=USUAL_NS / 2 * position / count,
            update_ns=0,
        )
        for position, each in enumerate(warmup._profile.tensors)
    ]
    profile = _core.Profile(
        name="given", forward_ns=USUAL_NS / 2, backward_ns=USUAL_NS / 2, tensors=tensors, world_size=2,
        link=link_of(1e4, USUAL_NS / total),
    )  # fmt: skip
    return WarmupResult(profile, {})


def train(rank, gain_if_waiting):
    """Loud steps, then quiet ones, then loud ones again. ``gain_if_waiting``: what is expected then, None for what the
    profile says."""

    def expect(*arguments, **named):
        waiting_share = arguments[5]
        return expectation(gain_if_waiting if waiting_share > 0.5 else 1.5, limit=1.5 - waiting_share / 2)

    measured = proposals.expect
    with (
        heard() as lines,
        mock.patch.object(Warmup, "_combined", half_hidden),
        mock.patch.object(network_cost, "corrected_link", return_value=None),
        mock.patch.object(network_cost, "cost_spread", return_value=(1.0, 1.0)),
        mock.patch.object(calibration, "corrected_compute", return_value=None),
        mock.patch.object(compute_cost, "compute_variation", return_value=()),
        mock.patch.object(proposals, "expect", measured if gain_if_waiting is None else expect),
    ):
        plan = planning(adapt=True, warmup_steps=WARMUP_STEPS)
        pair = Pair(rank, "plain", "adamw foreach", plan=plan, clip=gradcast.Clip(norm=1.0))
        live = session_of(pair.handle).controller
        live.new_monitor = lambda agreed: _core.Monitor(rank.size, begins_on_baseline=agreed.runs_as_baseline)
        live.meter._own_facts = lambda _: facts(step_ns=with_slower_baseline(live.phase.on_baseline))
        seen = []
        for number, side in pair.rounds(SECOND_LOOK + 5):
            size = LOUD if number < FIRST_LOOK - 60 or number > FIRST_LOOK + 5 else QUIET
            side.optimizer.zero_grad()
            (size * side.loss()).backward()
            if side is pair.theirs:
                torch.nn.utils.clip_grad_norm_(side.module.parameters(), 1.0)
            else:
                seen.append((pair.handle.plan.mode, pair.handle.stats()["runs_as_ddp"]))
            side.optimizer.step()
        return {"seen": seen, "lines": [line for line in lines if "clipping now" in line], "differences": pair.end()}


@pytest.mark.parametrize(
    "gain_if_waiting", [None, pytest.param(1.0, marks=pytest.mark.slow)], ids=["hook plan", "as DDP"]
)
def test_another_share_brings_another_plan(ranks, gain_if_waiting):
    results = ranks.run(2, train, gain_if_waiting)
    assert [each["differences"] for each in results] == [[], []]
    assert results[0]["seen"] == results[1]["seen"]
    waiting = ("hook", gain_if_waiting is not None)
    # What a step follows is decided where its backward pass begins.
    followed = results[0]["seen"]
    assert set(followed[WARMUP_STEPS : FIRST_LOOK + 1]) == {waiting}
    assert set(followed[FIRST_LOOK + 1 : SECOND_LOOK + 1]) == {("overlap", False)}
    assert set(followed[SECOND_LOOK + 1 :]) == {waiting}
    quiet, loud = results[0]["lines"]
    assert quiet.startswith("clipping now certifies 95% of steps, 0% when the plan was made; planned again: ")
    assert loud.startswith("clipping now certifies 0% of steps, 94% when the plan was made; planned again: ")
    assert results[1]["lines"] == [], "one rank speaks for all"
