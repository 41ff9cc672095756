"""The phases of a parameter within a step: which tensors are pending in each, and which transitions exist."""

import sys

import pytest

import gradcast
from gradcast.training.compat import extension
from gradcast.training.step import parameter_state, pending
from gradcast.training.step.parameter_state import names
from training.needs import torch

TRANSITIONS = ("begin_step", "defer_update", "start_update", "fail_update")
Phase = extension.load().Phase
PHASES = Phase.__members__.values()
ALLOWED = {
    Phase.IDLE: {"begin_step"},
    Phase.SENT: {"defer_update"},
    Phase.ARRIVED: {"begin_step", "defer_update", "fail_update"},
    Phase.UPDATE_DUE: {"start_update"},
}


class Owner:
    """Pending tensors need one that lives."""


OWNER = Owner()


@pytest.fixture
def table():
    return extension.load().GradientTable(["weight"], [torch.nn.Parameter(torch.ones(2))])


@pytest.fixture
def state(table):
    (state,) = table.states
    state.visible_grad = state.update_grad = torch.ones(2)
    yield state
    parameter_state.release([state])


def send(state):
    """As GradientTable.place() leaves it."""
    assert extension.load().enter([state], Phase.SENT, [Phase.IDLE]) is None
    pending.mark([state.visible_grad], OWNER)


def bring_to(state, phase):
    if phase == Phase.IDLE:
        return
    send(state)
    if phase == Phase.ARRIVED:
        parameter_state.arrive([state])
    if phase == Phase.UPDATE_DUE:
        parameter_state.defer_update([state], OWNER)


def pending_parts(state):
    return pending.is_pending(state.parameter), pending.is_pending(state.visible_grad)


def call(table, state, transition):
    if transition == "begin_step":
        parameter_state.begin_step(table, None)
        return
    owner = () if transition == "start_update" else (OWNER,)
    getattr(parameter_state, transition)([state], *owner)


@pytest.mark.parametrize("transition", TRANSITIONS)
@pytest.mark.parametrize("phase", PHASES)
def test_a_transition_checks_where_it_comes_from(table, state, phase, transition):
    bring_to(state, phase)
    assert state.phase == phase
    if transition in ALLOWED[phase]:
        call(table, state, transition)
        return
    before = pending_parts(state)
    with pytest.raises(gradcast.Error, match=f"weight is {phase.name}") as refused:
        call(table, state, transition)
    assert refused.value.code == "internal"
    assert (state.phase, pending_parts(state)) == (phase, before)


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        (Phase.IDLE, (False, False)),
        (Phase.SENT, (False, True)),
        (Phase.ARRIVED, (False, False)),
        (Phase.UPDATE_DUE, (True, True)),
    ],
)
def test_a_phase_says_what_is_pending(state, phase, expected):
    bring_to(state, phase)
    assert pending_parts(state) == expected
    parameter_state.release([state])
    assert (state.phase, pending_parts(state)) == (Phase.IDLE, (False, False))


def test_an_arrival_leaves_a_due_update_pending(state):
    bring_to(state, Phase.UPDATE_DUE)
    parameter_state.arrive([state])
    assert (state.phase, pending_parts(state)) == (Phase.UPDATE_DUE, (True, True))


def test_a_failed_update_stays_due(state):
    bring_to(state, Phase.UPDATE_DUE)
    parameter_state.start_update([state])
    assert (state.phase, pending_parts(state)) == (Phase.ARRIVED, (False, False))
    parameter_state.fail_update([state], OWNER)
    assert state.is_update_due
    assert pending.is_pending(state.parameter)


def test_a_transition_ends_at_the_first_that_is_elsewhere():
    states = extension.load().GradientTable(list("abc"), [torch.nn.Parameter(torch.ones(2)) for _ in "abc"]).states
    extension.load().enter(extension.load().States([states[1]]), Phase.ARRIVED, [Phase.IDLE])
    assert extension.load().enter(states, Phase.SENT, [Phase.IDLE]) is states[1]
    assert [state.phase for state in states] == [Phase.SENT, Phase.ARRIVED, Phase.IDLE]


def test_tensors_of_two_classes_get_their_own_again(state):
    both = [state.parameter, state.visible_grad]
    pending.mark(both, OWNER)
    pending.clear(both)
    assert [type(each) for each in both] == [torch.nn.Parameter, torch.Tensor]


def test_a_view_is_not_held_by_the_state_that_shows_it():
    """Other holders are seen by the references to the memory."""
    table = extension.load().GradientTable(["weight"], [torch.nn.Parameter(torch.ones(2))])
    (state,), view = table.states, torch.ones(2)
    table.follow_layout([view], [(0, 0, 0, 0)])
    references = sys.getrefcount(view)
    state.visible_grad = state.update_grad = torch.ones(2)
    state.visible_grad = state.update_grad = view
    assert sys.getrefcount(view) == references


def test_a_gradient_where_none_is_shown_is_the_programs(state):
    state.visible_grad = None
    assert extension.load().hold_visible([state])
    state.parameter.grad = torch.ones(2)
    assert not extension.load().hold_visible([state])


def test_states_are_found_by_their_tensors():
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(5)]
    table = extension.load().GradientTable([f"p{i}" for i in range(5)], parameters)
    state, views, apart, owned = table.states[3], [torch.ones(2) for _ in range(5)], torch.ones(2), torch.ones(2)
    table.follow_layout(views, [(0, 0, 0, 0)] * 5)
    assert [table.of(tensor) for tensor in (parameters[3], views[3])] == [state, None]
    state.visible_grad, state.owned = views[3], (owned,)
    assert [table.of(tensor) for tensor in (views[3], owned, apart)] == [state, state, None]
    state.visible_grad = apart
    assert [table.of(tensor) for tensor in (views[3], apart)] == [None, state]
    assert names(table.states) == "p0, p1, p2 and 2 more"
    table.release()
    assert table.of(parameters[3]) is None


def test_a_loop_over_states_ends_without_a_cpp_exception():
    """It would take longer than the rest of an update of a few parameters; Python's own iterators throw none."""
    table = extension.load().GradientTable(["p0", "p1"], [torch.nn.Parameter(torch.ones(2)) for _ in range(2)])
    loop = iter(table.states)
    assert type(loop) is type(iter([]))
    assert [state.name for state in loop] == ["p0", "p1"]


def test_a_new_layout_replaces_views_that_are_shown():
    """What has moved is the new view, what the program keeps in .grad stays, and what it has dropped is gone."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    table = extension.load().GradientTable(["moved", "kept", "dropped"], parameters)
    states, old, new = table.states, [torch.ones(2) for _ in range(3)], [torch.ones(2) for _ in range(3)]
    table.follow_layout(old, [(0, 0, 0, 0)] * 3)
    for state, view in zip(states, old, strict=True):
        state.visible_grad = state.update_grad = view
    parameters[0].grad, parameters[1].grad = new[0], old[1]
    table.follow_layout(new, [(0, 0, 0, 0)] * 3)
    for state, expected in zip(states, (new[0], old[1], None), strict=True):
        assert state.visible_grad is expected
        assert state.update_grad is expected
