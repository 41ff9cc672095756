"""The way of a gradient from autograd to the engine (gradient_table.h), without a session around it."""

import os
import subprocess
import sys
import weakref
from types import SimpleNamespace
from unittest import mock

import pytest

import _testing
import gradcast
from conftest import ROOT
from gradcast import _core
from gradcast.training.compat import extension
from training.needs import torch

COUNT, ELEMENTS, SCALE = 3, 4, 0.25
# Each processor's kernels, and the loop for few elements, on what arithmetic treats in its own way.
SAME_BITS = """
from itertools import product
from math import inf, nan
import torch
from training.step.test_gradient_table import Table
special = [nan, -nan, 0.0, -0.0, inf, -inf, 1e-45, -3e-39, 1.2e-38, 3.4e38, -1e-310, 5e-324, 1.7e308]
for dtype, size, scale in product((torch.float32, torch.float64), (1, 13, 257, 4096, 4097), (0.5, 1 / 3, 0.1)):
    values = torch.cat([torch.tensor(special, dtype=dtype), torch.randn(4096, dtype=dtype)])[:size]
    bits = torch.int32 if dtype is torch.float32 else torch.int64
    table = Table(1, size, dtype)
    table.backward([values], scale=scale)
    assert torch.equal(table.parameters[0].grad.view(bits), torch.mul(values, scale).view(bits)), (dtype, size, scale)
"""


class Table:
    """Parameters whose gradients are tensors of a profile in this order, each a block of its own, sent to nobody."""

    def __init__(self, count=COUNT, elements=ELEMENTS, dtype=torch.float32, norm_type=None):
        self.parameters = [torch.nn.Parameter(torch.ones(elements, dtype=dtype)) for _ in range(count)]
        width = dtype.itemsize
        self.memory = bytearray(count * elements * width)
        flat = torch.frombuffer(self.memory, dtype=dtype)
        self.views = [flat[i * elements : (i + 1) * elements] for i in range(count)]
        self.places = [(i, 0, i * elements * width, (i + 1) * elements * width) for i in range(count)]
        kind = memoryview(self.memory).cast("f" if dtype is torch.float32 else "d")
        self.engine = _core.Engine(_testing.InprocWorld(1).transport(0, [kind]))
        tensors = [
            gradcast.Tensor(name=f"p{i}", bytes=elements * width, element_bytes=width, ready_ns=0, need_ns=0)
            for i in range(count)
        ]
        blocks = [gradcast.Block(ranges=[place[2:]]) for place in self.places]
        profile = gradcast.Profile(name="table", forward_ns=0, backward_ns=0, tensors=tensors)
        self.engine.follow(profile, gradcast.Plan(blocks=blocks))
        self.seen = []  # what the table has asked for or told, in order
        self.native = extension.load().GradientTable([f"p{i}" for i in range(count)], self.parameters)
        self.native.follow_layout(self.views, self.places)
        tell = lambda what: lambda *given: self.seen.append((what, *given))  # noqa: E731
        transport = SimpleNamespace(on_written=tell("written"))
        self.native.install(self.engine.sink, transport, norm_type, tell("asked"), tell("marked"))

    def backward(self, gradients, *, special=(), scale=SCALE, timed=None):
        """A backward pass with these gradients of the parameters, the last one first."""
        self.engine.begin()
        assert self.native.begin_step(timed) is None

        def arm(_):
            self.unmade = self.native.arm(torch._C._current_graph_task_id(), list(special), scale)

        loss = sum((p * g).sum() for p, g in zip(self.parameters, gradients, strict=True) if g is not None)
        loss.register_hook(arm)
        loss.backward()
        self.native.disarm()

    def asked(self):
        return [each[1] for each in self.seen if each[0] == "asked"]

    def phases(self):
        return [state.phase.name for state in self.native.states]


@pytest.fixture
def table():
    return Table()


def gradients():
    return [torch.full((ELEMENTS,), float(i + 1)) for i in range(COUNT)]


