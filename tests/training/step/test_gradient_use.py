"""Programs that read or replace gradients between backward and the end of the step, in easily overlooked ways."""

import statistics
import threading
import time

import pytest

import gradcast
from training import compare, optimizers
from training.attached import Attached, error_of
from training.models import TASKS
from training.needs import torch
from training.ours import Ours
from training.pool import on_ranks
from training.sides import DDP, differences
from training.twins import Twins

nn = torch.nn


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


HOOKS = {function.__name__: function for function in (clip_in_hook, replace_in_hook, count_after)}


def step_hooks(rank, name, set_to_none):
    twins = Twins(rank, "plain", "adam foreach")
    for _, optimizer, _ in twins.each():
        HOOKS[name](optimizer)
    for _, _, optimizer, forward in twins.rounds(8):
        optimizer.zero_grad(set_to_none=set_to_none)
        twins.task.loss(forward, twins.batch()).backward()
        optimizer.step()
    calls = [getattr(optimizer, "calls", 8) for _, optimizer, _ in twins.each()]
    return twins.differences(), calls


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", HOOKS)
def test_step_hooks_see_and_change_what_the_step_uses(ranks, name, set_to_none):
    for found, calls in ranks.run(2, step_hooks, name, set_to_none):
        assert found == []
        assert calls == [8, 8]


@pytest.mark.parametrize("when", ["before backward", "after backward"])
@pytest.mark.parametrize("mode", ["overlap", "hook"])
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
    for _ in range(8):
        for (_, optimizer, forward), no_sync in zip(
            twins.each(), (twins.theirs.no_sync, twins.handle.no_sync), strict=True
        ):
            optimizer.zero_grad()
            twins.task.loss(forward, twins.batch()).backward()
            with no_sync():
                twins.task.loss(forward, twins.task.batch(5, twins.steps)).backward()
            optimizer.step()
        twins.after_step()
    return twins.differences()


def skip_on_one_rank(rank, mode):
    """Rank 1 leaves one step() out in the warm-up: its own numbers change, the order of what travels must not."""
    task = TASKS["plain"]
    module = task.module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    handle = gradcast.attach(
        module,
        optimizer if mode == "overlap" else None,
        options=gradcast.Options(adapt=False, warmup_steps=4, policy="fifo"),
    )
    versions = []
    for number in range(9):
        optimizer.zero_grad()
        task.loss(module, task.batch(rank.index, number)).backward()
        if (rank.index, number) not in ((1, 1), (1, 3), (0, 6)):
            optimizer.step()
        handle.flush()
        versions.append(handle.plan_version)
    return versions


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_a_step_that_one_rank_leaves_out_does_not_change_its_plan(ranks, mode):
    versions = ranks.run(2, skip_on_one_rank, mode)
    assert versions[0] == versions[1]
    assert versions[0][-1] == 5, "four of the warm-up, and the plan"


SLOW_S = 0.05


def clip_beside_a_slow_rank(rank, mode):
    """ms per step that rank 0 is found to compute in forward, and to be busy, while it clips by itself and waits."""
    task = TASKS["plain"]
    module = task.module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    options = gradcast.Options(warmup_steps=4)
    handle = gradcast.attach(module, optimizer if mode == "overlap" else None, options=options)
    busy_ns = []
    for number in range(12):
        optimizer.zero_grad()
        loss = task.loss(module, task.batch(rank.index, number))
        time.sleep(SLOW_S * rank.index)  # of its backward pass, so that forward is short on both
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
        record = handle._diagnostics().open_record
        busy_ns.append(time.perf_counter_ns() - record.start_ns - record.total_ns("wait"))
    found = handle.profile.forward_ns / 1e6, statistics.median(busy_ns[6:]) / 1e6
    handle.detach()
    return found


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_waiting_for_gradients_that_the_loop_reads_is_no_compute(ranks, mode):
    (forward_ms, busy_ms), (_, slow_busy_ms) = ranks.run(2, clip_beside_a_slow_rank, mode)
    assert slow_busy_ms > 1e3 * SLOW_S, "it sleeps"
    assert forward_ms < 0.5e3 * SLOW_S
    assert busy_ms < 0.5e3 * SLOW_S


