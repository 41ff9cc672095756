"""Fixtures of the training tests."""

import signal

import pytest

# A program that a shell has put into the background ignores Ctrl-C, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _native_part():
    """Compiled before any test starts a clock, where the cache has none for these sources."""
    from gradcast.training.compat import extension

    extension.load()


@pytest.fixture(scope="session", autouse=True)
def _dumps_folder(tmp_path_factory):
    """Where what failing ranks write down goes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("dumps")))
        yield


@pytest.fixture(scope="session")
def ranks(_native_part):
    """Runs a function on 1 to 4 processes: ranks.run(2, function, …) -> the results, by rank."""
    from training.pool import Pool

    pool = Pool(4)
    yield pool
    pool.end()
