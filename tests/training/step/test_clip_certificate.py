"""Steps that gradcast certifies not to need clipping: torch's numbers, without waiting for all gradients."""

import math
import unittest.mock

import pytest

import gradcast
from gradcast.training.plan import candidates, proposals
from gradcast.training.step.clip_certificate import ClipCertificate
from training.inside import session_of
from training.models import Branches
from training.needs import torch
from training.pair import Pair
from training.pool import on_ranks
from training.step.test_graph_changes import USES

nn = torch.nn
MAX_NORM = 1.0
# What the ranks' gradients have in common, and how often a step of each kind is certified.
QUIET, LOUD, OPPOSED = "quiet", "loud", "opposed"


def train(rank, kinds, optimizer="adamw foreach", model="plain", norm_type=2.0, arguments=(), asks=False, **options):
    """Steps of these kinds. Returns the pair, and for each step after the warm-up whether it was certified, and so did
    not wait for all gradients. ``asks``: for the clipping before step(), as a framework does."""
    options |= {"policy": "p3", "clip": gradcast.Clip(norm=MAX_NORM, norm_type=norm_type)}
    pair = Pair(rank, model, optimizer, ddp_options={"find_unused_parameters": True}, **options)
    certified = []
    exchange = session_of(pair.handle).exchange
    exchange.wait_all = unittest.mock.Mock(wraps=exchange.wait_all)
    for number, kind in enumerate([QUIET] * 5 + list(kinds)):
        batch = pair.theirs.task.batch(0, number)
        theirs, ours = pair.modules
        given = arguments[number % len(arguments)][rank.index] if arguments else ()
        loss = pair.theirs.task.loss(theirs, batch, *given)
        used = [p for p in theirs.parameters() if p.requires_grad]
        gradients = [g for g in torch.autograd.grad(loss, used, allow_unused=True) if g is not None]
        norm = nn.utils.get_total_norm(gradients, norm_type)
        size = {QUIET: 0.1, LOUD: 10.0, OPPOSED: 2.0, "nan": math.nan, "zero": 0.0, "huge": 1e30}[kind]
        factor = size / norm.item() * (-0.9 if kind == OPPOSED and rank.index else 1.0)
        exchange.wait_all.reset_mock()
        for _, side in pair.rounds(1):
            side.optimizer.zero_grad()
            (factor * side.task.loss(side.forward, batch, *given)).backward()
            if side is pair.theirs:
                total = nn.utils.clip_grad_norm_(theirs.parameters(), MAX_NORM, norm_type)
            elif asks:
                early = session_of(pair.handle).early_clipping
                norm = early.clip(list(ours.parameters()), refuse_nonfinite=False)
            side.optimizer.step()
        for parameter in ours.parameters():  # reads one after the other, as forward does, but no norm of all
            parameter.sum()
        certified.append(session_of(pair.handle).cycle.gradients.clipping.certified)
        assert exchange.wait_all.called != certified[-1]
        found = norm if asks else torch.tensor(pair.handle.stats()["grad_norm"], dtype=total.dtype)
        torch.testing.assert_close(found, total, rtol=0, atol=0, equal_nan=True)
    return pair, certified[5:]


@pytest.mark.parametrize(
    ("optimizer", "asks"), [("adamw foreach", False), ("sgd plain", True), ("adam fused", False), ("adamw plain", True)]
)
@on_ranks(2)
def test_each_kind_of_step_equals_torch(rank, optimizer, asks):
    kinds = [QUIET, LOUD, OPPOSED, QUIET, QUIET, OPPOSED, LOUD, QUIET]
    pair, certified = train(rank, kinds, optimizer, asks=asks)
    # An opposed step is certified if all its gradients have arrived early.
    assert [kind for kind, known in zip(kinds, certified, strict=True) if known and kind != OPPOSED] == [QUIET] * 4
    assert pair.handle.stats()["clipping"]["certified_share"] > 0.4
    return pair.differences()


@on_ranks(2)
def test_a_plan_that_waits_tries_no_certificate(rank):
    """Planning has found that certificates gain nothing."""

    def best(profile, modes, _variation, options, *_):
        return candidates.choose_plan(profile, modes[-1], options)

    with unittest.mock.patch.object(proposals, "best_for_steps", best):
        pair, certified = train(rank, [QUIET, LOUD, QUIET])
    assert (pair.handle.plan.mode, certified) == ("hook", [False] * 3)
    assert pair.handle.stats()["clipping"]["certified_share"] is None
    return pair.differences()


@on_ranks(2)
def test_norms_of_zero_and_inf(rank):
    """The huge gradients are finite, and their norm is not: torch makes them 0."""
    pair, certified = train(rank, [QUIET, "zero", "huge", QUIET])
    assert certified == [True, True, False, True]
    return pair.differences()


@on_ranks(2)
def test_nan_is_never_certified(rank):
    pair, certified = train(rank, [QUIET, "nan"])
    assert certified == [True, False]
    pair.handle.flush()
    for module in pair.modules:
        for parameter in module.parameters():
            assert parameter.isnan().all()


