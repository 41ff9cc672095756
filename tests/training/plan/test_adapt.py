"""Live adaptation: the same decision at the same step on all ranks, and the numbers of DDP whatever is decided.

What the ranks say of their steps is given to them here, so that no other load of the machine decides. That it is true
on real hosts, the laboratory shows.
"""

from unittest import mock

import pytest

import gradcast
from gradcast import _core
from training.attached import attach, heard, hosts_of, planning
from training.inside import session_of
from training.needs import torch
from training.pool import on_ranks

pytest.importorskip("training.needs")
from gradcast.training.measure import compute_cost, network_cost
from gradcast.training.plan import calibration, proposals
from gradcast.training.plan.expectation import Expectation, TypicalStep

WARMUP_STEPS = 3  # as attached.attach has it
STEPS_TO_ADAPT = 20
USUAL_NS = 20e6
nn = torch.nn


def make_module():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))


def expectation(gain, limit=2.0, compute_share=0.97):
    steps = TypicalStep(25e6, 20e6), TypicalStep(gain * 25e6, 20e6)
    return Expectation(*steps, low=gain - 0.1, high=gain + 0.1, limit=limit, compute_share=compute_share)


def train(rank, mode, steps, facts_of, gain=1.5, **options):
    """``facts_of(rank, step, on_baseline)``: what a rank says of a step."""

    def prepare(handle):
        live = session_of(handle).controller
        stages_ns = {"backward": 0.6 * USUAL_NS, "loop": 1e6, "forward": 0.5 * USUAL_NS}
        live.meter.exposed.own_stages_ns = lambda *_: stages_ns
        live.new_monitor = lambda agreed: _core.Monitor(rank.size, begins_on_baseline=agreed.runs_as_baseline)

        def tell(step):
            live.meter._own_facts = lambda _: facts_of(rank.index, step - 1, live.phase.on_baseline) if step else None

        return tell

    def note(handle):
        stats = handle.stats()
        assert (stats["predicted_ms"] is None) == (stats["bound_ms"] is None) == handle.measuring
        return stats["plan_version"], stats["policy"], stats["runs_as_ddp"]

    # What the warm-up has measured has nothing to do with these facts, nor what a plan's first steps take; how much
    # steps vary, which differs from one measurement to the next, makes no other plan the better one. The process goes
    # on with other tests.
    with (
        mock.patch.object(proposals, "expect", return_value=expectation(gain)),
        mock.patch.object(compute_cost, "compute_variation", return_value=()),
        mock.patch.object(network_cost, "cost_spread", return_value=(1.0, 1.0)),
        mock.patch.object(network_cost, "corrected_link", return_value=None),
        mock.patch.object(calibration, "corrected_compute", return_value=None),
        mock.patch.object(calibration, "planned_busy_periods_ns", return_value=[0.5 * USUAL_NS]),
    ):
        return train_both(rank, mode, steps, note, prepare, **options)


def train_both(rank, mode, steps, note, prepare=lambda handle: None, **options):
    """With gradcast, then with DDP: what ``note(handle)`` tells after each step, what was said, the last statistics,
    and whether the parameters are equal. ``prepare(handle)``: returns what is called before each step, with its number.
    """
    modules = [make_module(), make_module()]
    sgds = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for module in modules]
    with heard() as lines:
        handle = attach(modules[0], sgds[0], mode, **{"plan": planning(adapt=True)} | options)
        before_step = prepare(handle) or (lambda step: None)
        seen = []
        for step in range(steps):
            before_step(step)
            run_step(rank, step, modules[0], sgds[0])
            seen.append(note(handle))
        handle.flush()
        stats = handle.stats()
        handle.detach()
    ddp = nn.parallel.DistributedDataParallel(modules[1])
    for step in range(steps):
        run_step(rank, step, ddp, sgds[1])
    equal = all(torch.equal(one, other) for one, other in zip(*(m.parameters() for m in modules), strict=True))
    return {"seen": seen, "lines": lines, "equal": equal, "stats": stats}


def run_step(rank, step, forward, sgd):
    torch.manual_seed(100 * rank.index + step)
    sgd.zero_grad()
    forward(torch.randn(8, 64)).square().mean().backward()
    sgd.step()


