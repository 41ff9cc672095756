"""Fixtures of the training tests."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _prepared(native_part, dumps_folder):
    """For every test here, also for those that start processes of their own."""


@pytest.fixture(params=["overlap", "hook"])
def mode(request):
    """A test that takes it runs in both modes."""
    return request.param