@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
def test_few_elements_are_multiplied_as_torch_does(capability):
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", SAME_BITS], env=environment, cwd=ROOT / "tests", capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_ordinary_gradients_are_scaled_placed_and_sent(table):
    table.backward(gradients())
    assert table.asked() == []
    assert [each is view for each, view in zip([p.grad for p in table.parameters], table.views, strict=True)] == [
        True
    ] * 3
    assert [view.tolist() for view in table.views] == [[SCALE * (i + 1)] * ELEMENTS for i in range(COUNT)]
    assert sorted(table.seen) == [("written", *place[1:]) for place in table.places]
    assert table.phases() == ["SENT"] * COUNT
    assert table.native.sent_count == COUNT
    for state, view in zip(table.native.states, table.views, strict=True):
        assert state.visible_grad is view
        assert state.update_grad is view
    assert table.engine.wait_all(10**10)


def test_views_that_do_not_exist_yet_are_told_and_others_asked_for(table):
    table.parameters[1].grad = table.views[1]
    table.backward(gradients())
    assert [id(each) for each in table.unmade] == [id(table.views[0]), id(table.views[2])]
    assert table.seen.index(("marked", 1)) < table.seen.index(("written", *table.places[1][1:]))
    assert len(table.seen) == COUNT + 1


def test_a_gradient_in_its_view_is_scaled_there(table):
    table.views[0].fill_(8.0)
    table.parameters[0].grad = table.views[0]
    table.backward(gradients())
    assert table.views[0].tolist() == [SCALE * 9.0] * ELEMENTS


def test_what_is_not_ordinary_is_asked_for(table):
    table.native.states[2].updated_late = True
    table.parameters[1].grad = torch.zeros(ELEMENTS, dtype=torch.float32, requires_grad=True)
    table.backward(gradients(), special=[0])
    assert sorted(table.asked()) == [0, 1, 2]
    assert table.phases() == ["IDLE"] * COUNT
    assert table.native.sent_count == 0
    assert not table.engine.wait_all(0)


def test_a_view_whose_memory_has_moved_is_asked_for(table):
    table.views[1].data = torch.zeros(ELEMENTS)
    table.backward(gradients())
    assert table.asked() == [1]


def test_each_gradient_of_a_pass_is_ordinary_once(table):
    table.backward(gradients())
    table.native.arm(table.native.sent_count, [], SCALE)  # of another pass
    (table.parameters[0] * 2).sum().backward()
    assert table.asked() == [0]


def test_what_python_has_placed_is_not_placed_again(table):
    """As of a part that is used in a nested backward pass (reentrant checkpointing), too."""

    def place(gradient):
        table.parameters[0].grad = gradient.clone()
        assert table.native.place(0, SCALE, False)

    table.parameters[0].register_hook(place)
    table.backward(gradients())
    assert table.asked() == [0]
    assert table.phases() == ["SENT"] * COUNT


def test_a_refusal_of_the_engine_leaves_gradients_to_python(table):
    """They are as if they had not come, so that Python raises what the engine has, and not that there is a second."""
    table.parameters[-1].register_hook(lambda _: table.engine.shutdown())
    table.backward(gradients())
    assert sorted(table.asked()) == [0, 1, 2]
    assert not table.native.place(0, SCALE, False)
    assert table.phases() == ["IDLE"] * COUNT
    assert table.native.sent_count == 0


def test_the_engine_has_nothing_that_the_device_is_not_told_of(table):
    """Its block could start before the kernels that write it."""
    table.seen = SimpleNamespace(append=mock.Mock(side_effect=RuntimeError("no device")))
    with pytest.raises(RuntimeError, match="no device"):
        table.backward(gradients())
    for tensor in range(COUNT):
        table.engine.on_ready(tensor)  # once only


