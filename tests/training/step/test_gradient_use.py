"""Programs that read or replace gradients between backward and the end of the step, in easily overlooked ways."""

import contextlib
import statistics
import threading
import time
from unittest import mock

import pytest

from gradcast.training.plan import agreement
from training import compare, optimizers
from training.attached import Attached, attach, error_of, not_refused
from training.models import TASKS
from training.needs import torch
from training.ours import Ours
from training.pool import on_ranks
from training.sides import differences
from training.twins import Twins

nn = torch.nn
TASK = TASKS["plain"]


def clip_in_hook(optimizer):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_norm_(parameters, 0.05) and None)


def replace_in_hook(optimizer):
    def replace(*_):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.full_like(p, 1e-3)

    optimizer.register_step_pre_hook(replace)


def count_after(optimizer):
    optimizer.calls = 0

    def count(*_):
        optimizer.calls += 1

    optimizer.register_step_post_hook(count)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("add_hook", [clip_in_hook, replace_in_hook, count_after], ids=lambda each: each.__name__)
@on_ranks(2)
def test_step_hooks_see_and_change_what_the_step_uses(rank, add_hook, set_to_none):
    twins = Twins(rank, "plain", "adam foreach")
    for _, optimizer, _ in twins.each():
        add_hook(optimizer)
    for _ in range(8):
        twins.step(set_to_none=set_to_none)
    assert [getattr(optimizer, "calls", 8) for _, optimizer, _ in twins.each()] == [8, 8]
    return twins.differences()


@pytest.mark.parametrize("when", ["before backward", "after backward"])
@on_ranks(2)
def test_gradients_that_are_given_other_memory(rank, mode, when):
    """``grad.data = …`` gives a gradient other memory, which is not the buffer's."""
    twins = Twins(rank, "plain", "adam plain", mode=mode)
    for number, module, optimizer, forward in twins.rounds(10):
        optimizer.zero_grad(set_to_none=number % 4 == 3)
        if when == "before backward" and number in (2, 6):
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad.data = parameter.grad.data.clone()
        twins.task.loss(forward, twins.batch()).backward()
        if when == "after backward" and number in (2, 6):
            for parameter in module.parameters():
                parameter.grad.data = parameter.grad.data.clamp(-1e-3, 1e-3)
        optimizer.step()
    return twins.differences()


@on_ranks(2)
def test_a_pass_without_sync_after_one_with(rank):
    """A pass that stays here after one that travels: DDP adds this rank's own gradient to the average."""
    twins = Twins(rank, "plain", "sgd foreach")
    for number, module, optimizer, forward in twins.rounds(8):
        optimizer.zero_grad()
        twins.task.loss(forward, twins.batch()).backward()
        with twins.no_sync(module):
            twins.task.loss(forward, twins.task.batch(5, number)).backward()
        optimizer.step()
    return twins.differences()


def skip_on_one_rank(rank, mode):
    """Rank 1 leaves one step() out in the warm-up: its own numbers change, the order of what travels must not."""
    module = TASK.module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    handle = attach(module, optimizer, mode, warmup_steps=4, policy="fifo")
    versions = []
    for number in range(9):
        optimizer.zero_grad()
        TASK.loss(module, TASK.batch(rank.index, number)).backward()
        if (rank.index, number) not in ((1, 1), (1, 3), (0, 6)):
            optimizer.step()
        handle.flush()
        versions.append(handle.plan_version)
    return versions


def test_a_step_that_one_rank_leaves_out_does_not_change_its_plan(ranks, mode):
    versions = ranks.run(2, skip_on_one_rank, mode)
    assert versions[0] == versions[1]
    assert versions[0][-1] == 5, "four of the warm-up, and the plan"


SLOW_S = 0.05


def clip_beside_a_slow_rank(rank, mode):
    """ms per step that rank 0 is found to compute in forward, and to be busy, while it clips by itself and waits."""
    module = TASK.module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    handle = attach(module, optimizer, mode, warmup_steps=4, adapt=True)
    busy_ns = []
    for number in range(12):
        optimizer.zero_grad()
        loss = TASK.loss(module, TASK.batch(rank.index, number))
        time.sleep(SLOW_S * rank.index)  # of its backward pass, so that forward is short on both
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
        record = handle._diagnostics().open_record
        busy_ns.append(time.perf_counter_ns() - record.start_ns - record.total_ns("wait"))
    found = handle.profile.forward_ns / 1e6, statistics.median(busy_ns[6:]) / 1e6
    handle.detach()
    return found


