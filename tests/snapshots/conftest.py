"""Fixtures of the snapshot tests."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _prepared(native_part, dumps_folder):
    """For every test here, also for those that start processes of their own."""
