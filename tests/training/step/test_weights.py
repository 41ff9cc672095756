"""Weighted means: with uneven shares, a step is that of one process with the whole batch, in any loop."""

import contextlib
import copy
import itertools
import math
from unittest import mock

import pytest

import gradcast
from training import compare
from training.attached import Attached, attach, not_refused, planning
from training.models import Branches, ConvNet
from training.needs import torch
from training.pair import Pair
from training.pool import on_ranks
from training.step.test_graph_changes import USES

pytest.importorskip("training.needs")
from gradcast.training.compat import extension
from gradcast.training.step import weights

nn = torch.nn
LR = 0.1
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}
# Samples of each rank, step by step. A rank with 0 takes part without a backward pass, also in the very first step.
COUNTS = [(4, 0, 3), (4, 4, 4), (4, 4, 4), (5, 1, 3), (1000, 1, 1), (1, 1000, 2), (7, 7, 7), (7, 7, 7), (0, 3, 5)]
COUNTS += [(3, 0, 0), (9, 9, 8), (1000, 1000, 1), (1, 1, 1), (2, 0, 1)]


def layers(dtype=torch.float32):
    torch.manual_seed(0)
    sizes = (12, 40, 30, 20, 5)
    parts = [part for size in itertools.pairwise(sizes) for part in (nn.Linear(*size), nn.Tanh())]
    return nn.Sequential(*parts).to(dtype)


def batch(rank, number, count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(100 * number + rank)
    return torch.randn(count, 12, generator=generator).to(dtype)


def loss_of(module, samples, *arguments):
    return module(samples, *arguments).square().mean(0).sum()


class Uneven:
    """A module under gradcast on a rank, compared with one process that has the batches of all ranks."""

    def __init__(self, rank, mode, module, called=None, **options):
        self.rank, self.module = rank.index, module
        self.optimizer = torch.optim.SGD(module.parameters(), lr=LR)
        self.handle = attach(called or module, self.optimizer, mode, **options)
        self.clips = lambda parameters: None

    def weigh(self, number, count, *arguments):
        """This rank's part of a step: its backward passes."""
        with self.handle.weight(count):
            if count:
                dtype = next(self.module.parameters()).dtype
                loss_of(self.module, batch(self.rank, number, count, dtype), *arguments).backward()

    def step(self, run):
        self.optimizer.zero_grad()
        run()
        self.optimizer.step()

    def compared(self, run, whole, tolerance):
        """How a step differs from that of one process. ``whole(module)``: the loss over all batches."""
        self.handle.flush()
        reference = copy.deepcopy(self.module).double()
        reference.zero_grad()
        self.step(run)
        self.handle.flush()
        whole(reference).backward()
        self.clips(reference.parameters())
        found = []
        size = float(torch.stack([each.grad.norm() for each in reference.parameters() if each.grad is not None]).norm())
        for (name, ours), theirs in zip(self.module.named_parameters(), reference.parameters(), strict=True):
            if (ours.grad is None) != (theirs.grad is None):
                found.append(f"{name}: {ours.grad} instead of {theirs.grad}")
            if ours.grad is None or theirs.grad is None:
                continue
            updated = theirs - LR * theirs.grad
            for what, own, exact in (("gradient", ours.grad, theirs.grad), ("value", ours.data, updated)):
                error = float((own - exact).norm()) / max(size, float(exact.norm()))
                found += [] if error <= tolerance else [f"{what} of {name} differs by {error}"]
        return found

    def trained(self, counts, tolerance, *, every=2, before=lambda number: None):
        found = []
        for number, each in enumerate(counts):
            before(number)

            def run(number=number, each=each):
                self.weigh(number, each[self.rank])

            def whole(module, number=number, each=each):
                parts = [batch(rank, number, count, torch.float32) for rank, count in enumerate(each)]
                return loss_of(module, torch.cat(parts).double())

            if number % every == every - 1:
                found += [f"step {number}: {wrong}" for wrong in self.compared(run, whole, tolerance)]
            else:
                self.step(run)
        self.handle.detach()
        return found


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float64, {}), (torch.float32, {"plan": planning("fifo", in_flight=2)})],
    ids=["float64", "float32"],
)
@on_ranks(3)
def test_the_mean_is_that_of_one_process(rank, mode, dtype, options):
    uneven = Uneven(rank, mode, layers(dtype), **options)
    return uneven.trained(COUNTS + COUNTS, TOLERANCES[dtype])