def test_gradients_are_ordinary_in_a_new_layout(table):
    views = [torch.zeros(ELEMENTS) for _ in range(COUNT)]
    table.native.follow_layout(views, table.places)
    table.backward(gradients())
    assert table.asked() == []
    assert [view.tolist() for view in views] == [[SCALE * (i + 1)] * ELEMENTS for i in range(COUNT)]


def test_after_a_pass_only_the_layout_holds_views(table):
    """Otherwise those of gradients that were not made would seem to be the program's."""
    table.backward([None, None, torch.ones(ELEMENTS)])
    views, table.views, table.unmade = [weakref.ref(view) for view in table.views], None, None
    table.native.follow_layout([torch.zeros(ELEMENTS) for _ in range(COUNT)], table.places)
    assert [view() is None for view in views] == [True, True, False]  # the .grad


def test_an_apart_gradient_stays_and_its_sum_is_due():
    table = Table(norm_type=2.0)
    table.engine.begin()
    table.native.begin_step(None)
    table.parameters[0].grad = own = torch.full((ELEMENTS,), 2.0)
    assert table.native.place(0, SCALE, True)
    state = table.native.states[0]
    assert (table.parameters[0].grad is own, state.visible_grad is own, state.copy_due) == (True, True, True)
    assert (own.tolist(), table.views[0].tolist()) == ([2.0] * ELEMENTS, [2.0 * SCALE] * ELEMENTS)
    assert [(index, norm.item()) for index, norm in table.native.take_norms()] == [(0, 2.0 * SCALE * 2.0)]


def test_a_gradient_that_torch_reads_as_negative_is_sent_so(table):
    table.engine.begin()
    table.native.begin_step(None)
    table.parameters[0].grad = torch._neg_view(torch.full((ELEMENTS,), 2.0))
    assert table.native.place(0, SCALE, False)
    assert table.views[0].tolist() == [-2.0 * SCALE] * ELEMENTS


@pytest.mark.parametrize("element", [0, ELEMENTS - 1])
def test_a_fingerprint_is_of_the_first_and_last_elements(table, element):
    before = table.native.fingerprint()
    assert table.native.fingerprint() == before
    with torch.no_grad():
        table.parameters[-1][element] = 2.0
    assert table.native.fingerprint() != before


def test_a_scale_of_zero_hides_what_the_gradient_holds(table):
    table.backward([torch.full((ELEMENTS,), float("nan"))] * COUNT, scale=0.0)
    assert [view.tolist() for view in table.views] == [[0.0] * ELEMENTS] * COUNT


def test_gradients_are_timed_before_they_are_sent(table):
    order = []
    table.backward(gradients(), timed=lambda index: order.append((index, table.native.states[index].phase.name)))
    assert sorted(order) == [(i, "IDLE") for i in range(COUNT)]


def test_norms_are_those_of_what_is_sent():
    table = Table(norm_type=2.0)
    table.backward(gradients())
    norms = dict(table.native.take_norms())
    assert {i: norm.item() for i, norm in norms.items()} == {i: SCALE * (i + 1) * 2.0 for i in range(COUNT)}
    assert table.native.take_norms() == []


def test_a_step_begins_only_when_the_last_one_is_finished(table):
    table.backward(gradients())
    unfinished = table.native.begin_step(None)
    assert unfinished is table.native.states[0]
    extension.load().arrive(table.native.states)
    assert table.native.begin_step(None) is None
    assert len(table.native.idle()) == COUNT


def test_use_ends_a_run_of_frozen_steps(table):
    for state in table.native.states:
        state.frozen_steps = 5
    table.native.states[1].locally_unused = object()
    table.backward(gradients())
    assert list(table.native.frozen_for(5)) == [table.native.states[1]]


def test_after_remove_gradients_are_those_of_autograd(table):
    table.native.remove()
    table.native.release()
    (table.parameters[0] * 2).sum().backward()
    assert table.parameters[0].grad.tolist() == [2.0] * ELEMENTS
    assert table.asked() == []
