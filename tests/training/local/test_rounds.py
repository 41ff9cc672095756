"""Local steps have the numbers of a reference in one process: two ranks bit for bit, more within rounding."""

import copy
from unittest import mock

import pytest

from training import compare
from training.attached import attach, heard, hosts_of, not_refused
from training.inside import session_of
from training.int8_mean import added
from training.needs import torch
from training.pool import on_ranks

pytest.importorskip("training.needs")
from torch.utils._python_dispatch import TorchDispatchMode

import gradcast
from gradcast.training.local import header
from gradcast.training.local.rounds import Rounds
from training.local.reference import Narrow, Reference, averaged, batch, differences, net, train

FORMS = [("nesterov", 0), ("average", 0), ("nesterov", 4), ("average", 4), ("nesterov", None)]


def adamw(module):
    return torch.optim.AdamW([each for each in module.parameters() if each.requires_grad], lr=1e-3)


def sgd(module):
    return torch.optim.SGD([each for each in module.parameters() if each.requires_grad], lr=0.05)


class Local:
    """This rank's module with local steps, and the reference of all ranks."""

    def __init__(self, rank, every, overlap, outer, make=adamw, dtype=torch.float32, **options):
        self.rank, self.module = rank.index, net(0, dtype)
        self.reference = Reference(self.module, make, rank.size, every, overlap, outer)
        self.optimizer = make(self.module)
        self.options = gradcast.Options(local=gradcast.LocalSteps(every, outer=outer, overlap=overlap), **options)
        self.handle = gradcast.attach(self.module, self.optimizer, options=self.options)
        self.step = 0

    def run(self, steps):
        for _ in range(steps):
            train(self.module, self.optimizer, self.rank, self.step)
            self.step += 1

    def compared(self, tolerance):
        return differences(self.module, self.reference, self.rank, tolerance)


@pytest.mark.parametrize(("outer", "overlap"), FORMS)
@on_ranks(2)
def test_two_ranks_have_the_bits_of_the_reference(rank, outer, overlap):
    local = Local(rank, 7, overlap, outer)
    found = []
    for _ in range(6):
        local.run(7)
        local.reference.run(7, local.step - 7)
        found += local.compared(0)
    stats = local.handle.stats()["local_steps"]
    found += [] if stats["fragments"] == (1 if overlap == 0 else 7) else [f"{stats['fragments']} fragments"]
    local.handle.end_round()
    local.reference.end()
    found += local.compared(0)
    local.run(9)  # the round after it begins anew
    local.reference.run(9, local.step - 9)
    found += local.compared(0)
    local.handle.end_round()
    local.handle.detach()
    return found


@pytest.mark.parametrize(
    ("outer", "overlap", "dtype"),
    [
        ("nesterov", 4, torch.float32),
        ("average", 0, torch.float32),
        ("nesterov", 0, torch.float64),
        pytest.param("nesterov", 4, torch.float64, marks=pytest.mark.slow),
        pytest.param("average", 4, torch.float32, marks=pytest.mark.slow),
        ("nesterov", 4, torch.bfloat16),
    ],
)
@on_ranks(3)
def test_three_ranks_within_rounding(rank, outer, overlap, dtype):
    """SGD, since Adam divides tiny differences by tiny ones."""
    local = Local(rank, 5, overlap, outer, sgd, dtype)
    local.run(26)
    local.reference.run(26)
    local.handle.end_round()
    local.reference.end()
    found = local.compared({torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 2e-2}[dtype])
    local.handle.detach()
    return found


@pytest.mark.parametrize("wire", ["bf16", "int8"])
@pytest.mark.parametrize("overlap", [0, 4])
@on_ranks(2)
def test_differences_in_fewer_bits(rank, overlap, wire):
    module = net(0)
    reference = Narrow(module, sgd, rank.size, 6, overlap, "nesterov")
    optimizer = sgd(module)
    handle = attach(module, optimizer, local=gradcast.LocalSteps(6, overlap=overlap), wire=wire)
    fragments = session_of(handle).report.fragments
    found = [next((k for k, p in zip(fragments.indices[n], pieces, strict=False) if not p.is_exact), 0)
             for n, pieces in enumerate(fragments.pieces)]  # fmt: skip
    reference.use(wire, found)
    for step in range(35):
        train(module, optimizer, rank.index, step)
    reference.run(35)
    found = differences(module, reference, rank.index, 0)
    stats = handle.stats()
    share = stats["wire_bytes"] / stats["bytes"]
    found += [] if abs(share - {"bf16": 0.5, "int8": 132 / 512}[wire]) < 0.01 else [f"{share} of the bytes"]
    handle.end_round()
    handle.detach()
    return found


