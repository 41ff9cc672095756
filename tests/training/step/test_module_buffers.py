"""Buffers of a bare module, at the start and the end of every forward pass: DDP's, bit for bit, whatever their type and
the loop around."""

import contextlib

import pytest

import gradcast
from training.needs import torch
from training.pair import differences
from training.pool import on_ranks

nn = torch.nn
checkpoint = torch.utils.checkpoint
COUNTERS = {"uint8": torch.uint8, "int64": torch.int64, "half": torch.float16, "double": torch.float64}
HEAVY = (-0.0, float("nan"), float("inf"), 1e-45)


class Stateful(nn.Module):
    """Each rank changes its buffers in its own way. ``again``: a part of forward runs again inside backward, and
    changes buffers there."""

    def __init__(self, rank, again=False):
        super().__init__()
        torch.manual_seed(rank)
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.rank, self.again = rank, again
        for name, dtype in COUNTERS.items():
            self.register_buffer(f"counted_{name}", torch.zeros(3, dtype=dtype))
        self.register_buffer("heavy", torch.tensor(HEAVY).roll(rank))
        self.register_buffer("is_positive", torch.tensor(False))
        self.register_buffer("strided", torch.zeros(4, 3).t())
        self.register_buffer("codes", torch.zeros(2), persistent=False)
        self.register_buffer("nothing", torch.zeros(0))
        self.seen = []

    @torch.no_grad()
    def change(self, x):
        for name in COUNTERS:
            getattr(self, f"counted_{name}").add_(1 + self.rank)
        if self.rank == 1:
            self.heavy.copy_(self.heavy.flip(0))
        self.is_positive.copy_(x.sum() > 0)
        self.strided.add_(x.sum())
        self.codes = self.codes * 0.5 + x.mean()  # another tensor, as vector quantization does

    def note(self):
        """As bytes, so that the sign of a zero counts, and the bits of a NaN."""
        self.seen.append({n: b.contiguous().reshape(-1).view(torch.uint8).tolist() for n, b in self.named_buffers()})

    def forward(self, x):
        self.note()
        if self.training:
            self.change(x)
        x = self.first(x)
        x = checkpoint.checkpoint(self.middle, x, use_reentrant=False) if self.again else self.middle(x)
        x = self.last(x.tanh()) + self.codes.sum()
        self.note()
        return x


class Loop:
    def __init__(self, side, again=False, **options):
        self.side = side
        self.module = Stateful(side.rank, again)
        self.optimizer = torch.optim.Adam(self.module.parameters(), lr=1e-2)
        self.called = side.called(self.module, self.optimizer, **{"policy": "fifo"} | options)

    def forward(self, number):
        return self.called(self.side.batch(number)).square().sum()

    def step(self, number):
        self.optimizer.zero_grad()
        self.forward(number).backward()
        self.optimizer.step()

    def result(self):
        return self.module.seen, self.side.result(self.module, self.optimizer)


def steps(side, **options):
    loop = Loop(side, **options)
    for number in range(8):
        loop.step(number)
    return loop.result()


def on_a_narrow_wire(side):
    """What does not depend on the gradients, which are rounded."""
    seen, _ = steps(side, wire="bf16")
    return [{name: values for name, values in each.items() if "counted" in name or name == "heavy"} for each in seen]


def accumulation(side):
    loop = Loop(side)
    for number in range(8):
        loop.optimizer.zero_grad()
        for part in range(3):
            with (side.handle or loop.called).no_sync() if part < 2 else contextlib.nullcontext():
                loop.forward(3 * number + part).backward()
        loop.optimizer.step()
    return loop.result()


def forwards_without_backward(side):
    """Before every second step, and in evaluation, for which nothing is sent."""
    loop = Loop(side)
    for number in range(8):
        if number % 2 == 0:
            loop.forward(number + 50)
        loop.step(number)
        loop.module.eval()
        with torch.no_grad():
            loop.module(side.batch(0))
        loop.module.train()
    return loop.result()


def changes_between_steps(side):
    """All ranks load the same; then buffers of another size, which no plan has room for; then rank 0 changes one."""
    loop = Loop(side)
    for number in range(12):
        if number == 6:
            loop.module.load_state_dict(dict(Stateful(0).named_buffers()), strict=False)
        if number == 8:
            loop.module.codes = torch.zeros(5)
        if number == 10:
            loop.module.heavy.mul_(2 - side.rank)
            if side.handle:
                side.handle.send_buffers()
        loop.step(number)
    return loop.result()


def forwards_without_gradients(side):
    """In training mode, as a pass for pseudo-labels: DDP sends before it, and not before the next one."""
    loop = Loop(side)
    for number in range(8):
        if number in (2, 3, 6):
            with torch.no_grad():
                loop.called(side.batch(number + 50))
        loop.step(number)
    return loop.result()


def training_in_evaluation_mode(side):
    """As fine-tuning with frozen statistics: forward reads the buffers."""
    loop = Loop(side)
    for number in range(8):
        loop.called.train(number % 3 == 0)
        loop.step(number)
    return loop.result()


def other_weights_on_one_rank(side):
    """That pass changes buffers of a rank that the others know nothing of, and rank 0's replace them."""
    loop = Loop(side)
    for number in range(8):
        loop.step(number)
        if side.rank == 1 and number % 3:
            others = {name: each.detach() * 0.5 for name, each in loop.module.named_parameters()}
            torch.func.functional_call(loop.module, others, side.batch(number + 50))
    return loop.result()


LOOPS = {
    "steps": steps,
    "checkpointing": lambda side: steps(side, again=True),
    "not sent": lambda side: steps(side, broadcast_buffers=False, ddp_options={"broadcast_buffers": False}),
    "a narrow wire": on_a_narrow_wire,
    "a plan for what was measured": lambda side: steps(side, policy=gradcast.Planning.policy),
    "accumulation": accumulation,
    "forwards without backward": forwards_without_backward,
    "forwards without gradients": forwards_without_gradients,
    "training in evaluation mode": training_in_evaluation_mode,
    "other weights on one rank": other_weights_on_one_rank,
    "changes between steps": changes_between_steps,
}


@pytest.mark.parametrize("name", LOOPS)
@on_ranks(2)
def test_buffers_are_those_of_ddp(rank, name, mode):
    return differences(rank, LOOPS[name], mode)
