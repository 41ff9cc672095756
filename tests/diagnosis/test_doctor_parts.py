"""Parts of the doctor: the snapshot, the timer of loaders, recorded steps, and clocks."""

import random

import pytest

from training.needs import torch

# isort: split
from doctor.train import Items
from gradcast.diagnosis.observe import recorded_step
from gradcast.diagnosis.observe.loader import LoaderTimer
from gradcast.diagnosis.observe.observer import Observer
from gradcast.diagnosis.probe import clock_sync, prober
from gradcast.diagnosis.probe.clock_sync import ClockOffset, Ping
from gradcast.diagnosis.probe.snapshot import Snapshot

nn = torch.nn


def test_a_snapshot_gives_back_every_bit_and_the_same_objects():
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    adam = torch.optim.AdamW(module.parameters(), lr=torch.tensor(0.1), amsgrad=True)
    seen = []
    adam.register_step_post_hook(lambda *_: seen.append(1))
    module(torch.randn(3, 4)).sum().backward()
    adam.step()

    def everything():
        states = [value.clone() for each in adam.state.values() for value in each.values()]
        tensors = [*(each.detach().clone() for each in [*module.parameters(), *module.buffers()]), *states]
        return [*tensors, torch.get_rng_state(), adam.param_groups[0]["lr"].clone()]

    held = [*adam.state.values()], [parameter.grad for parameter in module.parameters()]
    before = everything()
    snapshot = Snapshot(module, [adam])
    assert all(parameter.grad is None for parameter in module.parameters())
    for _ in range(3):
        adam.param_groups[0]["lr"].add_(0.5)
        adam.param_groups[0]["weight_decay"] = 7.0
        adam.zero_grad()
        module(torch.randn(3, 4)).sum().backward()
        adam.step()
    changed = everything()
    assert not any(torch.equal(one, other) for one, other in zip(before[:4], changed[:4], strict=True))
    assert seen == [1], "a user's hook has no part in steps that are not the user's"
    snapshot.restore()
    assert all(torch.equal(one, other) for one, other in zip(before, everything(), strict=True))
    assert adam.param_groups[0]["weight_decay"] != 7.0
    assert all(one is other for one, other in zip(held[0], adam.state.values(), strict=True))
    assert all(one is parameter.grad for one, parameter in zip(held[1], module.parameters(), strict=True))
    adam.step()
    assert seen == [1, 1]


def test_a_snapshot_keeps_learning_rates_at_zero_and_gradients_of_other_modules():
    module, head = nn.Linear(4, 4), nn.Linear(4, 1)
    sgd = torch.optim.SGD([*module.parameters(), *head.parameters()], lr=0.5, momentum=0.9)
    head(module(torch.randn(3, 4))).sum().backward()
    weight, gradient = head.weight.detach().clone(), head.weight.grad.clone()
    snapshot = Snapshot(module, [sgd])
    sgd.zero_grad()
    head(module(torch.randn(3, 4))).sum().backward()
    sgd.step()
    assert torch.equal(head.weight, weight), "it stands still"
    snapshot.restore()
    assert sgd.param_groups[0]["lr"] == 0.5
    assert torch.equal(head.weight.grad, gradient)


@pytest.mark.parametrize("workers", [0, 2])
def test_reading_and_preparing_are_told_apart_in_a_loaders_workers(workers):
    watch = LoaderTimer()
    try:
        batches = list(torch.utils.data.DataLoader(Items(12, 2, 40, 10), batch_size=2, num_workers=workers))
    finally:
        watch.close()
    reading_ms, preparing_ms, count = watch.totals_ms()
    assert len(batches) == count == 6
    assert watch.workers == workers
    assert watch.waited_ns > 0
    # What was asked for, within what clocks say; preparing takes longer where the machine is busy.
    assert 0.9 * 12 * 20 <= reading_ms < 12 * (20 + 5), "preparing is no part of it"
    assert preparing_ms >= 0.9 * 12 * 5
    before = watch.totals_ms()
    list(torch.utils.data.DataLoader(Items(12, 2, 0, 0), batch_size=2))
    assert watch.totals_ms() == before, "it looks no longer"