@pytest.mark.parametrize("overlap", [pytest.param(0, marks=pytest.mark.slow), 4])
@on_ranks(4)
def test_hosts_of_two_ranks_average_gradients_in_every_step(rank, overlap):
    """Bit for bit: with two and four ranks all factors are powers of two."""
    module = net(0)
    module.norm.eval()  # its statistics would be those of the host's first rank in forward, and of the last batch else
    reference = Reference(module, sgd, 2, 6, overlap, "nesterov")
    optimizer = sgd(module)
    with hosts_of(2):
        handle = attach(module, optimizer, local=gradcast.LocalSteps(6, overlap=overlap, inner="host"))
    for step in range(27):
        with handle.no_sync():
            backward(module, optimizer, rank.index, 2 * step)
        backward(module, None, rank.index, 2 * step + 1)
        optimizer.step()
        for host, (own, its) in enumerate(zip(reference.modules, reference.optimizers, strict=True)):
            twins = [copy.deepcopy(own) for _ in range(2)]
            for local_rank, twin in enumerate(twins):
                backward(twin, its, 2 * host + local_rank, 2 * step)
                backward(twin, None, 2 * host + local_rank, 2 * step + 1)
            for parameter, one, other in zip(own.parameters(), *(each.parameters() for each in twins), strict=True):
                if parameter.requires_grad:
                    zero = torch.zeros_like(parameter)
                    shares = [zero if each.grad is None else each.grad * 0.5 for each in (one, other)]
                    parameter.grad = added(shares)
            its.step()
        reference.after_step()
    found = differences(module, reference, rank.index // 2, 0)
    handle.end_round()
    handle.detach()
    if rank.index == 0:
        backward(module, optimizer, rank.index, 0)  # waits for nobody
    return found


def backward(module, optimizer, rank, step):
    """``optimizer``: whose gradients are dropped before."""
    if optimizer is not None:
        module.zero_grad()
    value = batch(rank, step)
    (module(value, rank) - value).square().mean().backward()


@on_ranks(2)
def test_averaging_every_step_of_sgd_is_ddp(rank):
    local = Local(rank, 1, None, "average", sgd)
    theirs = net(0)
    for each in (local.module, theirs):
        each.norm.eval()  # DDP takes rank 0's statistics
    ddp = torch.nn.parallel.DistributedDataParallel(theirs, find_unused_parameters=True)
    optimizer = sgd(theirs)
    for step in range(20):
        local.run(1)
        train(ddp, optimizer, rank.index, step)
    found = compare.apart(dict(local.module.named_parameters()), dict(theirs.named_parameters()), 1e-6)
    local.handle.detach()
    return found


@on_ranks(2)
def test_a_round_that_has_ended_is_not_ended_again(rank):
    """Momentum alone would move the global copy."""
    local = Local(rank, 5, 0, "nesterov")
    local.run(10)
    before = [each.clone() for each in averaged(local.module)[0]]
    local.handle.end_round()
    found = [] if all(map(torch.equal, before, averaged(local.module)[0])) else ["the parameters have moved"]
    local.handle.detach()
    return found


@on_ranks(2)
def test_the_global_copy_takes_the_place_of_the_parameters(rank):
    local = Local(rank, 6, 2, "nesterov")
    local.run(15)
    local.reference.run(15)
    own = [each.clone() for each in averaged(local.module)[0]]
    with local.handle.global_model():
        found = [
            f"entry {number}"
            for number, (ours, theirs) in enumerate(zip(averaged(local.module)[0], local.reference.values, strict=True))
            if not torch.equal(ours, theirs)
        ]
        found += not_refused(local.optimizer.step, "global_model") + not_refused(local.handle.end_round)
    after = averaged(local.module)[0]
    found += [] if all(map(torch.equal, own, after)) else ["this rank's parameters are not restored"]
    local.handle.end_round()
    local.handle.detach()
    return found


class WithCache(torch.nn.Module):
    """Its buffer grows with the input, as tables of rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.inside = torch.nn.Linear(4, 2)
        self.register_buffer("cache", torch.arange(3.0))

    def forward(self, value):
        if len(value) > len(self.cache):
            self.cache = torch.arange(float(len(value)))
        return self.inside(value) * self.cache[: len(value), None]


@on_ranks(2)
def test_a_buffer_of_another_shape_is_each_ranks_own(rank):
    """It grows in an evaluation, and then on one rank in training."""
    module = WithCache()
    optimizer = sgd(module)
    handle = attach(module, optimizer, local=gradcast.LocalSteps(3, overlap=1))

    def trained(lengths):
        for length in lengths:
            optimizer.zero_grad()
            module(torch.ones(length, 4) * (1 + rank.index)).square().mean().backward()
            optimizer.step()

    trained([3] * 4)
    own = module.inside.weight.clone()
    with handle.global_model():
        module(torch.ones(5, 4))
    found = [] if torch.equal(own, module.inside.weight) else ["another weight behind global_model()"]
    found += [] if module.cache.tolist() == [0, 1, 2, 3, 4] else [f"behind global_model(): {module.cache}"]
    with heard() as lines:
        trained([3, 7 if rank.index == 1 else 2, 3, 3])
    found += [] if any(f"rank {rank.index}: the buffer cache has another shape" in each for each in lines) else lines
    kept = handle.state_dict()["tensors"]["values"]["cache"]
    found += [] if kept.tolist() == [0, 1, 2] else [f"the global copy: {kept}"]
    handle.end_round()
    found += [] if module.cache.tolist() == list(range(7 if rank.index == 1 else 5)) else [f"own: {module.cache}"]
    handle.detach()
    return found


@on_ranks(2)
def test_accumulation_and_clipping_are_each_ranks_own(rank):
    local = Local(rank, 3, 1, "average")
    twin = local.reference

    def step(module, optimizer, number, step):
        optimizer.zero_grad()
        for part in range(2):
            value = torch.randn(4, 40, generator=torch.Generator().manual_seed(100 * step + 10 * part + number))
            (module(value, number) - value).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()

    for number in range(10):
        with local.handle.no_sync():
            pass  # nothing synchronizes in backward anyway
        step(local.module, local.optimizer, rank.index, number)
        for other, (module, optimizer) in enumerate(zip(twin.modules, twin.optimizers, strict=True)):
            step(module, optimizer, other, number)
        twin.after_step()
    found = local.compared(0)
    local.handle.end_round()
    local.handle.detach()
    return found


@on_ranks(2)
def test_after_synchronous_steps_with_the_optimizers_momentum(rank):
    module = net(0)
    module.norm.eval()
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    handle = attach(module, optimizer)
    for step in range(8):
        train(module, optimizer, 0, 10 * rank.index + step)  # with all weights, and each rank's own data
    handle.detach()

    def same_optimizer(other):
        own = torch.optim.SGD([p for p in other.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
        own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        return own

    reference = Reference(module, same_optimizer, rank.size, 5, 0, "average")
    handle = attach(module, optimizer, local=gradcast.LocalSteps(5, outer="average", overlap=0))
    for step in range(8, 20):
        train(module, optimizer, rank.index, step)
    reference.run(12, 8)
    handle.end_round()
    reference.end()
    found = differences(module, reference, rank.index, 0)
    handle.detach()
    return found


@on_ranks(1)
def test_one_worker_makes_outer_updates(rank):
    local = Local(rank, 4, 2, "nesterov")
    local.run(21)
    local.reference.run(21)
    found = local.compared(0)
    local.handle.end_round()
    local.reference.end()
    found += local.compared(0)
    local.handle.detach()
    return found


@on_ranks(2)
def test_every_rank_begins_with_rank_0s_model(rank):
    module = net(rank.index)
    with heard() as lines:
        handle = gradcast.attach(module, adamw(module), options=gradcast.Options(local=gradcast.LocalSteps(50)))
    told = [line for line in lines if "change the algorithm" in line and "MB" in line]
    warned = [line for line in lines if "batch norm (norm)" in line]
    found = [] if (len(told), len(warned)) == ((1, 1) if rank.index == 0 else (0, 0)) else lines
    found += [] if all(map(torch.equal, module.parameters(), net(0).parameters())) else ["another model"]
    found += [] if handle.mode == "local" and handle.stats()["local_steps"]["outer"] == "nesterov" else ["stats"]
    handle.detach()
    return found


@on_ranks(2)
def test_functions_of_updates_and_averages_see_what_step_leaves(rank):
    module = net(0)
    optimizer = sgd(module)
    handle = attach(module, optimizer, local=gradcast.LocalSteps(2, overlap=0))
    seen = []
    handle.on_update(lambda names, parameters: seen.append(parameters[0].clone()))
    found = []
    for step in range(5):
        train(module, optimizer, rank.index, step)
        found += [] if torch.equal(seen[-1], module.embed.weight) else [f"step {step}"]
    handle.end_round()
    handle.detach()
    return found if len(seen) == 5 else [f"{len(seen)} calls"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_headers_are_exact_in_every_format(dtype):
    """Also where all ranks' sums are rounded to it."""
    ranks = 5
    total = torch.zeros(ranks * header.DIGITS, dtype=dtype)
    for rank in range(ranks):
        own = torch.full_like(total, 7)
        header.write(own, rank, step=2**33 - 5, ending=True, checksum=torch.tensor(2**60 + 3))
        total += own
    header.check(total, 0)
    header.write(own, 4, step=2**33 - 6, ending=False, checksum=torch.tensor(3))
    total[4 * header.DIGITS :] = own[4 * header.DIGITS :]
    with pytest.raises(gradcast.Error, match=r"rank 0 is in handle.end_round\(\) after .* steps, rank 4 after"):
        header.check(total, 0)


@pytest.mark.parametrize("bit", range(64))
def test_headers_tell_each_bit_of_a_checksum(bit):
    both = torch.zeros(2 * header.DIGITS)
    for rank in range(2):
        own = torch.zeros_like(both)
        checksum = torch.tensor(0x0123456789ABCDEF ^ rank * (1 << bit if bit < 63 else -(1 << 63)))
        header.write(own, rank, step=3, ending=False, checksum=checksum)
        both += own
    with pytest.raises(gradcast.Error, match="the global copy of rank 1 differs from rank 0's in fragment 0 after 3 s"):
        header.check(both, 0)


class CallsOfTorch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.name())
        return function(*args, **kwargs or {})