@on_ranks(2)
def test_parts_of_a_model_by_turns(rank):
    """Two losses of two halves of the module, each with its own forward, before one step."""
    torch.manual_seed(0)
    theirs = nn.ModuleList([nn.Linear(12, 10), nn.Linear(12, 10)])
    torch.manual_seed(0)
    ours = nn.ModuleList([nn.Linear(12, 10), nn.Linear(12, 10)])

    class Part(nn.Module):
        def __init__(self, parts):
            super().__init__()
            self.parts = parts

        def forward(self, x, part):
            return self.parts[part](x)

    modules = [Part(theirs), Part(ours)]
    adams = [torch.optim.Adam(module.parameters(), lr=1e-2) for module in modules]
    handle = gradcast.attach(modules[1], adams[1], options=gradcast.Options(adapt=False, warmup_steps=3, policy="fifo"))
    for number in range(9):
        inputs, targets = TASKS["plain"].batch(rank.index, number)
        for side, (module, adam) in enumerate(zip(modules, adams, strict=True)):
            adam.zero_grad()
            for part in range(2):
                nn.functional.cross_entropy(module(inputs, part), targets).backward()
            if side == 0:
                for parameter in module.parameters():
                    parameter.grad.mul_(0.5)
                    torch.distributed.all_reduce(parameter.grad)
            adam.step()
    handle.flush()
    return compare.modules(modules[1], modules[0])


def other_buffer_object(rank):
    """A module that puts a new tensor into the place of a buffer, as vector quantization does."""

    class Codebook(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(12, 10)
            self.register_buffer("codes", torch.full((3,), float(rank.index)))

        def forward(self, x):
            self.codes = self.codes + 1.0 + rank.index
            return self.linear(x) + self.codes.sum() * 0.0

    module = Codebook()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    handle = gradcast.attach(module, optimizer, options=gradcast.Options(adapt=False, warmup_steps=3))
    for number in range(6):
        inputs, targets = TASKS["plain"].batch(rank.index, number)
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(inputs), targets).backward()
        optimizer.step()
    handle.flush()
    return module.codes.tolist()


def test_buffers_that_a_module_replaces(ranks):
    """Before each forward pass they are rank 0's: it counts by one, so after six passes it has 6, and rank 1 5 + 2."""
    assert ranks.run(2, other_buffer_object) == [[6.0] * 3, [7.0] * 3]


@pytest.mark.parametrize("mode", ["overlap", "hook"])
@on_ranks(2)
def test_two_forward_passes_of_a_module_with_batch_norm(rank, mode):
    """With DDP this needs broadcast_buffers=False: what it sends before the second one backward still needs."""
    twins = Twins(rank, "convnet", "adam plain", mode=mode)
    twins.theirs.broadcast_buffers = False
    for _, _, optimizer, forward in twins.rounds(6):
        optimizer.zero_grad()
        losses = [twins.task.loss(forward, twins.task.batch(rank.index, twins.steps + part)) for part in (0, 50)]
        sum(losses).backward()
        optimizer.step()
    twins.handle.flush()
    parameters = [dict(module.named_parameters()) for module, _, _ in twins.each()]
    return compare.trees(parameters[1], parameters[0])


def train_with_a_pass_left_out(side):
    """Every step calls the module twice, and uses the second result."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    called = module if side.name != "ddp" else DDP(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    side.attach(module, optimizer)
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


@pytest.mark.parametrize("mode", ["overlap", "hook"])
@on_ranks(2)
def test_buffers_are_sent_before_each_forward_pass(rank, mode):
    return differences(rank, train_with_a_pass_left_out, mode)


@on_ranks(2)
def test_a_second_step_of_one_optimizer(rank):
    """Two optimizers; one takes a second step with the same gradients, which are then zeroed in place."""
    task = TASKS["plain"]
    sides = [(module, optimizers.two_halves(module)) for module in (task.module(), task.module())]
    handle = gradcast.attach(*sides[1], options=gradcast.Options(adapt=False, warmup_steps=3, policy="fifo"))
    theirs = nn.parallel.DistributedDataParallel(sides[0][0])
    for number in range(8):
        inputs, targets = task.batch(rank.index, number)
        for forward, (module, both) in zip((theirs, sides[1][0]), sides, strict=True):
            for optimizer in both:
                optimizer.zero_grad(set_to_none=False)
            nn.functional.cross_entropy(forward(inputs), targets).backward()
            both[1].step()
            float(module[8].weight.sum())
            both[1].step()
            both[1].zero_grad(set_to_none=False)
            both[0].step()
    handle.flush()
    return compare.modules(sides[1][0], sides[0][0])


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


def again_without_optimizer(rank):
    """A layer that no optimizer knows, on one rank or all: an error in every step, not in the first one alone."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    gradcast.attach(module, sgd, options=gradcast.Options(adapt=False, warmup_steps=3))
    codes = []
    for number in range(6):
        if number == 3:
            module.append(nn.Linear(1, 1))
            if rank.index == 1:
                sgd.add_param_group({"params": list(module[2].parameters())})
        try:
            module(torch.ones(2, 4)).sum().backward()
            sgd.step()
            codes.append(None)
        except gradcast.Error as error:
            codes.append(error.code)
    return codes


