"""The laboratory's timed stand-in for an accelerator keeps its times and its gradients. Nothing here really waits."""

import pytest

import gradcast
from lab.small_profile import MS, small_profile

torch = pytest.importorskip("torch")

from gradcast.lab import standin  # noqa: E402, needs torch


@pytest.fixture
def time():
    """A clock that goes on in sleeps only."""

    class Time:
        now = 0

        def now_ns(self):
            return self.now

        def sleep_s(self, seconds):
            self.now += round(seconds * 1e9)

    return Time()


@pytest.fixture
def device(time):
    device = standin.SimulatedDevice(time.now_ns, time.sleep_s)
    device.run(1)  # it begins to count
    return device


LITTLE = standin.TOLERANCE_NS // 2


@pytest.mark.parametrize(
    ("late_ns", "computes_ms", "times", "ends_ms"),
    [
        (LITTLE, 10, 1, 10),  # a host that is a little late does not delay the device,
        (LITTLE, 2, 10, 20),  # nor does that add up
        (5 * MS, 10, 2, 30),  # a device without work stands still
    ],
)
def test_a_device_works_without_a_break_if_the_host_is_hardly_late(time, device, late_ns, computes_ms, times, ends_ms):
    for _ in range(times):
        time.now += late_ns
        device.run(computes_ms * MS)
    assert time.now == 1 + ends_ms * MS


def test_what_the_host_computes_for_the_device_counts(time, device):
    start = time.now + LITTLE
    time.now = start + 3 * MS
    device.ran(start)
    device.run(10 * MS)
    assert time.now == 1 + 13 * MS


def test_a_sleep_that_ends_early_goes_on(time):
    def half(seconds):
        time.sleep_s(seconds / 2 if seconds > 1e-3 else seconds)

    standin.SimulatedDevice(time.now_ns, half).run(4 * MS)
    assert time.now == 4 * MS


def test_layers_are_the_profiles():
    shape = standin.Shape.of(small_profile())
    assert shape.elements == (1000, 10, 5000, 10_000)
    assert standin.Shape.of(small_profile(), scale_size=0.05).elements == (50, 1, 250, 500), "none vanishes"
    assert [layer.tensors for layer in shape.layers] == [range(2), range(2, 3), range(3, 4)]
    assert (shape.first_forward_ns, [layer.forward_ns for layer in shape.layers]) == (2 * MS, [2 * MS, 4 * MS, 4 * MS])
    assert (shape.last_backward_ns, [layer.backward_ns for layer in shape.layers]) == (MS, [8 * MS, 8 * MS, 8 * MS])


@pytest.mark.parametrize("name", gradcast.files.bundled_profiles())
def test_a_stand_in_computes_as_long_as_its_profile(name):
    profile = gradcast.load_profile(name)
    shape = standin.Shape.of(profile)
    forward_ns = shape.first_forward_ns + sum(layer.forward_ns for layer in shape.layers)
    backward_ns = shape.last_backward_ns + sum(layer.backward_ns for layer in shape.layers)
    assert forward_ns == pytest.approx(profile.forward_ns, abs=len(shape.layers))
    assert backward_ns == pytest.approx(profile.backward_ns, abs=len(shape.layers))
    assert 4 * sum(shape.elements) == sum(tensor.bytes for tensor in profile.tensors)


@pytest.fixture
def model(time):
    shape = standin.Shape.of(small_profile())
    device = standin.SimulatedDevice(time.now_ns, time.sleep_s)
    return standin.StandIn(shape, device, standin.Gradients(shape.elements, rank=1))


def train_once(model):
    model.zero_grad()
    model(torch.zeros(1, requires_grad=True)).sum().backward()
    return [weight.grad for weight in model.weights]


class Reads(torch.overrides.TorchFunctionMode):
    """Which parameter was read when."""

    def __init__(self, model, time):
        super().__init__()
        self.found = []
        self._names = {id(weight): index for index, weight in enumerate(model.weights)}
        self._time = time

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.found += [(self._names[id(value)], self._time.now) for value in args if id(value) in self._names]
        return function(*args, **(kwargs or {}))


def test_forward_reads_each_layer_when_it_is_needed(model, time):
    with Reads(model, time) as reads:
        model(torch.zeros(1, requires_grad=True))
    assert reads.found == [(0, 2 * MS), (1, 2 * MS), (2, 4 * MS), (3, 8 * MS)]
    assert time.now == 12 * MS


def test_gradients_come_out_when_they_are_ready(model, time):
    ready = []
    for index, weight in enumerate(model.weights):
        weight.register_post_accumulate_grad_hook(lambda _, index=index: ready.append((index, time.now - 12 * MS)))
    train_once(model)
    assert ready[:2] == [(3, 8 * MS), (2, 16 * MS)]
    assert sorted(ready[2:]) == [(0, 24 * MS), (1, 24 * MS)]
    assert time.now == (12 + 25) * MS


def test_gradients_are_small_constants_of_rank_and_step(model):
    gradients = standin.Gradients([1000, 10, 5000, 10_000], rank=1)
    steps = [train_once(model) for _ in range(standin.GRADIENT_KINDS + 1)]
    for step, found in enumerate(steps):
        assert all(map(torch.equal, found, gradients.of_step(step)))
    assert not torch.equal(steps[0][3], steps[1][3]), "a gradient of the step before is a wrong number"
    assert torch.equal(steps[0][3], steps[standin.GRADIENT_KINDS][3])
    assert not torch.equal(steps[0][3], standin.Gradients([1000, 10, 5000, 10_000], rank=0).of_step(0)[3])
    assert 0.5e-3 < steps[0][3].std() < 2e-3


def test_whoever_writes_into_a_gradient_does_not_change_the_next(model):
    first = [gradient.clone() for gradient in train_once(model)]
    for _ in range(standin.GRADIENT_KINDS):
        for gradient in train_once(model):
            gradient.zero_()
    assert all(map(torch.equal, train_once(model), model.gradients.of_step(standin.GRADIENT_KINDS + 1)))
    assert all(map(torch.equal, first, model.gradients.of_step(0)))


def test_the_update_is_that_of_torch_and_takes_the_devices_time(model, time):
    twin = [weight.detach().clone().requires_grad_() for weight in model.weights]
    plain = torch.optim.SGD(twin, lr=0.1, momentum=0.9)
    device = standin.SimulatedDevice(time.now_ns, time.sleep_s)
    ran = []
    device.ran = ran.append
    optimizer = standin.sgd_on(device, model.parameters(), 0.1)
    for _ in range(3):
        for mine, its in zip(train_once(model), twin, strict=True):
            its.grad = mine.clone()
        plain.step()
        optimizer.step()
    assert all(map(torch.equal, model.weights, twin))
    assert len(ran) == 3