def test_a_recorded_step_makes_the_gradients_that_the_step_made():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
            self.device, self.require_backward_grad_sync = torch.device("cpu"), True
            self.find_unused_parameters = self.static_graph = False
            self.__dict__["module"] = self

        def forward(self, value, *, scale):
            return {"a": self.one(value) * scale, "b": [self.two(value)], "unused": self.one(value)}

    net = Net()
    sgd = torch.optim.SGD(net.parameters(), lr=0.0)
    loader, ended = LoaderTimer(), []
    observer = Observer(net, [sgd], loader, lambda: ended.append(1))
    for _ in range(2):
        sgd.zero_grad()
        out = net(torch.randn(3, 4), scale=2.0)
        (out["a"].square().sum() + out["b"][0].sum()).backward()
        sgd.step()
    wanted = [parameter.grad.clone() for parameter in net.parameters()]
    observer.close()
    loader.close()
    (passes,) = recorded_step.by_backward(observer.recorded_steps[-1])
    sgd.zero_grad()
    list(recorded_step.replay(net, passes))
    assert all(torch.equal(one, p.grad) for one, p in zip(wanted, net.parameters(), strict=True))
    assert len(ended) == len(observer.steps) == 2
    for step in observer.steps:
        stages = sum(step[name] for name in ("loader", "forward", "backward", "update", "loop"))
        assert stages == pytest.approx(step["step"])


@pytest.mark.parametrize(
    ("observed_steps", "affordable_steps", "rounds"),
    [
        (20, 1000, 4),  # few ordinary steps, and four rounds all the same
        (29, 1000, 4),
        (30, 1000, 5),  # as many as ordinary ones
        (60, 1000, 10),
        (60, 3 * 8 * 7 + 23, 7),  # of three kinds, 8 steps each: what the time allows
        (20, 3 * 8 * 2, 2),
        (20, 5, 1),  # where it allows none, one
    ],
)
def test_the_doctor_runs_as_many_steps_of_each_kind_as_it_observed(observed_steps, affordable_steps, rounds):
    assert prober.WARMUP_STEPS_PER_TURN + prober.STEPS_PER_TURN == 8
    assert prober.round_count(3, observed_steps, affordable_steps) == rounds


def test_the_quickest_exchange_tells_the_offset():
    pings = [Ping(0, 5_000_900, 2_000), Ping(10_000, 5_010_100, 10_200), Ping(20_000, 5_029_000, 30_000)]
    offset = clock_sync.clock_offset(pings)
    assert offset == ClockOffset(offset_ns=5_000_000, error_ns=100, at_ns=5_010_100)


@pytest.mark.parametrize("seed", range(20))
def test_the_true_offset_is_within_the_error(seed):
    """This holds however unequal the two ways are, and however long queues were."""
    dice, true_ns = random.Random(seed), 1_700_000_000_123_456_789
    pings = []
    for start_ns in range(0, 10_000_000, 1_000_000):
        there_ns, back_ns = (int(20_000 + dice.expovariate(1 / 80_000)) for _ in range(2))
        pings.append(Ping(start_ns, start_ns + there_ns + true_ns, start_ns + there_ns + back_ns))
    offset = clock_sync.clock_offset(pings)
    assert abs(offset.offset_ns - true_ns) <= offset.error_ns + 300  # doubles of this size are 256 ns apart
    assert offset.error_ns == min(received - sent for sent, _, received in pings) / 2


def test_a_clock_that_drifts():
    first, second = ClockOffset(1000, 50, 0), ClockOffset(1000 + 20_000, 50, 10**9)
    clock = clock_sync.clock_between(first, second)
    assert clock.aligned(10**9) == 10**9 - 21_000
    assert clock.aligned(10**9 // 2) == 10**9 // 2 - 11_000
    # Within the errors it is noise: the better one counts, everywhere.
    noise = clock_sync.clock_between(ClockOffset(1000, 50, 0), ClockOffset(1040, 10, 10**9))
    assert (noise.offset_ns, noise.drift) == (1040, 0)
