"""The phases of a parameter within a step: which tensors are pending in each, and which transitions exist."""

import pytest

import gradcast
from gradcast.training.step import parameter_state, pending
from gradcast.training.step.parameter_state import LocallyUnused, ParameterState, ParameterStates, Phase, names
from training.needs import torch

TRANSITIONS = ("begin_step", "depart", "defer_update", "start_update", "fail_update")
ALLOWED = {
    Phase.IDLE: {"begin_step", "depart"},
    Phase.TRAVELLING: {"defer_update"},
    Phase.ARRIVED: {"begin_step", "defer_update", "fail_update"},
    Phase.UPDATE_DUE: {"start_update"},
}


class Owner:
    """Pending tensors need one that lives."""


OWNER = Owner()


@pytest.fixture
def state():
    state = ParameterState(0, "weight", torch.nn.Parameter(torch.ones(2)))
    state.visible_grad = state.update_grad = torch.ones(2)
    yield state
    parameter_state.release([state])


def bring_to(state, phase):
    if phase is Phase.IDLE:
        return
    parameter_state.depart([state], OWNER)
    if phase is Phase.ARRIVED:
        parameter_state.arrive([state])
    if phase is Phase.UPDATE_DUE:
        parameter_state.defer_update([state], OWNER)


def pending_parts(state):
    return pending.is_pending(state.parameter), pending.is_pending(state.visible_grad)


def call(state, transition):
    owner = () if transition in ("begin_step", "start_update") else (OWNER,)
    getattr(parameter_state, transition)([state], *owner)


@pytest.mark.parametrize("transition", TRANSITIONS)
@pytest.mark.parametrize("phase", Phase)
def test_a_transition_checks_where_it_comes_from(state, phase, transition):
    bring_to(state, phase)
    assert state.phase is phase
    if transition in ALLOWED[phase]:
        call(state, transition)
        return
    before = pending_parts(state)
    with pytest.raises(gradcast.Error, match=f"weight is {phase.name}") as refused:
        call(state, transition)
    assert refused.value.code == "internal"
    assert (state.phase, pending_parts(state)) == (phase, before)


@pytest.mark.parametrize(
    ("phase", "expected"),
    [
        (Phase.IDLE, (False, False)),
        (Phase.TRAVELLING, (False, True)),
        (Phase.ARRIVED, (False, False)),
        (Phase.UPDATE_DUE, (True, True)),
    ],
)
def test_a_phase_says_what_is_pending(state, phase, expected):
    bring_to(state, phase)
    assert pending_parts(state) == expected
    parameter_state.release([state])
    assert (state.phase, pending_parts(state)) == (Phase.IDLE, (False, False))


def test_an_unused_parameter_is_pending_until_its_gradient_has_arrived(state):
    state.locally_unused = LocallyUnused(None, False)
    parameter_state.depart([state], OWNER)
    assert pending_parts(state) == (True, True)
    parameter_state.arrive([state])
    assert pending_parts(state) == (False, False)


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


def test_states_are_found_by_their_tensors():
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(5)]
    states = ParameterStates(ParameterState(i, f"p{i}", p) for i, p in enumerate(parameters))
    first, second = torch.ones(2), torch.ones(2)
    states.set_visible_grad(states[3], first)
    assert [states.of(tensor) for tensor in (parameters[3], first, second)] == [states[3], states[3], None]
    states.set_visible_grad(states[3], second)
    assert [states.of(tensor) for tensor in (parameters[3], first, second)] == [states[3], None, states[3]]
    assert names(states) == "p0, p1, p2 and 2 more"
    states.release()
    assert states.of(second) is None
    assert not states
