"""What all tests share: the command line in this process, small profiles, and the pool of ranks."""

import json
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import settings

import gradcast
from gradcast.cli import main

# The same cases on every run, and no judgement by the clock: a busy machine is no defect.
settings.register_profile("gradcast", deadline=None, derandomize=True)
settings.load_profile("gradcast")
# A program that a shell has put into the background ignores Ctrl-C, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Tests run side by side, so torch's threads in each would only wait for each other's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[1]
# A network on which no two policies tie and nothing can be hidden.
NETWORK = ["--bandwidth", "5gbit", "--workers", "8", "--latency", "50us"]


# Minutes of slow tests each.
_LONGEST = {"disturbances", "random_programs", "ends", "torchft", "transport", "examples", "trainer"}


def pytest_collection_modifyitems(items):
    """The longest files first: one that begins last would run alone at the end, beside an idle core."""
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in _LONGEST)


def link_of(alpha_ns, beta_ns_per_byte):
    """A link whose all-reduces cost this at every size."""
    piece = gradcast.LinkPiece(alpha_ns=alpha_ns, beta_ns_per_byte=beta_ns_per_byte)
    return gradcast.LinkModel(all_reduce=[piece])


def lab_network(host_count, rate_bits_per_s):
    """Hosts in network namespaces; where none can be made, the test is skipped."""
    from gradcast.lab import LabError, Network

    try:
        return Network(host_count, rate_bits_per_s)
    except LabError as error:
        pytest.skip(f"no hosts can be made here: {error}")


@pytest.fixture(autouse=True)
def _environment():
    """The doctor sets GRADCAST_DISABLE for the rest of its process, which here is that of all tests."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def run(capsys):
    """Runs `gradcast` in this process: run("simulate", …) -> code, out, err."""

    def run_cli(*arguments):
        try:
            code = main.main([str(argument) for argument in arguments])
        except SystemExit as exit_:  # argparse leaves that way
            code = exit_.code
        captured = capsys.readouterr()
        return SimpleNamespace(code=code, out=captured.out, err=captured.err)

    return run_cli


@pytest.fixture
def refused(run):
    """refused(arguments, *words) -> the result: the command ends with one sentence that has these words."""

    def refused_cli(arguments, *words, code=2):
        result = run(*arguments)
        assert (result.code, result.out) == (code, "")
        assert len(result.err.strip().splitlines()) == 1, result.err
        assert result.err.startswith("gradcast: error: ")
        # Neither Python's nor C++'s insides: no traces, types, addresses, or source files.
        inside = r"Traceback|\.py\b|\.cc\b|\.h:|std::|nlohmann|gradcast::|0x[0-9a-f]{6}|NoneType"
        assert not re.search(inside, result.err)
        for word in words:
            assert word in result.err
        return result

    return refused_cli


@pytest.fixture
def profile_fields():
    """A valid profile as the fields of its JSON, to be broken or written to a file."""
    return {
        "version": 1,
        "name": "small",
        "world_size": 4,
        "forward_ns": 3_000_000,
        "backward_ns": 6_000_000,
        "tensors": [
            {"name": "first", "bytes": 4_000_000, "ready_ns": 6_000_000, "need_ns": 0},
            {"name": "second", "bytes": 400, "ready_ns": 4_000_000, "need_ns": 1_000_000},
            {"name": "third", "bytes": 8_000_000, "ready_ns": 1_000_000, "need_ns": 2_000_000},
        ],
        "link": {"all_reduce": [{"up_to_bytes": None, "alpha_ns": 100_000, "beta_ns_per_byte": 0.8}]},
    }


@pytest.fixture
def profile(profile_fields):
    return gradcast.Profile.from_json(json.dumps(profile_fields))


@pytest.fixture
def profile_path(profile_fields, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile_fields))
    return path


@pytest.fixture
def plan_path(profile_path, tmp_path, run):
    path = tmp_path / "plan.json"
    assert run("dev", "plan", profile_path, "-o", path).code == 0
    return path


@pytest.fixture(scope="session")
def native_part():
    """The part for torch, compiled before any test starts a clock if the cache has none for these sources."""
    from gradcast.training.compat import extension

    extension.load()


@pytest.fixture(scope="session")
def dumps_folder(tmp_path_factory):
    """The folder that failing ranks write their dumps into, instead of the system's temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("dumps")))
        yield


@pytest.fixture(scope="session")
def ranks(native_part, dumps_folder):
    """Runs a function on 1 to 8 processes: ranks.run(2, function, …) -> the results, by rank."""
    from training.pool import Pool

    pool = Pool(8)
    yield pool
    pool.end()
