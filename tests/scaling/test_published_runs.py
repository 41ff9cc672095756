"""Predictions and alarms against published measurements, for whoever has them."""

import os
from pathlib import Path

import pytest

DATA = os.environ.get("GRADCAST_PUBLISHED_DATA")


@pytest.fixture(scope="module")
def published_runs():
    from benchmarks import published_runs

    return published_runs


@pytest.fixture
def folder():
    """folder(name) -> that of one publication."""

    def of(name):
        if DATA is None or not Path(DATA, name).is_dir():
            pytest.skip(f"GRADCAST_PUBLISHED_DATA names no folder with {name}, see benchmarks/published_runs.py")
        return Path(DATA, name)

    return of


def test_the_time_to_finish_of_revoked_trainings(published_runs, folder):
    errors = [abs(each.error) for each in published_runs.revoked_runs(folder("transient"))]
    assert len(errors) == 15
    assert sum(errors) / len(errors) <= 0.03
    assert max(errors) <= 0.06


def test_steps_of_models_that_are_left_out(published_runs, folder):
    found = published_runs.step_times(folder("cmdare"))
    assert len(found.errors) == 20
    assert found.mean_error <= 0.045


def test_alarms_are_right_on_every_series_that_is_decided(published_runs, folder):
    series = published_runs.alarm_series(folder("cmdare"))
    assert len(series) == 64
    assert [each for each in series if each.is_decided and not each.is_right] == []
