"""``LocalSteps("auto")``: the rule, and rounds whose number of steps follows it, with the bits of a reference."""

import contextlib
import functools
import math
import random
from unittest import mock

import pytest

from training.attached import error_of, heard, not_refused
from training.needs import torch
from training.pool import on_ranks

pytest.importorskip("training.needs")
import gradcast
from gradcast import local_pace
from gradcast.local_pace import FIRST, LIMIT, METRICS, gap_of, next_every
from gradcast.training.local.pacing import undisturbed
from training.local.reference import Reference, batch, differences, net, train
from training.local.test_resume import saved
from training.local.test_rounds import adamw

# What evaluate returns for a rank's own model and for the global copy, in turns, and the H that follow.
SCORES = [(2.0, 1.9), *[(2.0, 2.5 + number) for number in range(5)], *[(2.0, 2.0)] * 3]
PATH = [16, 8, 4, 2, 1, 1, 2, 4, 8]


def test_a_gap_is_positive_where_the_global_copy_is_worse():
    assert gap_of("accuracy", [0.9, 0.7], [0.8, 0.6]) == pytest.approx(0.1)
    assert gap_of("loss", [2.0, 4.0], [3.0, 6.0]) == pytest.approx(1.5)
    assert gap_of("loss", [2.0], [1.0]) < 0 < gap_of("accuracy", [0.5], [0.25])