def test_waiting_for_gradients_that_the_loop_reads_is_no_compute(ranks, mode):
    (forward_ms, busy_ms), (_, slow_busy_ms) = ranks.run(2, clip_beside_a_slow_rank, mode)
    assert slow_busy_ms > 1e3 * SLOW_S, "it sleeps"
    assert forward_ms < 0.5e3 * SLOW_S
    assert busy_ms < 0.5e3 * SLOW_S


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(12, 10), nn.Linear(12, 10)])

    def forward(self, x, part):
        return self.parts[part](x)


@on_ranks(2)
def test_parts_of_a_model_by_turns(rank):
    """Two losses of two halves of the module, each with its own forward, before one step."""
    twins = Twins(rank, Part, policy="fifo")
    for _, module, optimizer, _ in twins.rounds(9):
        optimizer.zero_grad()
        for part in range(2):
            twins.task.loss(module, twins.batch(), part).backward()
        if module is twins.modules[0]:  # DDP wants all in one pass: its sum by hand
            for parameter in module.parameters():
                parameter.grad.mul_(0.5)
                torch.distributed.all_reduce(parameter.grad)
        optimizer.step()
    return twins.differences()


class Codebook(nn.Module):
    """Puts a new tensor into the place of a buffer, as vector quantization does."""

    def __init__(self, rank):
        super().__init__()
        self.linear = nn.Linear(12, 10)
        self.rank = rank
        self.register_buffer("codes", torch.full((3,), float(rank)))

    def forward(self, x):
        self.codes = self.codes + 1.0 + self.rank
        return self.linear(x) + self.codes.sum() * 0.0


@on_ranks(2)
def test_buffers_that_a_module_replaces(rank):
    """Before each forward pass they are rank 0's: it counts by one, so after six passes it has 6, and rank 1 5 + 2."""
    ours = Ours(lambda: Codebook(rank.index), "sgd plain", rank.index)
    ours.train(range(6))
    return compare.trees(ours.bare.codes.tolist(), [6.0 + rank.index] * 3, "codes")


@on_ranks(2)
def test_two_forward_passes_of_a_module_with_batch_norm(rank, mode):
    """One backward over the sum of two forwards: each parameter's gradient comes once, though it is used twice. With
    DDP this needs broadcast_buffers=False: what it sends before the second one backward still needs."""
    twins = Twins(rank, "convnet", "adam plain", mode=mode)
    twins.theirs.broadcast_buffers = False
    for number, _, optimizer, forward in twins.rounds(6):
        optimizer.zero_grad()
        sum(twins.task.loss(forward, twins.task.batch(rank.index, number + part)) for part in (0, 50)).backward()
        optimizer.step()
    twins.handle.flush()
    return compare.trees(*(dict(module.named_parameters()) for module in reversed(twins.modules)))


def with_a_pass_left_out(side):
    """Every step calls the module twice, and uses the second result."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    called = side.called(module, optimizer)
    seen = []
    for number in range(6):
        optimizer.zero_grad()
        called(side.batch(number + 50))
        called(side.batch(number)).square().sum().backward()
        optimizer.step()
        module.eval()
        with torch.no_grad():
            seen.append(module(side.batch(0)).tolist())
        module.train()
    return seen


@on_ranks(2)
def test_buffers_are_sent_before_each_forward_pass(rank, mode):
    return differences(rank, with_a_pass_left_out, mode)


def step_again(side):
    module = TASK.module()
    both = optimizers.two_halves(module)
    called = side.called(module, both, policy="fifo")
    for number in range(8):
        for optimizer in both:
            optimizer.zero_grad(set_to_none=False)
        TASK.loss(called, TASK.batch(side.rank, number)).backward()
        both[1].step()
        float(module[8].weight.sum())
        both[1].step()
        both[1].zero_grad(set_to_none=False)
        both[0].step()
    return side.result(module)


@on_ranks(2)
def test_a_second_step_of_one_optimizer(rank):
    """Two optimizers; one takes a second step with the same gradients, which are then zeroed in place."""
    return differences(rank, step_again, "overlap")


@on_ranks(2)
def test_a_thread_that_flushes_in_the_middle_of_backward(rank):
    """A thread asks for the optimizer's state while backward runs, on one rank only."""
    twins = Twins(rank, "plain", "adam plain")
    middle = twins.ours.bare[4]

    def ask(*_):
        if rank.index == 0:
            thread = threading.Thread(target=lambda: (twins.ours.optimizer.state_dict(), twins.handle.flush()))
            thread.start()
            thread.join()

    for number in range(10):
        hook = middle.register_full_backward_hook(ask) if number % 3 == 2 else None
        twins.step()
        if hook is not None:
            hook.remove()
    return twins.differences()