@on_ranks(2)
def test_a_fragment_is_taken_without_a_look_at_a_value(rank):
    """On a device the host would wait for all that it has been given."""
    calls, take = CallsOfTorch(), Rounds.take

    def watched(*args, **kwargs):
        with calls:
            take(*args, **kwargs)

    module = net(0)
    optimizer = sgd(module)
    handle = attach(module, optimizer, local=gradcast.LocalSteps(2, overlap=0))
    with mock.patch.object(Rounds, "take", watched):
        for step in range(6):
            train(module, optimizer, rank.index, step)
    handle.detach()
    assert "aten::sum" in calls.names
    return calls.names & {"aten::_local_scalar_dense", "aten::item"}


@pytest.mark.parametrize("overlap", [0, 2])
@on_ranks(2)
def test_a_mask_of_infinities_stays_as_it_is(rank, overlap):
    module = net(0, torch.float32)
    mask = torch.full((4, 4), -torch.inf).triu(1)
    module.register_buffer("mask", mask.clone())
    optimizer = sgd(module)
    handle = attach(module, optimizer, local=gradcast.LocalSteps(4, outer="average", overlap=overlap))
    for step in range(9):
        train(module, optimizer, rank.index, step)
    handle.end_round()
    handle.detach()
    assert torch.equal(module.mask, mask)
    assert all(each.isfinite().all() for each in module.parameters())
