"""Starts the workers of the demo, and chooses how slow their link is."""

import math
from typing import Any

from benchmarks.demo.settings import Settings
from gradcast.lab import Network
from gradcast.lab.workers import run_for_result

_TIMEOUT_S = 600
_RATES_BITS_PER_S = (10e6, 5e9)


def train(settings: Settings, network: Network | None, output: Any) -> dict[str, Any]:
    """What rank 0 measured, see worker.py; progress goes to ``output``."""
    return _run("train", settings, network, output)


def choose_rate(settings: Settings, network: Network) -> float:
    """Sets the links so that a step's gradients travel as long as the step computes on this machine; bits per second.

    There a schedule matters most: on a faster link there is less to hide, on a slower one less to hide it behind.
    """
    facts = _run("compute", settings, network, None)
    # With two workers each sends and receives every byte once.
    exact = 8 * facts["parameter_bytes"] / (facts["compute_ms"] / 1e3)
    digits = 10 ** math.floor(math.log10(exact) - 1)
    low, high = _RATES_BITS_PER_S
    rate_bits_per_s = min(max(digits * round(exact / digits), low), high)
    network.set_all_rates(rate_bits_per_s)
    return rate_bits_per_s


def _run(task: str, settings: Settings, network: Network | None, output: Any) -> dict[str, Any]:
    return run_for_result(
        "benchmarks.demo.worker",
        [task, settings.to_json()],
        settings.workers,
        timeout_s=_TIMEOUT_S,
        network=network,
        output=output,
    )
