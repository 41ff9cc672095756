"""A host that gives a device its work and runs ahead of it, on clocks of the test's own: what a plan costs where the
host is slow, and which plan is chosen there."""

import pytest

import gradcast
from conftest import link_of
from gradcast import _core
from training.needs import torch

pytest.importorskip("training.needs")
from gradcast.training.measure import host_cost
from gradcast.training.measure.host_cost import HostStep, HostTimes
from gradcast.training.measure.step_trace import StepRecord, tensor_names
from gradcast.training.plan import agreement, candidates, measured_profile
from gradcast.training.plan.expectation import StepVariation, typical_step

LAYERS, LAYER_BYTES, US, STEPS = 24, 400_000, 1e3, 40
SLOW = HostTimes(0, 200 * US, 200 * US)
OPTIONS = gradcast.Options()


class Machine:
    """A host, its device and a link, of one rank. Each layer costs the host, and then the device, ``host_us`` and
    ``device_us`` in forward, and as much again for its input and for its weight in backward."""

    def __init__(self, host_us, device_us, host, beta=0.3):
        self.host_us, self.device_us, self.host, self.link = host_us, device_us, host, link_of(50 * US, beta)
        self.host_ns = self.device_ns = 0.0

    def launch(self, passes, *, behind_ns=0.0):
        """A kernel runs once the host has launched it, what the stream was given before has ended, and what it waits
        for has arrived."""
        self.host_ns += passes * self.host_us * US
        self.device_ns = max(self.device_ns, self.host_ns, behind_ns) + passes * self.device_us * US

    def step_ns(self, plan, profile):
        """The usual time of a step that follows the plan."""
        ends, finished = [], [0.0, 0.0]
        touched = layers_of(plan, profile)
        for _ in range(STEPS):
            self.host_ns = max(self.host_ns, finished[-2])  # at most one iteration ahead
            ready = {}
            for layer in reversed(range(LAYERS)):
                self.launch(2)
                ready[layer] = self.device_ns
            self.host_ns += self.host.block_ns * len(plan.blocks)
            finish, finishes = finished[-1], []
            for block, layers in zip(plan.blocks, touched, strict=True):
                finish = max(finish, *(ready[each] for each in layers)) + self.link.all_reduce.cost_ns(block.size_bytes)
                finishes.append(finish)
            finished.append(finish)
            last_block = [max(k for k, layers in enumerate(touched) if layer in layers) for layer in range(LAYERS)]
            updated = -1  # the last block that has been waited for
            for layer in range(LAYERS):
                behind_ns = 0.0
                if last_block[layer] > updated:
                    self.host_ns += self.host.part_ns if updated >= 0 else 0.0
                    arrived = max((k for k, each in enumerate(finishes) if each <= self.host_ns), default=-1)
                    updated = max(last_block[layer], arrived)
                    behind_ns = finishes[updated]
                self.launch(1, behind_ns=behind_ns)
            ends.append(self.device_ns)
        return (ends[-1] - ends[STEPS // 2 - 1]) / (STEPS - STEPS // 2)

    def profile(self):
        """What events of the device show without parts and blocks, and the host's clock with them."""
        layer_ns = max(self.host_us, self.device_us) * US
        tensors = [
            _core.Tensor(name=f"w{i}", bytes=LAYER_BYTES, ready_ns=2 * layer_ns * (LAYERS - i), need_ns=layer_ns * i)
            for i in range(LAYERS)
        ]
        times = {"forward_ns": layer_ns * LAYERS, "backward_ns": 2 * layer_ns * LAYERS}
        host = self.host._replace(step_ns=3 * self.host_us * US * LAYERS)
        bare = _core.Profile(name="machine", tensors=tensors, world_size=2, link=self.link, **times)
        return measured_profile.with_host_times(bare, [host, host])


def layers_of(plan, profile):
    names = [each.name for each in profile.tensors]
    return [{names.index(name) for name in tensor_names(profile, block)} for block in plan.blocks]


def without_host(profile):
    return profile.replace(host_step_ns=0, host_part_ns=0, host_block_ns=0)


def eager(profile):
    """A block for each layer, the most urgent first: many parts."""
    return _core.make_plan(profile, profile.link, policy="p3", parameters={"slice_elements": LAYER_BYTES // 4})


# The host's launches take nearly as long as the device's kernels; longer; and hardly any time: us for each layer.
SMALL_BATCH, HOST_BOUND, LARGE_BATCH = (80, 100), (120, 60), (20, 200)
MACHINES = {"small batch": SMALL_BATCH, "host-bound": HOST_BOUND, "large batch": LARGE_BATCH}


@pytest.mark.parametrize("kind", MACHINES)
@pytest.mark.parametrize("beta", [0.3, 0.6, 0.8, 1.0])
@pytest.mark.parametrize("slow", [SLOW, HostTimes(0, 400 * US, 0), HostTimes(0, 0, 200 * US)])
def test_a_step_with_a_slow_host_is_predicted(kind, beta, slow):
    machine = Machine(*MACHINES[kind], slow, beta)
    profile = machine.profile()
    for plan in (eager(profile), _core.make_plan(profile, profile.link)):
        truth_ns = Machine(*MACHINES[kind], slow, beta).step_ns(plan, profile)
        assert typical_step(profile, plan, ()).step_ns == pytest.approx(truth_ns, rel=0.04)


@pytest.mark.parametrize("kind", ["small batch", "host-bound"])
@pytest.mark.parametrize("beta", [0.3, 0.6, 0.8])
def test_without_the_host_it_is_predicted_too_short(kind, beta):
    machine = Machine(*MACHINES[kind], SLOW, beta)
    profile = machine.profile()
    plan = eager(profile)
    blind = typical_step(without_host(profile), plan, ())
    assert blind.step_ns < 0.9 * machine.step_ns(plan, profile)
    # Such a host's step: it could be no shorter for the network alone.
    assert blind.step_ns >= blind.bound_ns


@pytest.mark.parametrize("kind", MACHINES)
@pytest.mark.parametrize("mode", ["overlap", "hook"])
def test_a_slow_host_gets_a_plan_of_few_blocks(kind, mode):
    profile = Machine(*MACHINES[kind], SLOW, 0.6).profile()
    found = {}
    for name, known in (("blind", without_host(profile)), ("own", profile)):
        plan = candidates.best_for_steps(known, (mode,), StepVariation(), OPTIONS)
        found[name] = len(plan.blocks), _core.play(profile, profile.link, plan).iteration_ns
        assert plan.bound_ns <= plan.predicted_ns
    assert found["own"][1] <= found["blind"][1]
    if kind != "large batch" and mode == "overlap":
        assert found["own"][0] <= found["blind"][0] / 2
        assert found["own"][1] < 0.9 * found["blind"][1]
    if kind == "large batch":
        assert found["own"] == found["blind"], "the host has the time"


def test_a_hosts_own_time_is_measured_without_waits():
    steps = []
    for parts, update in ((1, 100), (4, 700), (1, 120), (4, 730), (1, 400)):
        record = StepRecord(0, 0, None, None, 1000)
        # The last updates of the step, and a wait for the device, fall into forward.
        record.spans = [
            ("backward", 1000, 5000),
            ("wait", 5000, 9000),
            ("update", 9000, 9000 + update - 50),
            ("forward", 20000, 26000),
            ("update", 21000, 21050),
            ("wait", 25000, 26000),
        ]
        record.update_calls = parts
        steps.append(host_cost.host_step(record))
    assert steps[0] == HostStep(passes_ns=4000 + 6000 - 50 - 1000, update_ns=100, parts=1)
    found = host_cost.host_times(steps, block_ns=7.0)
    assert found == HostTimes(step_ns=8950 + 100, part_ns=200, block_ns=7.0)
    assert host_cost.host_times([], 7.0) == HostTimes(), "a host that computes itself"
    assert host_cost.block_ns(torch.device("cpu")) == 0


def test_a_profile_keeps_the_hosts_times():
    profile = Machine(*SMALL_BATCH, SLOW).profile().replace(part_ns=3e3)
    loaded = _core.Profile.from_json(profile.to_json())
    assert loaded == profile
    assert (loaded.part_ns, loaded.host_part_ns, loaded.host_block_ns) == (3e3, 200 * US, 200 * US)
    assert loaded.host_step_ns == 3 * 80 * US * LAYERS
    early = without_host(profile.replace(part_ns=0))
    assert "part_ns" not in early.to_json()
    assert "host" not in early.to_json()
    assert _core.Profile.from_json(early.to_json()) == early
    with pytest.raises(gradcast.Error, match="host_block_ns is -1"):
        profile.replace(host_block_ns=-1)


def test_an_early_checkpoint_has_the_cost_of_a_part_beside_its_profile():
    profile = without_host(Machine(*SMALL_BATCH, SLOW).profile())
    state = {"profile": profile.to_json()}
    assert agreement.saved_profile(state, "profile") == profile
    assert agreement.saved_profile(state | {"call_ns": 5e6}, "profile") == profile.replace(part_ns=5e6)