@pytest.mark.parametrize(("norm_type", "expected"), [(1.0, True), (math.inf, True), (3.0, False)])
@on_ranks(2)
def test_norm_types(rank, norm_type, expected):
    """Other types than 1, 2 and inf wait, and are torch's too."""
    pair, certified = train(rank, [QUIET, LOUD, QUIET], norm_type=norm_type)
    assert certified == [expected, False, expected]
    return pair.differences()


@on_ranks(2)
def test_parameters_without_gradients(rank):
    """One rank's, or all ranks' passes leave a branch out; what .grad was before then counts."""
    uses = [[(use,) for use in ranks] for ranks in USES]
    pair, certified = train(rank, [QUIET, LOUD, QUIET, QUIET] * 3, model=Branches, arguments=uses)
    assert certified == [True, False, True, True] * 3
    return pair.differences()


@on_ranks(2)
def test_accumulated_gradients(rank):
    pair = Pair(rank, "plain", "adamw fused", policy="p3", clip=gradcast.Clip(norm=1e3))
    for _, side in pair.rounds(8):
        side.optimizer.zero_grad()
        with side.no_sync():
            side.task.loss(side.forward, side.batch(0)).backward()
        side.task.loss(side.forward, side.batch(1)).backward()
        if side is pair.theirs:
            nn.utils.clip_grad_norm_(side.module.parameters(), 1e3)
        side.optimizer.step()
    assert pair.handle.stats()["clipping"]["certified_share"] > 0
    return pair.differences()


@on_ranks(2)
def test_values_are_clipped_by_part(rank):
    pair = Pair(rank, "plain", "adamw foreach", policy="p3", clip=gradcast.Clip(value=1e-3))
    for _, side in pair.rounds(9):
        side.optimizer.zero_grad()
        side.loss().backward()
        if side is pair.theirs:
            nn.utils.clip_grad_value_(side.module.parameters(), 1e-3)
        side.optimizer.step()
    return pair.differences()


WIRES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def summed(sent, dtype, wire):
    """What arrives of these ranks' gradients, with the roundings of the wire."""
    cast = WIRES[wire] if dtype == torch.float32 else None
    if cast is None:
        total = sent[0].clone()
        for each in sent[1:]:
            total += each
        return total
    return sum(each.to(cast).float() for each in sent).to(cast).float()


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("wire", list(WIRES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_bounds_hold_for_what_torch_computes(dtype, wire, norm_type):
    """Equal gradients reach the triangle's bound, equal elements the largest rounding, tiny ones underflow."""
    generator = torch.Generator().manual_seed(1)
    for world_size in (2, 5):
        for count in (1, 7, 1000, 30_001):
            for size in (1.0, 0.3, 1e-5, 1e-7, 1e-30):
                for same in (True, False):
                    shape = torch.full((count,), size) if same else torch.randn(count, generator=generator) * size
                    signs = [1.0] * world_size if same else torch.rand(world_size, generator=generator).tolist()
                    sent = [(shape * sign / world_size).to(dtype) for sign in signs]
                    certificate = ClipCertificate([torch.empty(count, dtype=dtype)], 1.0, norm_type, world_size, wire)
                    sums = summed([torch.linalg.vector_norm(each, norm_type) for each in sent], dtype, wire)
                    computed = torch.linalg.vector_norm(summed(sent, dtype, wire), norm_type)
                    bound = certificate.bounds(sums.unsqueeze(0))
                    assert computed.double() <= bound, (world_size, count, size, same)
                    for factor in (1e-3, 0.7, 1e3):
                        scaled = torch.linalg.vector_norm(summed(sent, dtype, wire).mul_(factor), norm_type).double()
                        bound_of_scaled = certificate.bounds(sums.unsqueeze(0), factor)
                        assert scaled <= bound_of_scaled or scaled.isinf(), (world_size, count, size, same, factor)
                    if size == 1.0 and same and torch.isfinite(computed):
                        assert bound <= computed.double() * 1.5 + 1e-6, "the bound is of no use"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("element", [1.0, 0.3, 1.7])
@pytest.mark.parametrize("shape", [(20_000_003,), (4001, 5003)])
def test_torch_errs_no_more_than_the_growth(shape, element, dtype):
    """Rounding drifts most where all elements are equal. A later torch that sums differently is found here."""
    values = torch.full(shape, element).to(dtype)
    exact = values[(0,) * values.ndim].item() * math.sqrt(values.numel())
    certificate = ClipCertificate([values], 1e9, 2.0, 1, "fp32")
    # Of one rank's exact norm the bound is that of torch's.
    assert torch.linalg.vector_norm(values).item() <= certificate.bounds(torch.tensor([exact])).item()
    assert exact <= certificate.bounds(torch.linalg.vector_norm(values).double().unsqueeze(0)).item()
    # Elsewhere torch adds up element by element, and the bound of so many is of little use.
    if dtype == torch.float32 and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert certificate.bounds(torch.tensor([exact])).item() < 1.2 * exact


def test_the_total_is_certified_only_with_a_margin():
    certificate = ClipCertificate([torch.empty(3)], 1.0, 2.0, 2, "fp32")
    assert certificate.hold(torch.tensor([0.99, 0.1], dtype=torch.float64))
    for bounds in ([1.0 - 1e-9, 0.0], [math.nan, 0.0], [math.inf, 0.0], [0.8, 0.8]):
        assert not certificate.hold(torch.tensor(bounds, dtype=torch.float64))