@pytest.mark.parametrize("weight", [7, 0.1])
@on_ranks(2)
def test_where_all_weights_are_equal_the_bits_are_ddps(rank, mode, weight):
    pair = Pair(rank, "transformer", "adam plain", mode=mode)
    for _, side in pair.rounds(12):
        side.optimizer.zero_grad()
        loss = side.loss()
        with pair.handle.weight(weight) if side is pair.ours else contextlib.nullcontext():
            loss.backward()
        side.optimizer.step()
    return pair.end()


@on_ranks(3)
def test_sums_beyond_24_bits_are_exact(rank, mode):
    """The loss of one sample counts as one token of 2^24 and more."""
    uneven = Uneven(rank, mode, layers(torch.float64))
    found = []
    for number in range(10):
        given = [2**24 + 1, 2**24 + 3, 2**40 + 1][number % 3 :] + [5, 7, 9][: number % 3]

        def run(number=number, given=given):
            with uneven.handle.weight(given[rank.index]):
                loss_of(uneven.module, batch(rank.index, number, 2, torch.float64)).backward()

        def whole(module, number=number, given=given):
            losses = [loss_of(module, batch(each, number, 2, torch.float64)) for each in range(rank.size)]
            return sum(n * loss for n, loss in zip(given, losses, strict=True)) / sum(given)

        found += uneven.compared(run, whole, 1e-12)
    return found


@on_ranks(3)
def test_micro_batches(rank, mode):
    """Some in no_sync, then two backward passes that both travel: each is a mean of its own, and they add up."""
    uneven = Uneven(rank, mode, layers(torch.float64))
    found = []
    for number in range(9):
        counts = COUNTS[number]
        samples = [
            [batch(each, 3 * number + part, counts[each], torch.float64) for each in range(3)] for part in range(3)
        ]

        def run(counts=counts, samples=samples):
            count = counts[rank.index]
            with uneven.handle.weight(2 * count):
                for part in (0, 1) if count else ():
                    with contextlib.nullcontext() if part else uneven.handle.no_sync():
                        (loss_of(uneven.module, samples[part][rank.index]) / 2).backward()
            with uneven.handle.weight(count):
                if count:
                    loss_of(uneven.module, samples[2][rank.index]).backward()

        def whole(module, samples=samples):
            return loss_of(module, torch.cat([*samples[0], *samples[1]])) + loss_of(module, torch.cat(samples[2]))

        found += uneven.compared(run, whole, 1e-12)
    return found


@pytest.mark.parametrize("max_norm", [0.05, 1e6], ids=["clips", "does not clip"])
@on_ranks(3)
def test_clipping_by_norm(rank, max_norm):
    uneven = Uneven(rank, "overlap", layers(torch.float64), clip=gradcast.Clip(norm=max_norm), policy="fifo")
    uneven.clips = lambda parameters: nn.utils.clip_grad_norm_(list(parameters), max_norm)
    found = uneven.trained(COUNTS, 1e-12, every=3)
    share = uneven.handle.stats()["clipping"]["certified_share"]
    return found + ([] if (share > 0) == (max_norm > 1) else [f"certified in {share} of the steps"])


@on_ranks(3)
def test_clipping_by_value(rank):
    uneven = Uneven(rank, "overlap", layers(torch.float64), clip=gradcast.Clip(value=0.01))
    uneven.clips = lambda parameters: nn.utils.clip_grad_value_(list(parameters), 0.01)
    return uneven.trained(COUNTS, 1e-12)


@pytest.mark.parametrize(("wire", "tolerance"), [("bf16", 2**-7), ("fp16", 2**-9), ("int8", 0.05)])
@on_ranks(3)
def test_narrow_wires(rank, mode, wire, tolerance):
    """Whatever the ratios, a rounding is one of numbers of the mean's size."""
    return Uneven(rank, mode, layers(), wire=wire).trained(COUNTS + COUNTS, tolerance)


