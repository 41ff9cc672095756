"""Ranks that stop, links that fail: a run recovers with the numbers of an undisturbed one, or ends everywhere in time.

On hosts of the laboratory, which needs root; what does not need a link of its own runs on loopback.
"""

import json
import re
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest

from conftest import lab_network
from training.launch import launch, require_ended_well, require_network_error
from training.needs import torch

pytestmark = pytest.mark.slow

STEPS = 40
RATE_BITS_PER_S = 100e6


def when_marked(path, act):
    def during(processes):
        deadline_s = time.monotonic() + 40
        while not Path(path).exists():
            assert time.monotonic() < deadline_s, "the training did not get as far as its plan"
            assert all(process.poll() is None for process in processes), "a rank has ended before"
            time.sleep(0.02)
        act(processes)

    return during


def disturbed(tmp_path, mode, act, network=None, world_size=2, task="plain"):
    marker = str(tmp_path / "marker")
    during = when_marked(marker, act)
    return launch(world_size, "is_disturbed", mode, task, str(STEPS), marker, network=network, during=during)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The digest of the parameters after the same steps, by mode and number of ranks."""
    known = {}

    def digest(mode, world_size=2):
        if (mode, world_size) not in known:
            ends = disturbed(tmp_path_factory.mktemp("plain"), mode, lambda _: None, world_size=world_size)
            assert [end.code for end in ends] == [0] * world_size, ends
            digests = {end.told[0]["digest"] for end in ends}
            assert len(digests) == 1
            known[mode, world_size] = digests.pop()
        return known[mode, world_size]

    return digest


@pytest.fixture
def network():
    with lab_network(2, RATE_BITS_PER_S) as made:
        yield made


@pytest.fixture
def store(monkeypatch):
    """A store in this process, which a test can take away."""
    held = [
        torch.distributed.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
    ]
    monkeypatch.setenv("TEST_STORE_PORT", str(held[0].port))
    return held


def check_recovered(ends, digest):
    require_ended_well(ends)
    assert all(end.told[0] == {"digest": digest} for end in ends)


def stop_until_others_end(rank):
    """Longer than the timeout of those who wait for it."""

    def act(processes):
        processes[rank].send_signal(signal.SIGSTOP)
        deadline_s = time.monotonic() + 30
        others = [process for number, process in enumerate(processes) if number != rank]
        while any(process.poll() is None for process in others) and time.monotonic() < deadline_s:
            time.sleep(0.05)
        processes[rank].send_signal(signal.SIGCONT)

    return act


@pytest.mark.parametrize("mode", ["overlap", pytest.param("hook", marks=pytest.mark.long)])
def test_a_rank_that_stops_for_a_while_and_a_store_that_is_gone(tmp_path, monkeypatch, undisturbed, mode, store):
    """Shorter than the timeout: rank 0 says once whom it waits for, and then everything goes on. Nobody misses the
    store."""
    monkeypatch.setenv("TEST_TIMEOUT_S", "12")
    digest = undisturbed(mode)  # on this store, too

    def stop(processes):
        store.clear()
        processes[1].send_signal(signal.SIGSTOP)
        time.sleep(5)
        processes[1].send_signal(signal.SIGCONT)

    ends = disturbed(tmp_path, mode, stop)
    check_recovered(ends, digest)
    assert len(re.findall("rank 1 has not responded", ends[0].errors)) == 1, ends[0].errors
    assert "Waiting: rank 0" in ends[0].errors
    assert re.search(r"block \d+ of \d+", ends[0].errors)


def test_rank_0_stops_and_its_buffers_never_come(tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_TIMEOUT_S", "4")
    ends = disturbed(tmp_path, "overlap", stop_until_others_end(0), task="convnet")
    assert all(end.code == 1 and not end.left_behind for end in ends), ends
    require_network_error(ends[1])
    assert "waiting for 1 s" in ends[1].errors, ends[1].errors


def test_a_rank_that_stops_for_longer_than_the_timeout(tmp_path, monkeypatch):
    monkeypatch.setenv("TEST_TIMEOUT_S", "4")
    ends = disturbed(tmp_path, "overlap", stop_until_others_end(1), world_size=3)
    assert all(end.code == 1 and not end.left_behind for end in ends), ends
    first, other = (require_network_error(ends[rank])["message"] for rank in (0, 2))
    assert "rank 1 has not responded" in first or "ranks 1 and 2 have not responded" in first, first
    assert "rank 1 has not responded" in other or "Rank 0, which knows" in other, other
    # Rank 0 has written down what all who failed with it did last.
    path = re.search(r"are in (\S+\.json)", first)[1]
    dump = json.loads(Path(path).read_text())
    assert 1 in dump["silent"]
    assert "0" in dump["ranks"]
    assert "1" not in dump["ranks"]
    assert dump["ranks"]["0"]["iterations"][-1]["blocks_ms_ago"]


@pytest.mark.parametrize("mode", ["overlap", pytest.param("hook", marks=pytest.mark.long)])
def test_a_link_that_is_slow_and_then_down_for_a_while(tmp_path, monkeypatch, undisturbed, network, mode):
    monkeypatch.setenv("TEST_TIMEOUT_S", "30")
    digest = undisturbed(mode)

    def disturb(processes):
        network.set_rate(1, RATE_BITS_PER_S / 100)
        time.sleep(1)
        assert all(process.poll() is None for process in processes), "it has ended before the link was down"
        network.set_link(1, up=False)
        time.sleep(2)
        network.set_link(1, up=True)
        network.set_rate(1, RATE_BITS_PER_S)

    check_recovered(disturbed(tmp_path, mode, disturb, network), digest)


def test_a_link_that_stays_down(tmp_path, monkeypatch, network):
    """Rank 1 cannot reach rank 0 to hear of the others, and says so."""
    monkeypatch.setenv("TEST_TIMEOUT_S", "4")
    ends = disturbed(tmp_path, "overlap", lambda _: network.set_link(1, up=False), network)
    said = " ".join(require_network_error(end)["message"] for end in ends)
    assert "rank 1 has not responded" in said
    assert "Rank 0, which knows the other ranks that failed, does not respond" in said


@pytest.mark.parametrize("mode", ["overlap", pytest.param("hook", marks=pytest.mark.long)])
def test_a_rank_that_runs_one_step_more(mode):
    ends = launch(3, "runs_one_more", mode, "1")
    assert [ends[0].told, ends[2].told] == [[{"error": None}]] * 2
    assert "ranks 0 and 2 have not responded" in require_network_error(ends[1])["message"]
    assert all(end.code is not None and not end.left_behind for end in ends)


def test_a_killed_rank_without_a_store(tmp_path, store):
    def take_away_and_kill(processes):
        store.clear()
        processes[1].kill()

    ends = disturbed(tmp_path, "overlap", take_away_and_kill, world_size=3)
    assert [end.code for end in ends] == [1, -9, 1]
    for rank in (0, 2):
        message = require_network_error(ends[rank])["message"]
        assert "not responded" in message or "Rank 0, which knows" in message
