"""What makes a step wait before forward: counted and said by line, and part of what is expected."""

import copy
import dataclasses
import time
from pathlib import Path

import pytest

from conftest import link_of
from gradcast import _core
from training.needs import torch
from training.pair import Pair
from training.pool import on_ranks

from gradcast.training.measure import early_waits  # isort: skip
from gradcast.training.measure.early_waits import Cause, EarlyWaits
from gradcast.training.measure.step_trace import StepRecord, StepTrace
from gradcast.training.measure.stopwatch import Stopwatch
from gradcast.training.plan import proposals
from gradcast.training.plan.expectation import StepVariation, expect
from gradcast.training.step import pending

nn = torch.nn
MS = 1_000_000
HERE = Path(__file__).name


class Loop:
    """The waits of a loop whose steps take 100 ms, and what they say. Nothing of the time passes."""

    def __init__(self, parameters=4):
        self.trace = StepTrace(8)
        self.said = []
        self.waits = EarlyWaits(self.trace, parameters, self.said.append)
        self.now_ns = 0
        self.begin()  # the first step, which does not count

    def begin(self, measuring=False, counts=True):
        self.trace.begin(StepRecord(0, 0, None, None, self.now_ns))
        self.waits.begin_step(self.now_ns, measuring=measuring, counts=counts)
        self.now_ns += 100 * MS

    def wait(self, cause=Cause.PARAMETERS, ms=10, **where):
        with self.waits.at(cause, **where):
            self.trace.span("wait", 0, ms * MS)

    def steps(self, count, cause=Cause.PARAMETERS, ms=10):
        for _ in range(count):
            self.begin()
            self.wait(cause, ms)
            self.waits.forward_begins()

    def shown(self):
        return [(each["what"], each["count"], each["ms_per_step"]) for each in self.waits.stats()]


def test_a_line_is_counted_once_per_step_and_said_once():
    loop = Loop()
    for _ in range(5):
        loop.begin()
        for _ in range(3):
            loop.wait(ms=2)
        loop.waits.forward_begins()
    loop.begin()
    (line,) = loop.waits.stats()
    assert line["where"].rpartition(":")[0].endswith(HERE)
    assert (line["what"], line["count"]) == (Cause.PARAMETERS.what, 5)
    assert line["ms_per_step"] == pytest.approx(6)
    assert line["advice"] == Cause.PARAMETERS.advice
    assert loop.said == [f"{line['where']} reads parameters after step(), 6.0 ms per step: {line['advice']}"]
    assert loop.waits.reason() == f"{line['where']} reads parameters after step()"


def test_little_waiting_is_counted_and_not_said():
    loop = Loop()
    loop.steps(6, ms=1)
    assert loop.shown() == [(Cause.PARAMETERS.what, 6, pytest.approx(1))]
    assert (loop.said, loop.waits.reason()) == ([], None)


def test_the_worst_lines_come_first():
    loop = Loop()
    for _ in range(4):
        loop.begin()
        loop.wait(Cause.STATE, 5)
        loop.wait(Cause.GRADIENTS, 20)
        loop.waits.forward_begins()
    loop.begin()
    assert [what for what, *_ in loop.shown()] == [Cause.GRADIENTS.what, Cause.STATE.what]
    assert loop.waits.reason().endswith(Cause.GRADIENTS.what)
    assert len(loop.said) == 2


def test_what_is_rare_is_no_reason_for_what_is_expected():
    loop = Loop()
    loop.steps(3, ms=90)
    for _ in range(9):
        loop.begin()
        loop.waits.forward_begins()
    assert loop.waits.reason() is None
    assert loop.shown() == [(Cause.PARAMETERS.what, 3, pytest.approx(270 / 11))]


def test_forward_itself_does_not_wait_early():
    loop = Loop()
    for _ in range(4):
        loop.begin()
        loop.waits.forward_begins()
        loop.wait()
    assert loop.shown() == []
    loop.begin()
    loop.waits.forward_begins()
    loop.wait(Cause.SECOND_BACKWARD, in_forward=True)
    assert loop.shown()[0][:2] == (Cause.SECOND_BACKWARD.what, 1)