@on_ranks(2)
def test_int8_loses_nothing(rank):
    """What rounding keeps has the scale of the mean in each step, so over many steps its share vanishes."""
    uneven = Uneven(rank, "hook", layers(), wire="int8")
    parameter, total, expected = uneven.module[2].weight, 0.0, 0.0
    for number in range(60):
        counts = [(1, 1000), (300, 2), (1, 1)][number % 3]
        uneven.optimizer.zero_grad()
        uneven.weigh(number, counts[rank.index])
        total = total + parameter.grad
        reference = copy.deepcopy(uneven.module).double()
        reference.zero_grad()
        loss_of(reference, torch.cat([batch(each, number, counts[each]) for each in range(2)]).double()).backward()
        expected = expected + reference[2].weight.grad
    error = float((total - expected).norm() / expected.norm())
    return [] if error < 1e-3 else [f"the sum over 60 steps differs by {error}"]


@on_ranks(2)
def test_parameters_that_ranks_leave_out(rank, mode):
    torch.manual_seed(0)
    uneven = Uneven(rank, mode, Branches().double())
    found = []
    for number in range(3 * len(USES)):
        uses, counts = USES[number % len(USES)], COUNTS[number % len(COUNTS)][:2]

        def run(number=number, uses=uses, counts=counts):
            uneven.weigh(number, counts[rank.index], uses[rank.index])

        def whole(module, number=number, uses=uses, counts=counts):
            losses = [
                count * loss_of(module, batch(each, number, count).double(), uses[each])
                for each, count in enumerate(counts)
                if count
            ]
            return sum(losses) / sum(counts)

        # If no rank has used a parameter, its gradient is none, as that of one process.
        found += uneven.compared(run, whole, 1e-12)
    return found


@pytest.mark.parametrize("wrap", [False, True])
@on_ranks(3)
def test_ranks_without_samples_have_the_buffers(rank, mode, wrap):
    torch.manual_seed(rank.index)
    bare = ConvNet()
    module = nn.parallel.DistributedDataParallel(bare) if wrap else bare
    optimizer = torch.optim.SGD(bare.parameters(), lr=LR)
    handle = attach(module, optimizer, mode)
    for counts in [*COUNTS, (3, 3, 3)]:
        count = min(20, counts[rank.index])
        optimizer.zero_grad()
        with handle.weight(count):
            if count:
                loss_of(module, torch.randn(count + 1, 1, 12, 12)).backward()
        optimizer.step()
    handle.flush()
    module(torch.zeros(2, 1, 12, 12))  # brings the buffers of the last step
    everyone = rank.gather("state", {name: each.tolist() for name, each in bare.state_dict().items()})
    own = everyone[rank.index]
    return [name for name, value in everyone[0].items() if "running" not in name and value != own[name]]


@on_ranks(2)
def test_what_a_rank_without_samples_computes_does_not_count(rank, mode):
    uneven = Uneven(rank, mode, layers(torch.float64))

    def weigh(number, count):
        with uneven.handle.weight(count):
            samples = batch(rank.index, number, count or 2, torch.float64)
            loss_of(uneven.module, samples if count else samples * math.nan).backward()

    uneven.weigh = weigh
    return uneven.trained(4 * [(3, 5), (4, 0)], 1e-12, every=1)


@on_ranks(3)
def test_the_samples_of_forward_are_the_weight(rank, mode):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = layers(torch.float64)

        def forward(self, *, samples, scale=None):
            return self.inner(samples)

    uneven = Uneven(rank, mode, Named(), weight="samples")
    found = []
    for number, counts in enumerate([(3, 1, 2), *COUNTS[3:8], (5, 0, 1), (3, 3, 3), (64, 64, 5)]):
        parts = [batch(each, number, count, torch.float64) for each, count in enumerate(counts)]

        def run(own=parts[rank.index]):
            scale = torch.tensor(1.0)
            if not len(own):
                with uneven.handle.weight(0):
                    return
            with uneven.handle.no_sync():
                loss_of(lambda samples: uneven.module(scale=scale, samples=samples), own[:-1]).mul(
                    (len(own) - 1) / len(own)
                ).backward() if len(own) > 1 else None
            with torch.no_grad():
                uneven.module(samples=own)  # counts nothing
            loss_of(lambda samples: uneven.module(samples=samples), own[-1:]).div(len(own)).backward()

        def whole(module, parts=parts):
            return loss_of(lambda samples: module(samples=samples), torch.cat(parts))

        found += uneven.compared(run, whole, 1e-12)
    return found


