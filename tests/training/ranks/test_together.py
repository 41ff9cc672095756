"""What one rank raises where all come together is an Error on all of them, which names the rank and the exception. None
waits for the one that has failed, and all can go on."""

import contextlib
import functools
import itertools
import os
import pwd
import sys
import threading
from unittest import mock

import pytest

import gradcast
from training.attached import Attached, error_of, not_refused, planning
from training.needs import torch
from training.pair import Training
from training.pool import on_ranks

pytest.importorskip("training.needs")
from gradcast.training import attachment, preflight
from gradcast.training.compat import extension
from gradcast.training.local import session as local_session
from gradcast.training.plan import agreement, calibration, loop, proposals, warmup
from gradcast.training.ranks import group, group_pool, stall_watchdog, status_server, together
from gradcast.training.sessions import handover, plan_facets, session, step_cycle

nn = torch.nn
ATTACH = sys.modules["gradcast.training.attach"]
KINDS = (OSError, TypeError, RuntimeError, MemoryError, KeyError, AssertionError)
INTERRUPTS = (KeyboardInterrupt, SystemExit)


def made_group():
    return group.make_group(None, torch.device("cpu"), 20.0)


def raised_by(function):
    """The name of what the function raises, and its words."""
    try:
        function()
    except BaseException as error:
        return type(error).__name__, str(error)
    return "", ""


# --- A group ---


def come_together(made, beside_blocks, fail):
    """``fail``: called with the number of messages before it."""
    messages = [
        lambda: made.gather(1),
        lambda: made.copy_from_first([torch.ones(2)], "ones"),
        lambda: made.from_first(2),
    ]
    with made.together("counting", beside_blocks=beside_blocks):
        for number, send in enumerate([lambda: made.gather(1, beside_blocks=True)] * 2 if beside_blocks else messages):
            fail(number)
            send()
        fail(number + 1)


@pytest.mark.parametrize("beside_blocks", [False, True])
@on_ranks(3)
def test_a_failure_at_any_place_is_told_to_all(rank, beside_blocks):
    made, found = made_group(), []
    for where, kind in itertools.product(range(3 if beside_blocks else 4), (*KINDS, *INTERRUPTS)):

        def fail(number, where=where, kind=kind):
            if number == where and rank.index == 1:
                raise kind("no", "such thing")

        name, words = raised_by(lambda fail=fail: come_together(made, beside_blocks, fail))
        is_interrupted = rank.index == 1 and kind in INTERRUPTS
        if name != (kind.__name__ if is_interrupted else "Error"):
            found.append((where, name, words))
        if not is_interrupted and not words.startswith(f"counting failed on rank 1 of 3: {kind.__name__}: "):
            found.append((where, name, words))
    come_together(made, beside_blocks, lambda _: None)
    return found


@on_ranks(2)
def test_an_error_of_gradcast_keeps_its_code_and_its_words(rank):
    made = made_group()

    def compute():
        raise gradcast.Error("the sentence", "invalid_plan")

    name, words = raised_by(lambda: made.computed_by_first(compute, "counting"))
    own = "the sentence" if rank.index == 0 else "counting failed on rank 0 of 2: the sentence"
    return [] if (name, words) == ("UsageError", own) else [name, words]


@on_ranks(3)
def test_several_ranks_fail_at_several_places(rank):
    """Each raises its own, the others that of the first."""
    made = made_group()

    def fail(number):
        if rank.index == number + 1:
            raise [None, OSError("of 1"), TypeError("of 2")][rank.index]

    words = raised_by(lambda: come_together(made, False, fail))[1]
    return [] if words == "counting failed on rank 1 of 3: OSError: of 1" else [words]


@on_ranks(2)
def test_what_cannot_be_pickled_is_told(rank):
    made = made_group()
    for send in (made.gather, functools.partial(made.gather, beside_blocks=True), made.from_first):
        value = threading.Lock() if rank.index == 0 else 1
        name, words = raised_by(lambda send=send, value=value: send(value))
        assert name == "Error", words
        assert "failed on rank 0 of 2: TypeError: cannot pickle" in words
    return [] if made.gather(rank.index) == [0, 1] else ["not together"]


@on_ranks(2)
def test_a_rank_that_was_interrupted_does_not_wait_long(rank):
    """Nor is its group used again, in which a message waits."""
    made = made_group()
    with mock.patch.object(together, "_INTERRUPTED_S", 0.3):
        if rank.index == 0:
            with pytest.raises(KeyboardInterrupt), made.together("counting"):
                raise KeyboardInterrupt
            assert group_pool.find(made.own) is None or made.has_failed
            rank.signal("interrupted")
        rank.wait_for("interrupted")
    rank.gather("end", None)
    made.leave(reusable=False)


# --- Where training comes together ---


def linears():
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def attaches(rank, **options):
    Attached(linears(), **options)


def attaches_ddp(rank):
    Attached(nn.parallel.DistributedDataParallel(linears()))


def trains(rank, steps=16, **options):
    Training(rank.index, "plain", "sgd plain", **options).train(steps)


def grows(rank):
    attached = Attached(linears())
    attached.step(torch.ones(2, 3))
    attached.module.append(nn.Linear(3, 3))
    attached.optimizer.add_param_group({"params": list(attached.module[2].parameters())})
    attached.step(torch.ones(2, 3))


def loads(rank):
    ours = Training(rank.index, "plain", "sgd plain")
    ours.train(5)
    state = ours.handle.state_dict()
    ours.handle.load_state_dict(state)


