"""Always on: which stage keeps the group, and on which rank that begins."""

import time

import pytest

import gradcast
from gradcast import _core
from training.needs import torch
from training.plan.test_adapt import make_module

pytest.importorskip("training.needs")
from gradcast.training.measure.stage_exposure import StageExposure
from gradcast.training.ranks.step_reports import STAGES, StepReport

nn = torch.nn
SLOW_MS = 40
# Of the warm-up, of calibration, and six of the plan that is then followed.
STEPS = 3 + 9 + 6


class Slow(nn.Module):
    """Waits in forward where it is told to."""

    def __init__(self, ms):
        super().__init__()
        self.inner, self.ms = make_module(), ms

    def forward(self, value):
        time.sleep(self.ms / 1e3)
        return self.inner(value)


def train(rank, mode, stage):
    slow_ms = SLOW_MS if rank.index == 1 else 0
    module = Slow(slow_ms if stage == "forward" else 0)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    handle = gradcast.attach(module, sgd if mode == "overlap" else None, options=gradcast.Options(warmup_steps=3))
    assert handle.stats()["exposed"] is None
    for step in range(STEPS):
        time.sleep(slow_ms / 1e3 if stage == "loop" else 0)
        torch.manual_seed(step)
        sgd.zero_grad()
        module(torch.randn(8, 64)).square().mean().backward()
        sgd.step()
    handle.flush()
    exposed = handle.stats()["exposed"]
    handle.detach()
    return exposed


@pytest.mark.parametrize("mode", ["hook", "overlap"])
@pytest.mark.parametrize("stage", ["loop", "forward"])
def test_the_slow_rank_and_its_stage_are_named(ranks, mode, stage):
    first, *others = ranks.run(3, train, mode, stage)
    assert others == [first, first], "all ranks hear the same"
    assert set(first) == {"backward", "loop", "forward"}
    assert first[stage]["rank"] == 1
    # Most of what is waited; how long that is depends on the machine.
    assert first[stage]["ms"] > 0.5 * SLOW_MS
    assert first[stage]["ms"] > 2 * max(each["ms"] for name, each in first.items() if name != stage)


def reports_of(*ranks_ms):
    """By rank: backward, loop and forward, with what they wait for, in steps of 100 ms."""
    return [
        StepReport(
            _core.RankFacts(step_ns=100e6, busy_ns=1e6 * busy_ms, link_ns=0),
            dict(zip(STAGES, (1e6 * ms for ms in stages_ms), strict=True)),
        )
        for *stages_ms, busy_ms in ranks_ms
    ]


def test_the_last_steps_count_and_only_those_since_the_ranks_meet_elsewhere():
    exposed = StageExposure()
    assert exposed.stats() is None
    exposed.set_waiting_stage("forward")  # from there backward is the first stage
    for _ in range(3):
        exposed.add(reports_of((40, 20, 40, 100), (30, 50, 20, 80)))
    assert exposed.stats() == {
        "backward": {"ms": 40, "rank": 0},
        "loop": {"ms": 40, "rank": 1},  # 30 + 50 is 40 later than 40
        "forward": {"ms": 20, "rank": 0},  # did not wait
    }
    for _ in range(64):
        exposed.add(reports_of((40, 20, 40, 80), (45, 50, 5, 100)))
    assert exposed.stats()["backward"] == {"ms": 45, "rank": 1}, "the first three are too long ago"
    assert exposed.stats() == exposed.stats(), "asking changes nothing"
    exposed.set_waiting_stage("forward")
    assert exposed.stats() is not None
    exposed.set_waiting_stage("backward")
    assert exposed.stats() is None
