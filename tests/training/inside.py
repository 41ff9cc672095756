"""The inside of a training, for tests of its parts."""

from gradcast.training.state import TrainingState


def session_of(handle):
    return TrainingState.of(handle, "a test").session
