"""Thousands of steps on four hosts whose links change, with everything that a long training does."""

import random
import time
from pathlib import Path

import pytest

from conftest import lab_network
from training import needs  # noqa: F401
from training.launch import launch
from training.ranks.test_disturbances import RATE_BITS_PER_S

STEPS = 2000
RATES_BITS_PER_S = (20e6, 100e6, 1e9)


@pytest.mark.long
def test_two_thousand_steps(tmp_path):
    """Parameters stay DDP's; memory, threads and open files do not grow."""
    chance = random.Random(1)
    with lab_network(4, RATE_BITS_PER_S) as network:

        def change_rates(processes):
            while all(process.poll() is None for process in processes):
                network.set_rate(chance.randrange(4), chance.choice(RATES_BITS_PER_S))
                time.sleep(chance.uniform(0.2, 2.0))
                progress = Path(tmp_path, "progress")
                if progress.exists() and int(progress.read_text() or 0) >= STEPS:
                    return

        ends = launch(4, "soaks", str(STEPS), str(tmp_path), network=network, during=change_rates, limit_s=1800)
    for end in ends:
        assert end.code == 0, end.errors
        told = end.told[0]
        assert told["digest"] == ends[0].told[0]["digest"]
        # In double precision the order of a sum of four terms is all that may differ.
        assert told["largest"] < 1e-9
        # The first quarter is left out: caches, connections and the allocator fill.
        first, last = told["held"][len(told["held"]) // 4], told["held"][-1]
        assert last["threads"] <= first["threads"], told["held"]
        assert last["files"] <= first["files"], told["held"]
        assert last["resident_kib"] < first["resident_kib"] * 1.05 + 4096, told["held"]