@on_ranks(2)
def test_a_new_parameter_that_one_rank_refuses(rank):
    """A layer that no optimizer knows, on one rank: an error in every step on all, not in the first one alone."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    attached = Attached(module)
    codes = []
    for number in range(6):
        if number == 3:
            module.append(nn.Linear(1, 1))
            if rank.index == 1:
                attached.optimizer.add_param_group({"params": list(module[2].parameters())})
        codes.append(error_of(lambda: attached.step(torch.ones(2, 4)))[0])
    return compare.trees(codes, [None] * 3 + ["invalid_use"] * 3, "codes")


def compare_with_left_out_steps(rank, mode):
    """Rank 1 leaves a step out, and passes without sync write into what has arrived: no false alarm, no hang."""
    module = TASK.module()
    sgd = torch.optim.SGD(module.parameters(), lr=0.01)
    handle = attach(module, sgd, mode, policy="fifo", compare_every=3)
    for number in range(12):
        sgd.zero_grad()
        TASK.loss(module, TASK.batch(rank.index, number)).backward()
        with handle.no_sync():
            TASK.loss(module, TASK.batch(rank.index, 50 + number)).backward()
        if (rank.index, number) != (1, 4):
            sgd.step()
    handle.flush()
    return handle.stats()["step"]


def test_comparing_goes_by_iterations(ranks, mode):
    steps = ranks.run(2, compare_with_left_out_steps, mode)
    assert steps == ([12, 11] if mode == "overlap" else [12, 12])


def compare_with_a_pass_of_one_rank(rank, mode):
    """Before step(), rank 1 runs a backward pass that comes to none of the module's parameters."""
    module = TASK.module()
    sgd = torch.optim.SGD(module.parameters(), lr=0.01)
    handle = attach(module, sgd, mode, policy="fifo", compare_every=1)
    for number in range(6):
        sgd.zero_grad()
        batch = TASK.batch(rank.index, number)
        TASK.loss(module, batch).backward()
        if rank.index == 1:
            fast = {name: torch.nn.Parameter(p.detach().clone()) for name, p in module.named_parameters()}
            torch.func.functional_call(module, fast, batch[:1]).sum().backward()
        sgd.step()
    handle.flush()
    return compare.digest(module)


def test_a_pass_that_comes_to_no_gradient_compares_nothing(ranks, mode):
    first, second = ranks.run(2, compare_with_a_pass_of_one_rank, mode, timeout_s=20.0)
    assert first == second


@pytest.mark.parametrize("name", ["compare_every", "max_grad_norm", "wire"])
@on_ranks(2)
def test_options_that_differ_between_ranks(rank, name):
    values = {"compare_every": (0, 5), "max_grad_norm": (1.0, 2.0), "wire": ("fp32", "bf16")}[name]
    options = {name: values[rank.index]}
    sentence = f"options.{name} is {values[0]} on rank 0 and {values[1]} on rank 1; give all ranks the same"
    return not_refused(lambda: Attached(nn.Linear(2, 2), **options), sentence)


@on_ranks(3)
def test_a_plan_that_differs_on_one_rank(rank):
    """One rank comes to another plan than the others, as by a fault of memory."""
    true_hash = agreement.plan_hash
    wrong = mock.patch.object(agreement, "plan_hash", lambda *of: "0" + true_hash(*of)[1:])
    words = "the ranks do not agree on the plan", "rank 1"
    with wrong if rank.index == 1 else contextlib.nullcontext():
        return not_refused(lambda: Ours("plain", "sgd plain", rank.index), *words, code="invalid_plan")
