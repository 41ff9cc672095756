"""Wire formats: fp32 gradients travel as 16- or 8-bit numbers, and every rank has the bits that plain torch gives.

The reference knows nothing of blocks, layouts or plans: what a wire format gives does not depend on them, however many
ranks there are.
"""

import copy
import functools
from dataclasses import replace

import pytest

import gradcast
from training import compare
from training.attached import attach, heard, hosts_of, not_refused, planning
from training.int8_mean import Int8Mean
from training.models import TASKS, Branches
from training.needs import torch
from training.pair import Pair, Training
from training.plain import beside_plain_loop
from training.pool import on_ranks
from training.step.test_equality import CUT, Case

default_hooks = pytest.importorskip("torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
nn = torch.nn
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
STEPS = 14


def host_sums(term, ranks_per_host):
    """Each host's sum of this tensor, in fp32 and in the order of the ranks."""
    terms = [torch.empty_like(term) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(terms, term)
    hosts = range(0, len(terms), ranks_per_host)
    return [functools.reduce(torch.add, terms[first : first + ranks_per_host]) for first in hosts]


def average(parameters, wire, world_size, ranks_per_host):
    """Scaled, summed on each host, cast, added up in fp32 and in order, cast. Other types: scaled and summed."""
    for parameter in parameters:
        term = parameter.grad * (1 / world_size)
        if term.dtype == torch.float32:
            terms = [each.to(DTYPES[wire]).float() for each in host_sums(term, ranks_per_host)]
            parameter.grad = functools.reduce(torch.add, terms).to(DTYPES[wire]).float()
        else:
            torch.distributed.all_reduce(term)
            parameter.grad = term


@torch.no_grad()
def average_int8(parameters, mean):
    """The same for the wire format int8: the mean of what all ranks have."""
    for index, parameter in enumerate(parameters):
        gradient = torch.empty_like(parameter).copy_(parameter.grad)  # in the parameter's layout
        gradients = [torch.empty_like(parameter) for _ in range(mean.world_size)]
        flat = [each.as_strided((each.numel(),), (1,)) for each in (gradient, *gradients)]
        torch.distributed.all_gather(flat[1:], flat[0])
        parameter.grad = mean.of(index, gradients)


CASES = [
    ("int8", Case("transformer", "adam fused", 4, "overlap", False, planning(adapt=True), {"ranks_per_host": 2})),
    ("bf16", Case("convnet", "sgd plain", 4, "hook", False, replace(CUT, in_flight=2), {"ranks_per_host": 2})),
    ("int8", Case("transformer", "sgd plain", 3, "overlap", False, replace(CUT, in_flight=2))),
    ("int8", Case("convnet", "adamw fused", 4, "hook", True, CUT)),
    ("int8", Case("odd", "adam plain", 3, "overlap", False, planning("fifo", adapt=True))),
    ("int8", Case("plain", "sgd plain", 2, "overlap", False, options={"clip": gradcast.Clip(norm=0.1)})),
    ("fp16", Case("transformer", "sgd plain", 3, "overlap", False, replace(CUT, in_flight=2))),
    ("fp16", Case("convnet_last", "adam plain", 4, "overlap", True)),
    ("fp16", Case("mixed64", "adam foreach", 2, "hook", False, replace(CUT, in_flight=3))),
    ("bf16", Case("odd", "adam plain", 3, "overlap", False, planning("fifo", adapt=True))),
    ("bf16", Case("plain", "sgd plain", 3, "overlap", False, options={"clip": gradcast.Clip(norm=0.1)})),
]


def train_both(rank, wire, case):
    options = dict(case.options)
    ranks_per_host = options.pop("ranks_per_host", 1)
    with hosts_of(ranks_per_host):
        options |= {"mode": case.mode, "wrap": case.wrap, "wire": wire, "plan": case.plan}
        ours = Training(rank.index, case.task, case.optimizer, **options)
    mean = Int8Mean(list(ours.module.parameters()), rank.size, ranks_per_host)

    def averaged(reference, _):
        if wire == "int8":
            average_int8(reference.parameters(), mean)
        else:
            average(reference.parameters(), wire, rank.size, ranks_per_host)
        if "clip" in case.options:
            nn.utils.clip_grad_norm_(reference.parameters(), case.options["clip"].norm)

    return beside_plain_loop(ours, case.optimizer, STEPS, averaged)[0]


@pytest.mark.parametrize(("wire", "case"), CASES, ids=str)
def test_the_bits_of_the_reference_on_every_rank(ranks, wire, case):
    assert not any(ranks.run(case.world_size, train_both, wire, case))


@on_ranks(2)
def test_two_ranks_have_the_bits_of_ddps_bf16_hook(rank, mode):
    pair = Pair(rank, "transformer", mode=mode, wire="bf16")
    pair.theirs.forward.register_comm_hook(None, default_hooks.bf16_compress_hook)
    pair.train(10)
    return pair.differences()


def other_branches(rank, mode, wire):
    """Each rank leaves another branch out, then all leave the right one out."""
    torch.manual_seed(0)
    module = Branches()
    sgd = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    handle = attach(module, sgd, mode, policy="fifo", wire=wire)
    for number in range(10):
        before = module.right.weight.detach().clone()
        sgd.zero_grad()
        use = (("left",), ("right",))[(rank.index + number) % 2] if number % 5 < 3 else ("left",)
        module(TASKS["plain"].batch(rank.index, number)[0], use).square().mean().backward()
        sgd.step()
        handle.flush()
        assert torch.equal(before, module.right.weight) == (number % 5 >= 3), f"the right branch in step {number}"
    return compare.digest(module)


@pytest.mark.parametrize(
    ("mode", "wire", "world_size"), [("overlap", "bf16", 2), ("hook", "fp16", 3), ("overlap", "int8", 2)]
)
def test_usage_flags_travel_in_a_wire_format(ranks, mode, wire, world_size):
    assert len(set(ranks.run(world_size, other_branches, mode, wire))) == 1


@pytest.mark.parametrize("wire", DTYPES)
@on_ranks(2)
def test_what_the_format_cannot_hold_arrives_as_with_ddps_hook(rank, wire):
    """In hook mode, so that gradients can be looked at after backward."""
    modules = [nn.Linear(4, 1, bias=False) for _ in range(2)]
    theirs = nn.parallel.DistributedDataParallel(modules[0])
    theirs.register_comm_hook(None, getattr(default_hooks, f"{wire}_compress_hook"))
    attach(modules[1], None, "hook", wire=wire)
    for forward in (theirs, modules[1]):
        forward(torch.tensor([[1e6, -1e6, 1.0, float("nan")]])).backward()
    expected, found = (module.weight.grad.flatten().tolist() for module in modules)
    assert abs(found[0]) == (float("inf") if wire == "fp16" else pytest.approx(1e6, rel=1 / 256))
    return compare.trees(str(found), str(expected), "gradient")


@on_ranks(2)
def test_a_scaler_skips_what_fp16_cannot_hold(rank, mode):
    """A loss scale that fp16 does not hold: the step is skipped on all ranks, the scale falls, training goes on."""
    ours = Training(rank.index, "plain", "sgd plain", mode=mode, wire="fp16")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    is_changed = []
    for _ in range(12):
        ours.handle.flush()
        before, scale = compare.digest(ours.module), scaler.get_scale()
        ours.optimizer.zero_grad()
        scaler.scale(ours.loss()).backward()
        scaler.step(ours.optimizer)
        scaler.update()
        ours.after_step()
        ours.handle.flush()
        is_changed.append(compare.digest(ours.module) != before)
        assert is_changed[-1] == (scaler.get_scale() == scale)
    assert (is_changed[0], is_changed[-1]) == (False, True)
    result = compare.digest(ours.module), is_changed
    return [each for each in rank.gather("result", result) if each != result]


@on_ranks(2)
def test_int8_brings_what_is_not_finite_and_nothing_else_of_its_group(rank):
    module = nn.Linear(256, 1, bias=False)
    attach(module, None, "hook", wire="int8")
    inputs = torch.ones(1, 256)
    for number in range(2):
        if number == 1:
            inputs[0, :3] = torch.tensor([float("inf"), -float("inf"), float("nan")])
        module.zero_grad()
        module(inputs).sum().backward()
    found = module.weight.grad[0]
    assert found[:2].tolist() == [float("inf"), -float("inf")]
    assert found[2].isnan()
    return compare.trees(found[3:].tolist(), [0.0] * 125 + [1.0] * 128, "gradient")


@on_ranks(2)
def test_a_scaler_is_refused_with_int8(rank, mode):
    ours = Training(rank.index, "plain", "sgd plain", mode=mode, wire="int8")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(ours.loss()).backward()
    wrong = not_refused(lambda: scaler.step(ours.optimizer), "GradScaler", "options.wire='bf16'")
    ours.handle.detach()
    scaler.step(ours.optimizer)
    return wrong


def train_with_int8(rank, state=None):
    """Trains, from a state of this program or none. Returns the state before the last steps, and what they lead to."""
    ours = Training(rank.index, "transformer", "sgd plain", wire="int8", policy="fifo")
    if state is not None:
        ours.module.load_state_dict(state["module"])
        ours.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        ours.handle.load_state_dict(state["gradcast"])
        ours.count = 6
    else:
        ours.train(6)
    before = {
        "module": copy.deepcopy(ours.module.state_dict()),
        "optimizer": copy.deepcopy(ours.optimizer.state_dict()),
        "gradcast": ours.handle.state_dict(),
    }
    ours.train(3)
    ours.handle.flush()
    return before, compare.digest(ours.module)


@on_ranks(2)
def test_residuals_are_in_checkpoints(rank):
    state, expected = train_with_int8(rank)
    assert train_with_int8(rank, state)[1] == expected
    with heard() as lines:
        _, without = train_with_int8(rank, state | {"gradcast": {**state["gradcast"], "residuals": None}})
    assert without != expected, "the residuals matter"
    dropped = "the residuals of earlier gradients are dropped on rank"
    assert [line for line in lines if dropped in line] == [f"{dropped} {rank.index}: the checkpoint has none"]
    saved = state["gradcast"]["residuals"]
    name = next(iter(saved["tensors"]))
    other = {**saved, "tensors": {**saved["tensors"], name: torch.zeros(3)}}
    return not_refused(
        lambda: train_with_int8(rank, state | {"gradcast": {**state["gradcast"], "residuals": other}}),
        f"of another model: {name} has shape (3,) in it and has shape {tuple(saved['tensors'][name].shape)} here",
    )


def ranges(handle):
    return [(block.buffer, tuple(block.ranges)) for block in handle.plan.blocks]


@on_ranks(2)
def test_a_plan_made_without_is_followed_in_a_wire_format(rank, tmp_path):
    first = Training(rank.index, "plain", "sgd plain", plan=planning("p3", slice_elements=50))
    first.train(4)
    path = f"{tmp_path}/plan.json"
    if rank.index == 0:
        first.handle.save_plan(path)
    torch.distributed.barrier()
    ours = Training(rank.index, "plain", "sgd plain", plan=replace(planning(), file=path), wire="bf16")
    ours.train(4)
    stats = ours.handle.stats()
    assert (stats["wire"], stats["wire_bytes"]) == ("bf16", stats["bytes"] / 2)
    return compare.trees(ranges(ours.handle), ranges(first.handle), "blocks")


@on_ranks(2)
def test_statistics_tell_what_travels(rank):
    stats = []
    for wire in ("fp32", "fp16"):
        ours = Training(rank.index, "mixed64", "sgd plain", wire=wire)
        ours.train(4)
        stats.append(ours.handle.stats())
    singles = sum(place.end_bytes - place.lo_bytes for place in ours.handle.layout if place.dtype == torch.float32)
    plain, cast = stats
    assert (plain["wire"], cast["wire"]) == ("fp32", "fp16")
    assert plain["wire_bytes"] == plain["bytes"] == cast["bytes"]
    assert cast["bytes"] - cast["wire_bytes"] == singles / 2