def require_agreement(results):
    for result in results:
        assert result["seen"] == results[0]["seen"]
        assert result["equal"], "the parameters are not DDP's"
    for result in results[1:]:
        assert result["lines"] == [], "one rank speaks for all"


def facts(*, step_ns=1.2 * USUAL_NS, busy_ns=USUAL_NS, link_ns=0.5 * USUAL_NS):
    return _core.RankFacts(step_ns=step_ns, busy_ns=busy_ns, link_ns=link_ns)


def with_slower_baseline(on_baseline):
    return 1.5 * USUAL_NS if on_baseline else 1.2 * USUAL_NS


def slower(rank, mode, what):
    def facts_of(rank, step, on_baseline):
        is_slow = step >= 60
        busy_ns = 2 * USUAL_NS if is_slow and what == "rank" and rank == 1 else USUAL_NS
        link_ns = USUAL_NS if is_slow and what == "network" else 0.5 * USUAL_NS
        return facts(step_ns=with_slower_baseline(on_baseline), busy_ns=busy_ns, link_ns=link_ns)

    raised = []
    result = train(rank, mode, 60 + STEPS_TO_ADAPT + 1, facts_of, watch=gradcast.Watch(on_alarm=raised.append))
    return result | {"raised": raised}


@pytest.mark.parametrize(
    ("what", "said", "cause", "slow_rank"),
    [
        ("rank", "rank 1 has changed: the slowest rank computed", "compute", 1),
        ("network", "the network has changed", "link", None),
    ],
)
def test_a_change_for_the_worse_is_measured_and_named_and_an_alarm_on_every_rank(
    ranks, mode, what, said, cause, slow_rank
):
    results = ranks.run(2, slower, mode, what)
    require_agreement(results)
    versions = [version for version, _, _ in results[0]["seen"]]
    assert versions[60 + STEPS_TO_ADAPT] == versions[59] + 4  # three plans of a warm-up, and the new one
    lines = [line for line in results[0]["lines"] if "planned again" in line]
    assert len([line for line in lines if line.startswith(said)]) == 1, lines
    (alarm,) = results[0]["raised"]
    assert (alarm.cause, alarm.rank) == (cause, slow_rank)
    assert 60 <= alarm.since_step <= 62
    assert alarm.since_step < alarm.step <= 60 + STEPS_TO_ADAPT
    assert alarm.sentence in results[0]["lines"]
    for result in results:
        assert result["raised"] == [alarm]
        # The training was planned again, for what it has become; it is still not what was expected.
        assert [each["cause"] for each in result["stats"]["alarms"]] == [cause]
        assert result["stats"]["observed"]["step"] > alarm.step


def slower_between_hosts(rank):
    with hosts_of(1):
        return slower(rank, "overlap", "network")


def test_an_alarm_of_a_link_has_its_hosts_on_every_rank(ranks):
    results = ranks.run(2, slower_between_hosts)
    require_agreement(results)
    (alarm,) = results[0]["raised"]
    assert (alarm.cause, alarm.hosts) == ("link", (0, 1))
    assert "the link between host 0 (" in alarm.sentence
    assert alarm.sentence in results[0]["lines"]
    for result in results:
        assert result["raised"] == [alarm]
        assert result["stats"]["alarms"][0]["sentence"] == alarm.sentence


def failing(rank, mode):
    def facts_of(rank, step, on_baseline):
        return facts(step_ns=with_slower_baseline(on_baseline), link_ns=(1 if step < 60 else 2) * 0.5 * USUAL_NS)

    def fail(alarm):
        raise ValueError("not today")

    return train(rank, mode, 60 + STEPS_TO_ADAPT + 1, facts_of, watch=gradcast.Watch(on_alarm=fail))


def test_a_function_for_alarms_that_fails_is_said_and_training_goes_on(ranks, mode):
    results = ranks.run(2, failing, mode)
    for rank, result in enumerate(results):
        assert result["equal"]
        assert f"options.watch.on_alarm failed on rank {rank}; training goes on" in result["lines"]