def test_a_new_parameter_that_one_rank_refuses(ranks):
    for codes in ranks.run(2, again_without_optimizer):
        assert codes == [None] * 3 + ["invalid_use"] * 3


def compare_with_left_out_steps(rank, mode):
    """Rank 1 leaves a step out, and passes without sync write into what has arrived: no false alarm, no hang."""
    task = TASKS["plain"]
    module = task.module()
    sgd = torch.optim.SGD(module.parameters(), lr=0.01)
    options = gradcast.Options(adapt=False, warmup_steps=3, policy="fifo", compare_every=3)
    handle = gradcast.attach(module, sgd if mode == "overlap" else None, options=options)
    for number in range(12):
        sgd.zero_grad()
        task.loss(module, task.batch(rank.index, number)).backward()
        with handle.no_sync():
            task.loss(module, task.batch(rank.index, 50 + number)).backward()
        if (rank.index, number) != (1, 4):
            sgd.step()
    handle.flush()
    return handle.stats()["step"]


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_comparing_goes_by_iterations(ranks, mode):
    steps = ranks.run(2, compare_with_left_out_steps, mode)
    assert steps == ([12, 11] if mode == "overlap" else [12, 12])


def compare_with_a_pass_of_one_rank(rank, mode):
    """Before step(), rank 1 runs a backward pass that comes to none of the module's parameters."""
    task = TASKS["plain"]
    module = task.module()
    sgd = torch.optim.SGD(module.parameters(), lr=0.01)
    options = gradcast.Options(adapt=False, warmup_steps=3, policy="fifo", compare_every=1)
    handle = gradcast.attach(module, sgd if mode == "overlap" else None, options=options)
    for number in range(6):
        sgd.zero_grad()
        task.loss(module, task.batch(rank.index, number)).backward()
        if rank.index == 1:
            fast = {name: torch.nn.Parameter(p.detach().clone()) for name, p in module.named_parameters()}
            inputs, _ = task.batch(rank.index, number)
            torch.func.functional_call(module, fast, (inputs,)).sum().backward()
        sgd.step()
    handle.flush()
    return compare.digest(module)


@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_a_pass_that_comes_to_no_gradient_compares_nothing(ranks, mode):
    first, second = ranks.run(2, compare_with_a_pass_of_one_rank, mode, timeout_s=20.0)
    assert first == second


def other_options(rank, name):
    value = {"compare_every": 5 * rank.index, "max_grad_norm": 1.0 + rank.index}[name]
    return error_of(lambda: Attached(nn.Linear(2, 2), **{name: value}))


@pytest.mark.parametrize("name", ["compare_every", "max_grad_norm"])
def test_options_that_differ_between_ranks(ranks, name):
    for code, message in ranks.run(2, other_options, name):
        assert code == "invalid_use"
        assert f"options.{name} is" in message
        assert "rank 1" in message


def injected_plan(rank):
    """One rank comes to another plan than the others, as by a fault of memory."""
    from gradcast.training.plan import agreement

    if rank.index == 1:
        true_hash = agreement.plan_hash
        agreement.plan_hash = lambda plan, profile: "0" + true_hash(plan, profile)[1:]
    try:
        return error_of(lambda: Ours("plain", "sgd plain", rank.index))
    finally:
        if rank.index == 1:
            agreement.plan_hash = true_hash


def test_a_plan_that_differs_on_one_rank(ranks):
    for code, message in ranks.run(3, injected_plan):
        assert code == "invalid_plan"
        assert "the ranks do not agree on the plan" in message
        assert "rank 1" in message
