"""``gradcast dev lab adapt``: a change of conditions during training, and back; shows gradcast's reaction."""

import dataclasses
import os
import statistics
import threading
from typing import IO, Any

from gradcast.lab.hosts import Network
from gradcast.lab.workers import run_for_result

# What changes during the middle third of the steps.
SCENARIOS = {
    "network": "all links become {factor:g} times slower",
    "link": "the link of host 1 becomes {factor:g} times slower",
    "host": "host 1 computes {factor:g} times longer",
    "data": "host 1 loads data {factor:g} times as long, before 10 ms a step as all do",
    "batch": "all hosts compute {factor:g} times longer, as with a larger batch",
}
CHANGED_HOST = 1
LOADING_S = 0.01  # per step in the scenario data
CHANGE, CHANGE_BACK = b"+", b"-"  # requests of rank 0


@dataclasses.dataclass(frozen=True)
class AdaptSettings:
    model: str
    profile: str  # the stand-in's profile as JSON
    rates_bits_per_s: tuple[float, ...]
    scenario: str
    factor: float = 2.0
    scale_size: float = 1.0
    steps: int = 180
    ranks_per_host: int = 1

    @property
    def changes_at(self) -> int:
        return self.steps // 3

    @property
    def returns_at(self) -> int:
        return 2 * self.steps // 3

    @property
    def description(self) -> str:
        return SCENARIOS[self.scenario].format(factor=self.factor)


@dataclasses.dataclass(frozen=True)
class Phase:
    """The steps from a change to the next one."""

    change_step: int  # the first step after the change
    before_ms: float  # median step with the old plan before the change
    since_ms: float | None  # median step from the change until gradcast measures again
    after_ms: float | None  # median step with the new plan
    steps_to_plan: int | None  # from the change to the first step with the new plan; None if there was none
    longest_ms: float  # longest step between the change and the new plan


def run(settings: AdaptSettings, *, timeout_s: float, output: IO[str]) -> dict[str, Any]:
    """Returns rank 0's record, see adapt_worker.py. ``output``: for the progress."""
    rates = settings.rates_bits_per_s
    read_end, write_end = os.pipe()
    with (
        Network(len(rates), rates[0]) as network,
        os.fdopen(read_end, "rb", buffering=0) as requests,
        os.fdopen(write_end, "wb", buffering=0) as request_pipe,
    ):
        _set_rates(network, settings, changed=False)
        listener = threading.Thread(target=_serve_requests, args=(requests, network, settings), daemon=True)
        listener.start()
        try:
            return run_for_result(
                "gradcast.lab.adapt_worker:record",
                [settings, write_end],
                len(rates) * settings.ranks_per_host,
                promptly=True,
                timeout_s=timeout_s,
                network=network,
                ranks_per_host=settings.ranks_per_host,
                output=output,
                inherited=[request_pipe],
            )
        finally:
            request_pipe.write(b".")  # ends the thread
            listener.join()


def phases(results: dict[str, Any], settings: AdaptSettings) -> list[Phase]:
    spans = ((settings.changes_at, settings.returns_at), (settings.returns_at, settings.steps))
    return [_phase(results["steps"], *span) for span in spans]


def _phase(steps: list[dict[str, Any]], change_step: int, end: int) -> Phase:
    old = steps[change_step - 1]["version"]
    measuring = next((s["step"] for s in steps[change_step:end] if s["measuring"]), end)
    planned = next((s["step"] for s in steps[measuring:end] if not s["measuring"]), None)

    def median_ms(first: int, last: int, version: int | None = None) -> float | None:
        chosen = [s["ms"] for s in steps[first:last] if version is None or s["version"] == version]
        return statistics.median(chosen) if chosen else None

    before_ms = median_ms(0, change_step, old)
    assert before_ms is not None
    return Phase(
        change_step=change_step,
        before_ms=before_ms,
        since_ms=median_ms(change_step + 1, measuring),
        after_ms=None if planned is None else median_ms(planned + 1, end),
        steps_to_plan=None if planned is None else planned - change_step,
        longest_ms=max(s["ms"] for s in steps[change_step : planned or end]),
    )


def _serve_requests(requests: IO[bytes], network: Network, settings: AdaptSettings) -> None:
    while (request := requests.read(1)) in (CHANGE, CHANGE_BACK):
        _set_rates(network, settings, changed=request == CHANGE)


def _set_rates(network: Network, settings: AdaptSettings, *, changed: bool) -> None:
    slower = {"network": range(network.host_count), "link": [CHANGED_HOST]}.get(settings.scenario, [])
    for host, rate in enumerate(settings.rates_bits_per_s):
        network.set_rate(host, rate / settings.factor if changed and host in slower else rate)