@pytest.mark.parametrize("metric", METRICS)
def test_steps_are_doubled_while_the_gap_is_small_and_halved_where_it_is_large(metric):
    for every in (1, 2, 8, 32):
        assert next_every(metric, every, -0.2, LIMIT)[0] == 2 * every
        assert next_every(metric, every, 0.0, LIMIT)[0] == 2 * every
        assert next_every(metric, every, 0.3, LIMIT)[0] == max(1, every // 2)
    assert next_every(metric, LIMIT, 0.0, LIMIT)[0] == LIMIT
    assert next_every(metric, 20, 0.0, 30)[0] == 30


@pytest.mark.parametrize("metric", METRICS)
def test_a_larger_gap_never_allows_more_steps(metric):
    for every in (1, 3, 8, 64):
        chosen = [next_every(metric, every, gap / 10000, LIMIT)[0] for gap in range(-50, 3000)]
        assert chosen == sorted(chosen, reverse=True)
        assert every in chosen


def test_the_sentence_says_why():
    assert next_every("accuracy", 8, 0.2, 64)[1] == (
        "the global copy is 20.00 points worse than the ranks' own models, so they average more often, every 4 steps "
        "instead of 8"
    )
    better = next_every("loss", 8, -0.01, 64)[1]
    assert "0.0100 better" in better
    assert "less often, every 16 steps" in better
    assert "more often, every step instead of 2" in next_every("loss", 2, 1.0, 64)[1]
    assert "go on averaging every 64 steps" in next_every("loss", 64, 0.0, 64)[1]


@contextlib.contextmanager
def often():
    """Measures after two rounds."""
    with mock.patch.multiple(local_pace, _ROUNDS=2, _STEPS=2):
        yield


class Scripted:
    """Returns the scores one after the other."""

    def __init__(self, scores=SCORES):
        self.scores = [score for pair in scores for score in pair]

    def __call__(self, model, given):
        return self.scores.pop(0)


def options(evaluate, metric="loss", **others):
    auto = {"every_max": 16, "evaluate": evaluate, "evaluate_metric": metric, "outer": "nesterov"}
    return gradcast.Options(local=gradcast.LocalSteps("auto", **auto | others))


def begin(evaluate, state=None, **others):
    module = net(0)
    optimizer = adamw(module)
    handle = gradcast.attach(module, optimizer, options=options(evaluate, **others))
    for name, part in {"module": module, "optimizer": optimizer, "handle": handle}.items():
        if state is not None:
            part.load_state_dict(state[name])
    return module, optimizer, handle


class Paced(Reference):
    """``scores``: of all ranks, in order."""

    def __init__(self, ranks, overlap, outer, scores):
        super().__init__(net(0), adamw, ranks, 16, overlap, outer)
        self.overlap, self.scores = overlap, list(scores)
        self.total = self.measured = 0
        self.follow(FIRST)

    def follow(self, every):
        for _, _, _, _, outer in [part for parts in self.parts for part in parts]:
            for state in outer.state.values():
                if state.get("momentum_buffer") is not None:
                    state["momentum_buffer"] *= every / self.every
        self.every, self.schedule = every, self.schedule.at(every, self.overlap)

    def after_step(self):
        self.total += 1
        if (self.step + 1) % self.every or self.total - self.measured < 2 * self.every:
            super().after_step()
            return
        for number in self.schedule.applied(self.step + 1):
            self.apply(number, self.merge)
        for number in list(self.sent):
            self.apply(number, self.merge)
        for number in range(len(self.parts)):
            self.take(number)
            self.apply(number, 0.0)
        own, common = self.scores.pop(0)
        self.step, self.measured = 0, self.total
        self.follow(next_every("loss", self.every, gap_of("loss", [own], [common]), 16)[0])


@pytest.mark.parametrize(
    ("outer", "overlap"), [("nesterov", None), ("average", 0), pytest.param("nesterov", 3, marks=pytest.mark.slow)]
)
@on_ranks(2)
def test_rounds_of_all_lengths_have_the_bits_of_the_reference(rank, outer, overlap):
    reference = Paced(rank.size, overlap, outer, SCORES)
    with often(), heard() as lines:
        module, optimizer, handle = begin(Scripted(), outer=outer, overlap=overlap)
        found, path, step = [], [], 0
        while len(path) < len(PATH):
            train(module, optimizer, rank.index, step)
            reference.run(1, step)
            step += 1
            stats = handle.stats()["local_steps"]
            if reference.measured == step:
                path.append(stats["sync_every"])
                found += differences(module, reference, rank.index, 0)
                found += [] if stats["pace"]["step"] == step and stats["in_flight"] == [] else [str(stats)]
                found += [] if stats["outer_overlap"] < path[-1] else ["overlap"]
        train(module, optimizer, rank.index, step)
        reference.run(1, step)
        handle.end_round()
        reference.end()
        found += differences(module, reference, rank.index, 0)
        handle.detach()
    found += [] if path == PATH else [str(path)]
    told = [line for line in lines if "instead of" in line]
    found += [] if len(told) == (len(PATH) - 1 if rank.index == 0 else 0) else lines
    return found + ([] if rank.index or any("every 8 (1 to 16 as data allow)" in line for line in lines) else lines)


@pytest.mark.parametrize("overlap", [None, pytest.param(0, marks=pytest.mark.slow)])
@on_ranks(2)
def test_a_checkpoint_has_the_steps_and_the_rule_goes_on(rank, overlap):
    """Saved right after a change, and inside rounds of 16, 4 and 1 steps."""
    with often():
        module, optimizer, handle = begin(evaluate := Scripted(), overlap=overlap)
        states = {}
        for step in range(90):
            train(module, optimizer, rank.index, step)
            if step + 1 in (16, 37, 65, 77):
                states[step + 1] = saved(module, optimizer, handle), list(evaluate.scores)
        expected, kept = module.state_dict(), handle.stats()["local_steps"]
        handle.detach()
        found = []
        for done, (state, scores) in states.items():
            evaluate = Scripted([])
            evaluate.scores = scores
            again, optimizer, handle = begin(evaluate, state, overlap=overlap)
            for step in range(done, 90):
                train(again, optimizer, rank.index, step)
            same = all(map(torch.equal, again.state_dict().values(), expected.values()))
            found += [] if same and handle.stats()["local_steps"] == kept else [f"resumed after {done} steps"]
            handle.detach()
    return found


@on_ranks(2)
def test_evaluate_gets_the_model_and_its_batch_and_disturbs_nothing(rank):
    seen = []

    def clean(model, given):
        seen.append((model.training, torch.is_grad_enabled(), given))
        return torch.tensor([1.0])

    def careless(model, given):
        random.random()
        model.train()
        with torch.enable_grad():
            model(torch.randn(6, 40)).sum().backward()
        return 1.0

    ends = []
    with often():
        for evaluate in (clean, careless):
            torch.manual_seed(5)
            random.seed(5)
            module, optimizer, handle = begin(evaluate, evaluate_batch="mine")
            module.conv.eval()
            for step in range(40):
                train(module, optimizer, rank.index, step)
            modes = [each.training for each in module.modules()]
            gradients = [each.grad for each in module.parameters() if each.grad is not None]
            chances = [torch.get_rng_state(), torch.tensor(random.random())]
            ends.append((modes, [*module.state_dict().values(), *gradients, *chances]))
            handle.detach()
    found = [] if seen == [(False, False, "mine")] * 2 else [str(seen)]
    found += [] if ends[0][0] == ends[1][0] and not all(ends[0][0]) else ["modes"]
    return found + ([] if all(map(torch.equal, ends[0][1], ends[1][1])) else ["another training"])


@on_ranks(2)
def test_what_evaluate_must_not_return_is_told_on_every_rank(rank):
    def raises(model, given):
        raise KeyError("a\nlabel")

    cases = [
        (raises, "loss", "has raised KeyError"),
        (lambda model, given: math.nan, "loss", "has returned nan"),
        (lambda model, given: None, "loss", "has returned None"),
        (lambda model, given: torch.ones(2), "loss", "has returned tensor"),
        (lambda model, given: 97.5, "accuracy", "an accuracy from 0 to 1"),
    ]
    found = []
    for wrong, metric, words in cases:
        evaluate = wrong if rank.index == 1 else lambda model, given: 0.5
        with often():
            module, optimizer, handle = begin(evaluate, metric=metric)
            run = functools.partial(train, module, optimizer, rank.index)
            code, message = error_of(lambda run=run: [run(step) for step in range(40)])
            again, _ = error_of(lambda run=run: run(40))
        is_right = code == again == "invalid_use" and words in message and "on rank 1 after 16 steps" in message
        found += [] if is_right and "\n" not in message else [message]
        handle.detach(wait_s=1.0)
    return found


@on_ranks(1)
def test_a_round_goes_on_with_the_same_limit_only(rank):
    module, optimizer, handle = begin(Scripted())
    for step in range(9):
        train(module, optimizer, rank.index, step)
    state = saved(module, optimizer, handle)
    handle.detach()
    return not_refused(lambda: begin(Scripted(), state, every_max=32), "every_max 16, and here it is 32")


@on_ranks(1)
def test_between_rounds_a_lower_limit_shortens_the_momentum_too(rank):
    module, optimizer, handle = begin(Scripted())
    for step in range(8):
        train(module, optimizer, rank.index, step)
    handle.end_round()
    state = saved(module, optimizer, handle)
    handle.detach()
    module, optimizer, handle = begin(Scripted(), state, every_max=4)
    before, after = (each["tensors"]["momentum"] for each in (state["handle"], handle.state_dict()))
    found = [name for name, each in after.items() if not torch.equal(each, before[name] / 2)]
    found += [] if handle.stats()["local_steps"]["sync_every"] == 4 and any(map(torch.any, before.values())) else ["H"]
    handle.detach()
    return found


class Merged(torch.nn.Linear):
    """In evaluation mode another matrix is in its weight."""

    is_merged = False

    def train(self, mode=True):
        super().train(mode)
        if self.is_merged == mode:
            self.weight.data += -1.0 if mode else 1.0
            self.is_merged = not mode
        return self


def test_modules_undo_what_evaluation_mode_did_in_them():
    model = torch.nn.Sequential(Merged(2, 2), Merged(2, 2), torch.nn.Linear(2, 2))
    for each in model[:2]:
        torch.nn.init.zeros_(each.weight)
    model[1].eval()
    for _ in range(2):
        with undisturbed(model, torch.device("cpu")):
            assert not any(each.training for each in model.modules())
            assert model[0].is_merged
        assert [(each.is_merged, each.training, each.weight[0, 0].item()) for each in model[:2]] == [
            (False, True, 0.0),
            (True, False, 1.0),
        ]
        assert model.training
        assert model[2].training


@on_ranks(2)
def test_ranks_that_evaluate_differently_are_refused(rank):
    module = net(0)
    own = options(Scripted(), metric=("loss", "accuracy")[rank.index])
    attach = functools.partial(gradcast.attach, module, adamw(module), options=own)
    return not_refused(attach, "options.local.evaluate_metric is loss on rank 0")


@on_ranks(1)
def test_one_worker_goes_to_the_limit(rank):
    with often():
        module, optimizer, handle = begin(lambda model, given: float((model(given) - given).square().mean()),
                                          outer="average", evaluate_batch=batch(0, 0))  # fmt: skip
        for step in range(20):
            train(module, optimizer, rank.index, step)
        found = [] if handle.stats()["local_steps"]["sync_every"] == 16 else ["steps"]
        handle.detach()
    return found