def test_reads_of_a_forward_that_is_not_seen_are_not_the_loops():
    loop = Loop()
    for _ in range(4):
        loop.begin()
        loop.wait()
    loop.begin()
    assert (loop.shown(), loop.said) == ([], [])


def test_what_a_callback_waits_for_inside_counts_once():
    loop = Loop()
    loop.begin()
    with loop.waits.at(Cause.STATE):
        loop.wait(Cause.GRADIENTS)
    assert loop.shown() == [(Cause.STATE.what, 1, pytest.approx(10))]


def test_steps_of_the_baseline_do_not_count():
    loop = Loop()
    loop.steps(3)
    for _ in range(5):
        loop.begin(counts=False)
        loop.wait()
        loop.waits.forward_begins()
    assert loop.shown() == [(Cause.PARAMETERS.what, 3, pytest.approx(10))]


def test_in_the_warmup_a_line_gets_what_step_has_waited():
    """The first one that would wait; the next one would find everything there. Then the plan's own steps count."""
    loop = Loop(parameters=4)
    for _ in range(4):
        loop.begin(measuring=True)
        loop.waits.step_waited(30 * MS)
        for _ in range(4):
            loop.waits.would_wait(Cause.PARAMETERS, 1)
        loop.waits.would_wait(Cause.PARAMETERS, 1)
        loop.waits.forward_begins()
    assert loop.shown() == [("reads all parameters after step()", 4, pytest.approx(30)),
                            ("reads 1 of 4 parameters after step()", 4, 0)]  # fmt: skip
    assert len(loop.said) == 1
    assert "reads all parameters after step(), 30.0 ms per step" in loop.said[0]
    loop.begin()
    assert loop.shown() == []


SCALED = "scaler = torch.amp.GradScaler('cpu'); scaler.scale(torch.ones(1)); scaler.unscale_(sgd)"


@pytest.mark.parametrize(
    ("program", "advice"),
    [
        ("nn.utils.clip_grad_norm_([p], 1.0)", "Options(clip=Clip(norm=...))"),
        ("nn.utils.clip_grad_value_([p], 1.0)", "Options(clip=Clip(value=...))"),
        ("sgd.zero_grad(set_to_none=False)", "zero_grad() right after step()"),
        (SCALED, "bf16"),
        ("copy.deepcopy(p.grad)", "handle.stats()['grad_norm']"),
    ],
)
def test_the_advice_is_for_the_function_that_was_called(monkeypatch, program, advice):
    """The line is the program's, not that of torch or of Python's library."""
    monkeypatch.setattr(early_waits, "OURS", (*early_waits.OURS, str(Path(__file__).parent)))
    loop = Loop()

    class Owner:
        def resolve(self, tensors):
            loop.wait(Cause.GRADIENTS)
            pending.clear(tensors)

        def zero_later(self, tensor):
            return False

    p, owner = nn.Parameter(torch.ones(3)), Owner()
    p.grad = torch.ones(3)
    names = {"nn": nn, "torch": torch, "copy": copy, "p": p, "sgd": torch.optim.SGD([p], lr=0.1)}
    loop.begin()
    pending.mark([p.grad], owner)
    exec(compile(f"\n{program}", "/somewhere/project/train.py", "exec"), names)
    (line,) = loop.waits.stats()
    assert line["where"] == "project/train.py:2"
    assert advice in line["advice"]


def test_a_file_is_shown_from_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert early_waits.shown_line(str(tmp_path / "train.py"), 83) == "train.py:83"
    assert early_waits.shown_line("/somewhere/project/train.py", 83) == "project/train.py:83"
    assert early_waits.shown_line("", 0) == "a thread of autograd"


def test_the_first_use_of_a_parameter_may_be_the_loops():
    """Not where forward was not seen: then the reads may be its own."""
    watch = Stopwatch(torch.device("cpu"), 2)
    for watched in (True, True, True, False):
        watch.backward_started()
        watch.ready(0, used=True)
        watch.ready(1, used=True)
        watch.backward_ended()
        watch.read_early(1)
        if watched:
            watch.watching()
        time.sleep(0.002)
        watch.read(0)
        watch.read(1)
    watch.backward_started()
    measured = watch.medians([], 0.0, {})
    assert measured.need_ns[0] > 1.5 * MS > measured.need_ns[1]
    assert measured.unseen_reads == {}