def balances(rank):
    attached = Attached(linears())
    gradcast.BalancedBatchSampler(range(8), attached.handle, 4)


def averages(rank):
    module = linears()
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    handle = gradcast.attach(module, sgd, options=gradcast.Options(local=gradcast.LocalSteps(2)))
    handle.load_state_dict(handle.state_dict())


def is_disabled(rank):
    with mock.patch.dict("os.environ", GRADCAST_DISABLE="1"):
        Attached(linears())


HOMES = {"none": {"HOME": None}, "read-only": {"GRADCAST_CACHE_DIR": "/proc/gradcast"}}


@pytest.mark.parametrize("home", HOMES)
@on_ranks(2)
def test_a_rank_that_cannot_load_the_part_for_torch_says_so_without(rank, home):
    """It is compiled into the home, and what ranks send each other is sent by it."""
    variables = dict.fromkeys(("GRADCAST_CACHE_DIR", "XDG_CACHE_HOME")) | HOMES[home]
    with contextlib.ExitStack() as stack:
        if rank.index == 1:
            kept = {name: value for name, value in os.environ.items() if name not in variables}
            kept |= {name: value for name, value in variables.items() if value is not None}
            stack.enter_context(mock.patch.dict(os.environ, kept, clear=True))
            stack.enter_context(mock.patch.object(pwd, "getpwuid", side_effect=KeyError))  # a user without a name
            stack.enter_context(mock.patch.object(extension, "_module", None))
            stack.enter_context(mock.patch.object(extension, "_installed", return_value=None))
        found = not_refused(lambda: attaches(rank), "set GRADCAST_CACHE_DIR to a folder", code="environment")
    attaches(rank)
    return found


# What is done, and in whose place what one rank raises. The last: the only rank that comes there.
POINTS = [
    (attaches, extension, "load", None),
    (attaches, ATTACH, "collect_dropped", None),
    (attaches, ATTACH, "unwrapped_optimizer", None),
    (attaches, ATTACH, "accept", None),
    (attaches, ATTACH, "check_hooks", None),
    (attaches, ATTACH, "require_backend", None),
    (attaches, preflight, "own_place", None),
    (attaches, group, "_timeout_of", None),
    (attaches, group_pool, "idle_groups", None),
    (attaches, group, "StoreGather", None),
    (attaches, ATTACH.hosts, "agreed", None),
    (attaches, preflight, "_features", None),
    (attaches, ATTACH, "Setup", None),
    (attaches, session, "GradientBuffers", None),
    (attaches, session, "GradientExchange", None),
    (attaches, stall_watchdog, "EngineUse", None),
    (attaches, status_server, "StatusServer", 0),
    (attaches, status_server, "ask", None),
    (attaches, loop, "Proposer", None),
    (attaches, warmup, "warmup_plans", None),
    (attaches, agreement, "plan_hash", None),
    (attaches, step_cycle, "WarmupReads", None),
    (attaches, attachment, "ModelLayout", None),
    (attaches, attachment, "around_forward", None),
    (attaches_ddp, handover, "DdpTakeover", None),
    (attaches, ATTACH, "Handle", None),
    (is_disabled, ATTACH, "DisabledSession", None),
    (trains, warmup.Warmup, "_measured", None),
    (trains, warmup.Warmup, "_combined", 0),
    (trains, warmup.Warmup, "release", None),
    (trains, proposals.Proposer, "from_warmup", 0),
    (trains, loop.PlanLoop, "start_plan", None),
    (lambda rank: trains(rank, plan=planning(adapt=True)), calibration.Calibration, "_measured", None),
    (lambda rank: trains(rank, plan=planning(adapt=True)), proposals.Proposer, "from_calibration", 0),
    (lambda rank: trains(rank, compare_every=3), session.RankConsistency, "_checksum", None),
    (grows, attachment, "trainable", None),
    (grows, attachment, "check_optimizers", None),
    (grows, attachment.preflight, "check_same_model", None),
    (loads, plan_facets.residuals, "restore", None),
    (loads, plan_facets.agreement, "reason_to_measure", None),
    (loads, session.PlanLoop, "adopt", None),
    (loads, proposals.Proposer, "from_checkpoint", 0),
    (balances, gradcast.BalancedBatchSampler, "_check", None),
    (balances, attachment, "Balancing", None),
    (averages, local_session, "make_schedule", None),
    (averages, local_session, "FragmentExchange", None),
    (averages, local_session.Rounds, "fingerprint", None),
]


def fails_on_one(rank, point, wrong):
    act, owner, name, only = POINTS[point]
    kind = KINDS[point % len(KINDS)]
    wrong = wrong if only is None else only
    failing = mock.patch.object(owner, name, side_effect=kind("no such thing"))
    with failing if rank.index == wrong else contextlib.nullcontext():
        code, words = error_of(lambda: act(rank))
    is_told = f"failed on rank {wrong} of 2: {kind.__name__}: " in words
    # Nothing stands in the way of a right one.
    trains(rank, 1)
    return [] if is_told and code == "communication" else [f"{code}: {words}"]


@pytest.mark.parametrize("point", range(len(POINTS)), ids=lambda point: f"{POINTS[point][2]}-{point}")
def test_what_one_rank_raises_ends_the_wait_of_all(ranks, point):
    wrong = 1 - point % 2
    assert ranks.run(2, fails_on_one, point, wrong, timeout_s=40.0) == [[], []]
