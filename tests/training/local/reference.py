"""Local steps of several ranks in one process, in plain torch: what gradcast has to compute."""

import copy

from gradcast.local_steps import make_schedule
from training import compare
from training.int8_mean import Int8Mean, added
from training.needs import torch

nn = torch.nn


class Net(nn.Module):
    """A quarter of a million elements: batch norm, tied, frozen and partly unused weights, one not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(40, 160, bias=False)
        self.conv = nn.Conv2d(1, 6, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(6)
        self.first = nn.Linear(160, 300)
        self.frozen = nn.Linear(300, 160).requires_grad_(False)
        self.odd = nn.Linear(160, 160)  # rank 1 does not use it
        self.second = nn.Linear(160, 400)
        self.third = nn.Linear(400, 160)
        self.unembed = nn.Linear(40, 160, bias=False)
        self.unembed.weight = self.embed.weight
        with torch.no_grad():
            self.first.weight.set_(self.first.weight.t().contiguous().t())

    def forward(self, value, rank=0):
        hidden = self.embed(value)
        image = self.norm(self.conv(hidden.view(-1, 1, 10, 16)))
        hidden = torch.tanh(self.frozen(torch.relu(self.first(image.mean(1).flatten(1)))))
        if rank != 1:
            hidden = hidden + self.odd(hidden)
        hidden = self.third(torch.relu(self.second(hidden)))
        return hidden @ self.unembed.weight


def net(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return Net().to(dtype)


def batch(rank, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(6, 40, generator=generator).to(dtype)


def train(module, optimizer, rank, step):
    """One local step."""
    dtype = next(module.parameters()).dtype
    optimizer.zero_grad()
    value = batch(rank, step, dtype)
    (module(value, rank) - value).square().mean().backward()
    optimizer.step()


def averaged(module):
    """What travels: trainable parameters, then floating-point buffers, each flat as it lies in memory."""
    own = [each for each in module.parameters() if each.requires_grad]
    buffers = [each for each in module.buffers() if each.is_floating_point()]
    return [torch.as_strided(each.data, (each.numel(),), (1,)) for each in (*own, *buffers)], len(own)


class Reference:
    """``modules[r]``: rank r's. ``values``: the global copy, an element of ``averaged`` each."""

    def __init__(self, module, make_optimizer, ranks, every, overlap, outer, merge=0.5):
        self.ranks, self.every = ranks, every
        self.modules = [copy.deepcopy(module) for _ in range(ranks)]
        self.optimizers = [make_optimizer(each) for each in self.modules]
        tensors, self.trained = averaged(module)
        self.wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
        self.schedule = make_schedule([(each.numel(), self.wide.itemsize) for each in tensors], every, overlap)
        self.merge = merge if self.schedule.overlap else 0.0
        self.values = [each.to(self.wide, copy=True) for each in tensors]
        self.parts = []  # by fragment: (entry, lo, hi, its part of the global copy, the outer optimizer)
        for fragment in self.schedule.fragments:
            self.parts.append([])
            for each in fragment:
                part = nn.Parameter(self.values[each.parameter][each.lo : each.hi])
                averages = outer == "average" or each.parameter >= self.trained
                arguments = {"lr": 1.0} if averages else {"lr": 0.7, "momentum": 0.9, "nesterov": True}
                self.parts[-1].append((each.parameter, each.lo, each.hi, part, torch.optim.SGD([part], **arguments)))
        self.sent = {}
        self.step = 0

    def after_step(self):
        self.step += 1
        for number in self.schedule.applied(self.step):
            self.apply(number, self.merge)
        for number in self.schedule.taken(self.step):
            self.take(number)
            if self.schedule.overlap == 0:
                self.apply(number, 0.0)

    def take(self, number):
        self.sent[number], shares_of = [], []
        for entry, lo, hi, part, _ in self.parts[number]:
            locals_ = [averaged(each)[0][entry][lo:hi].to(self.wide) for each in self.modules]
            shares = [(part.detach() - each) * (1.0 / self.ranks) for each in locals_]
            shares_of.append(shares)
            total = shares[0].clone()
            for share in shares[1:]:
                total += share
            self.sent[number].append(total)
        self.sent[number] = self.on_wire(number, self.sent[number], shares_of)

    def on_wire(self, number, totals, shares_of):
        """What arrives in place of ``totals``. ``shares_of``: by part of the fragment, what each rank sends."""
        return totals

    @torch.no_grad()
    def apply(self, number, merge):
        for (entry, lo, hi, part, outer), mean in zip(self.parts[number], self.sent.pop(number), strict=True):
            part.grad = mean
            with torch.enable_grad():
                outer.step()
            for module in self.modules:
                local = averaged(module)[0][entry][lo:hi]
                merged = local.to(self.wide) * merge
                local.copy_(merged.add_(part, alpha=1 - merge) if merge else part)

    def end(self):
        """As handle.end_round(): what travels is applied, then everything, unless nothing is left of the round."""
        if self.schedule.overlap == 0 and self.step % self.every == 0:
            self.step = 0
            return
        for number in list(self.sent):
            self.apply(number, self.merge)
        for number in range(len(self.parts)):
            self.take(number)
            self.apply(number, 0.0)
        self.step = 0

    def run(self, steps, first=0):
        for step in range(first, first + steps):
            for rank, (module, optimizer) in enumerate(zip(self.modules, self.optimizers, strict=True)):
                train(module, optimizer, rank, step)
            self.after_step()


class Narrow(Reference):
    """Differences in a wire format. ``indices``: by fragment, the number of its tensor with groups."""

    def use(self, wire, indices):
        self.wire, self.indices, self.means = wire, indices, {}

    def on_wire(self, number, totals, shares_of):
        if self.wire == "bf16":
            narrow = [[share.bfloat16().float() for share in shares] for shares in shares_of]
            return [added(shares).bfloat16().float() for shares in narrow]
        # Parameters of two and more dimensions lie side by side, and so have groups in common; others travel exactly.
        trained = [each for each in self.modules[0].parameters() if each.requires_grad]
        entries = [part[0] for part in self.parts[number]]
        grouped = [n for n, entry in enumerate(entries) if entry < self.trained and trained[entry].dim() > 1]
        if grouped:
            flat = torch.stack([torch.cat([shares_of[n][rank] for n in grouped]) for rank in range(self.ranks)])
            if number not in self.means:
                self.means[number] = Int8Mean([flat[0]], self.ranks)
                self.means[number].residuals *= self.indices[number] + 1
            mean = self.means[number].in_groups(self.indices[number], flat)
            for n in grouped:
                size = len(totals[n])
                totals[n], mean = mean[:size].clone(), mean[size:]
        return totals


def differences(module, reference, rank, tolerance):
    """Which tensors of the module differ from the reference's: in any bit, or as ``compare.apart`` finds them."""
    ours, theirs = module.state_dict(), reference.modules[rank].state_dict()
    return compare.trees(ours, theirs) if tolerance == 0 else compare.apart(ours, theirs, tolerance)
