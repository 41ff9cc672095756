"""Always on: which stage keeps the group, and on which rank that begins."""

import statistics
import time

import pytest

from gradcast import _core
from training.attached import Attached, attach, planning
from training.inside import session_of
from training.models import TASKS
from training.needs import torch
from training.pool import on_ranks

pytest.importorskip("training.needs")
from gradcast.training.measure.stage_exposure import StageExposure
from gradcast.training.measure.step_trace import StepRecord
from gradcast.training.ranks.step_reports import STAGES, StepReport

# Of the warm-up, of calibration, and six of the plan that is then followed.
STEPS = 3 + 9 + 6


@on_ranks(3)
def test_all_ranks_are_told_the_same(rank, mode):
    attached = Attached(torch.nn.Linear(4, 4), mode, plan=planning(adapt=True))
    assert attached.handle.stats()["exposed"] is None
    for _ in range(STEPS):
        attached.step(torch.ones(2, 4))
    attached.handle.flush()
    exposed = attached.handle.stats()["exposed"]
    attached.handle.detach()
    assert set(exposed) == {"backward", "loop", "forward"}
    return [each for each in rank.gather("exposed", exposed) if each != exposed]


def record_of(backward, loop, forward):
    """A step whose stages take so many ns, as the training thread has noted it, and how long it took."""
    record = StepRecord(0, 0, None, None, start_ns=100)
    record.spans += [("backward", 100, 100 + backward), ("forward", 200, 200 + forward)]
    return record, backward + loop + forward


def test_a_rank_tells_the_stages_since_all_ranks_were_together():
    for waiting_stage, expected in (("forward", (4, 5, 6)), ("loop", (4, 5, 3)), ("backward", (4, 2, 3))):
        exposed = StageExposure()
        exposed.set_waiting_stage(waiting_stage)
        assert exposed.own_stages_ns(*record_of(1, 2, 3)) == {"backward": 1, "loop": 2, "forward": 3}
        assert exposed.own_stages_ns(*record_of(4, 5, 6)) == dict(zip(STAGES, expected, strict=True))


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


SLOW_S = 0.05


def clip_beside_a_slow_rank(rank, mode):
    """ms per step that rank 0 is found to compute in forward, and to be busy, while it clips by itself and waits."""
    task = TASKS["plain"]
    module = task.module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    handle = attach(module, optimizer, mode, plan=planning(adapt=True, warmup_steps=4))
    busy_ns = []
    for number in range(12):
        optimizer.zero_grad()
        loss = task.loss(module, task.batch(rank.index, number))
        time.sleep(SLOW_S * rank.index)  # of its backward pass, so that forward is short on both
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
        record = session_of(handle).report.trace.current
        busy_ns.append(time.perf_counter_ns() - record.start_ns - record.total_ns("wait"))
    found = handle.profile.forward_ns / 1e6, statistics.median(busy_ns[6:]) / 1e6
    handle.detach()
    return found


def test_waiting_for_gradients_that_the_loop_reads_is_no_compute(ranks, mode):
    (forward_ms, busy_ms), (_, slow_busy_ms) = ranks.run(2, clip_beside_a_slow_rank, mode)
    assert slow_busy_ms > 1e3 * SLOW_S, "it sleeps"
    assert max(forward_ms, busy_ms) < 0.5 * slow_busy_ms