@pytest.mark.parametrize("compiled", ["model", "blocks"])
@on_ranks(2)
def test_the_samples_of_compiled_models(rank, mode, compiled):
    module = layers(torch.float64)
    called = torch.compile(module, backend="eager") if compiled == "model" else module
    if compiled == "blocks":
        for each in module:
            each.compile(backend="eager")
    uneven = Uneven(rank, mode, module, called, weight="samples")
    uneven.weigh = lambda number, count: loss_of(called, batch(rank.index, number, count, torch.float64)).backward()
    return uneven.trained(3 * [(3, 4), (9, 2), (5, 5)], 1e-12, every=1)


@on_ranks(2)
def test_a_layer_thaws_while_a_rank_has_no_samples(rank, mode):
    module = layers(torch.float64)
    module[0].requires_grad_(False)
    uneven = Uneven(rank, mode, module)
    counts = [(4, 0) if number in (5, 11) else (4, 3) for number in range(12)]
    return uneven.trained(counts, 1e-12, every=1, before=lambda number: module[0].requires_grad_(number >= 5))


def test_a_single_worker():
    module = layers()
    optimizer = torch.optim.SGD(module.parameters(), lr=LR)
    handle = attach(module, optimizer)
    with handle.weight(3):
        loss_of(module, batch(0, 0, 3)).backward()
    expected = torch.autograd.grad(loss_of(module, batch(0, 0, 3)), module[0].weight)[0]
    assert compare.trees(module[0].weight.grad, expected) == []
    for weight in (0, -1, math.nan, "3", True, 2**53 + 2):
        assert not_refused(lambda weight=weight: handle.weight(weight), "the only worker") == []
    handle.detach()


def test_the_mean_of_equal_weights_is_that_weight():
    assert weights.exact_mean([0.1] * 3) == 0.1
    assert weights.exact_mean([2.0**53, 1.0, 1.0, 2.0]) == (2**53 + 4) / 4


@on_ranks(2)
def test_weights_travel_as_one_tensor_and_one_stream_serves_all_steps(rank, mode):
    """On a device a tensor per rank, and reading each, would cost the host time in each step; see also control.cc."""
    attached = Attached(nn.Linear(3, 3), mode)
    numbers = extension.load().Numbers

    def step():
        with attached.handle.weight(2 + rank.index):
            attached.step(torch.ones(2, 3))
        attached.handle.flush()

    with mock.patch.object(extension.load(), "Numbers", side_effect=numbers) as made:
        for _ in range(5):
            step()
        with torch.profiler.profile() as profile:
            step()
    attached.handle.detach()
    gathers = [each.name for each in profile.events() if "gather" in each.name and each.name.startswith("c10d::")]
    return [] if (made.call_count, gathers) == (1, ["c10d::_allgather_base_"]) else [made.call_count, gathers]


@pytest.mark.parametrize("where", ["first step", "first micro-batch"])
@on_ranks(2)
def test_a_rank_that_sends_nothing_is_in_the_pass_of_the_others(rank, where, mode):
    """Though parameters do not change behind it: by a learning rate of 0, or since another pass follows."""
    attached, micro_batches = Attached(torch.nn.Linear(8, 8), mode), 1 + (where == "first micro-batch")
    for number in range(8):
        attached.optimizer.param_groups[0]["lr"] = 0.0 if micro_batches == 1 and number == 0 else 0.1
        attached.optimizer.zero_grad()
        for micro_batch in range(micro_batches):
            is_empty = rank.index == 1 and micro_batch == 0 and number in (0, 4)
            with attached.handle.weight(0 if is_empty else 4):
                if not is_empty:
                    attached.module(torch.ones(4, 8)).sum().backward()
        attached.optimizer.step()
    attached.handle.detach()