def steady(rank, gain, adapt):
    return train(rank, "overlap", 12, lambda *_: facts(), gain=gain, plan=planning(adapt=adapt))


def test_where_little_is_expected_it_runs_as_ddp_and_says_so(ranks):
    results = ranks.run(2, steady, 1.01, True)
    require_agreement(results)
    assert results[0]["seen"][-1] == (4, "ddp", True)
    assert results[0]["stats"]["expected_gain"] == pytest.approx(1.01)
    assert "your step is compute-bound: expected gain below 2 %, running as DDP" in results[0]["lines"]


@pytest.mark.parametrize(
    ("gain", "limit", "compute_share", "tries", "said"),
    [
        (1.02, 1.30, 0.80, True, "the network allows 1.30x"),
        (1.02, 1.03, 0.97, True, "the network allows 1.03x"),
        (1.01, 1.30, 0.80, True, "so the plan is tried, and kept if it is faster"),
        (0.95, 1.30, 0.80, True, "so the plan is tried, and kept if it is faster"),
        (0.94, 1.30, 0.80, False, "but no plan was found that hides more communication"),
        (1.01, 1.01, 0.80, False, "but no schedule can hide the remaining communication"),
        (1.01, 1.04, 0.95, False, "your step is compute-bound"),
    ],
)
def test_a_plan_is_tried_where_the_expectation_may_be_wrong_by_what_is_missing(gain, limit, compute_share, tries, said):
    expected = expectation(gain, limit, compute_share)
    assert expected.is_worth_trying == tries
    assert said in expected.sentence()
    assert ("running as DDP" in expected.sentence()) == (not tries)
    assert "DDP" not in expected.sentence("FSDP")


def test_without_adapt_the_plan_is_followed(ranks):
    results = ranks.run(2, steady, 1.01, False)
    require_agreement(results)
    assert results[0]["seen"][-1] == (4, "forecast", False)
    assert results[0]["stats"]["expected_gain"] is None


def promised_too_much(rank, mode):
    return train(rank, mode, 80, lambda *_: facts())


def test_a_plan_that_does_not_pay_is_given_up_and_that_is_said(ranks, mode):
    results = ranks.run(2, promised_too_much, mode)
    require_agreement(results)
    assert results[0]["seen"][3] == (4, "forecast", False)
    assert results[0]["seen"][-1][1:] == ("ddp", True)
    assert results[0]["stats"]["measured_gain"] == pytest.approx(1)
    lines = results[0]["lines"]
    assert "expected 1.50x (1.40–1.60) over DDP; the network allows 2.00x" in lines  # noqa: RUF001
    assert len([line for line in lines if line.startswith("the DDP baseline is as fast here")]) == 1
    # The last word: what was expected, and what came.
    assert lines[-1].startswith("expected 1.50x over DDP, measured 1.00x")


@pytest.mark.parametrize("flushed_step", [5, None])
@on_ranks(2)
def test_of_a_step_that_the_program_has_finished_early_nothing_is_said(rank, flushed_step):
    module = make_module()
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    handle = attach(module, sgd, plan=planning(adapt=True))
    reports, said = session_of(handle).controller.meter.reports, []
    exchange = reports.exchange
    reports.exchange = lambda facts: (said.append(facts), exchange(facts))[1]
    for step in range(8):
        run_step(rank, step, module, sgd)
        if step == flushed_step:
            handle.flush()
    handle.detach()
    assert [step for step, about in enumerate(said[1:]) if about is None] == ([flushed_step] if flushed_step else [])


def a_bad_step(rank):
    def facts_of(_rank, step, on_baseline):
        factor = 5 if step % 10 == 0 else 1
        step_ns = with_slower_baseline(on_baseline)
        return facts(step_ns=factor * step_ns, busy_ns=factor * USUAL_NS, link_ns=factor * 0.5 * USUAL_NS)

    return train(rank, "overlap", 80, facts_of)


def test_a_bad_step_changes_nothing(ranks):
    results = ranks.run(2, a_bad_step)
    require_agreement(results)
    assert {policy for _, policy, _ in results[0]["seen"][3:]} == {"forecast"}