def test_the_sentence_names_the_line():
    from training.plan.test_adapt import expectation

    reason = "train.py:83 reads all parameters after step()"
    said = [
        dataclasses.replace(expectation(gain, limit, share), reason=reason).sentence()
        for gain, limit, share in ((1.1, 1.2, 0.8), (1.0, 1.3, 0.8), (0.9, 1.0, 0.8), (1.0, 1.0, 0.96))
    ]
    assert said[0].endswith(f"the network allows 1.20x while {reason}")
    assert f"allows 1.30x while {reason}, so the plan is tried" in said[1]
    assert f"of your step, but {reason}: expected gain below 2 %" in said[2]
    assert reason not in said[3]


# --- With ranks ---


@on_ranks(2)
def test_a_loop_that_reads_all_parameters_is_named(rank):
    """In the warm-up, whose profile has the reads, and after it; with DDP's bits."""
    pair = Pair(rank)
    found = []

    def steps(count):
        for _ in range(count):
            time.sleep(0.004 * rank.index)  # the gradients of one rank have to wait for those of the other
            pair.step()
            for module in pair.modules:
                with torch.no_grad():
                    [parameter.norm() for parameter in module.parameters()]
            time.sleep(0.02)

    for count in (3, 6):
        steps(count)
        lines = [each for each in pair.handle.stats()["waits"] if HERE in each["where"]]
        if rank.index == 0:  # rank 1 is the one that is waited for
            found += [] if lines and lines[0]["what"] == "reads all parameters after step()" else [lines]
    profile = pair.handle.profile
    # Forward lasts as long as the loop: it begins behind the second sleep.
    found += [tensor.name for tensor in profile.tensors if tensor.need_ns > 0.5 * profile.forward_ns]
    return found + pair.end()


@on_ranks(2)
def test_waits_by_kind(rank):
    """Each kind in a training of its own, in which the gradients of the last steps cannot have arrived."""
    found = []

    def clip(side):
        nn.utils.clip_grad_norm_(side.module.parameters(), 0.1)

    def trained(between=None, after=lambda side: None):
        pair = Pair(rank)
        for _ in range(9):
            if rank.index == 1:
                time.sleep(0.002)
            pair.step(between=between)
            for side in pair.sides:
                after(side)
        causes = {each["what"] for each in pair.handle.stats()["waits"] if HERE in each["where"]}
        found.extend(pair.end())
        return causes

    cases = {
        Cause.GRADIENTS: trained(clip),
        Cause.STATE: trained(after=lambda side: side.optimizer.state[next(side.module.parameters())]),
        Cause.COMPLETION: trained(after=lambda side: side.optimizer.state_dict()),
        Cause.GRADIENTS_AFTER_STEP: trained(after=lambda side: next(side.module.parameters()).grad.norm()),
    }
    if rank.index == 0:
        found += [f"{cause}: {causes}" for cause, causes in cases.items() if cause.what not in causes]
    return found


def test_nothing_is_expected_of_an_overlap_that_the_loop_prevents():
    """All parameters are read when backward ends."""
    link = link_of(1e5, 8.0)

    def profile(needs_ms):
        tensors = [
            _core.Tensor(name=str(i), bytes=6_000_000, ready_ns=(4 - i) * 25 * MS, need_ns=need * MS)
            for i, need in enumerate(needs_ms)
        ]
        return _core.Profile(
            name="loop", forward_ns=100 * MS, backward_ns=100 * MS, tensors=tensors, world_size=2, link=link
        )

    def expected(needs_ms):
        found = profile(needs_ms)
        plan = _core.make_plan(found, link)
        return expect(found, plan, found, proposals.baseline_plan(found), StepVariation())

    free, read = expected((0, 25, 50, 75)), expected((0, 0, 0, 0))
    assert free.gain > 1.2
    assert read.gain < 1.02
