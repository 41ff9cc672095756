"""The results table, from rank 0's measurements: one row per variant."""

import dataclasses
import json
import statistics
from dataclasses import dataclass
from typing import Any

from gradcast import _core
from gradcast.comparison.compare import compute_ns
from gradcast.files import scaled_profile
from gradcast.lab.settings import Settings
from gradcast.lab.variants import COMPUTE, Variant, variant

# Sums of three or more numbers are rounded differently in blocks of other sizes, by 1e-7. Wrong numbers differ by more.
TOLERANCE = 1e-6
# Training of a real model amplifies such differences. With two ranks there are none:
_TOLERANCE_REAL = 1e-3
_EXACT_RANKS = 2  # a sum of two numbers has no order


@dataclass(frozen=True)
class VariantResult:
    name: str
    mode: str
    step_ms: float  # median of the counted steps on rank 0
    low_ms: float  # first decile
    high_ms: float  # last decile
    steps_ms: list[float]
    ratio_to_best_ddp: float  # speed-up over the best DDP
    ratio_to_bound: float  # step_ms divided by the lower bound
    exposed_ms: float | None  # what communication adds to the step
    blocks: int | None  # operations of a step; None if nothing is sent
    predicted_ms: float | None
    prediction_error: float | None  # predicted_ms / step_ms - 1
    replayed_ms: float | None  # see replays.py
    replay_error: float | None  # relative to the measured median of the same steps, minus 1
    cores_busy: float | None  # share of the whole machine, during the counted steps
    difference: float | None  # largest relative difference of a parameter to ddp's on any rank
    sent_bytes: list[float]  # that left each host in a step, by the counter of its interface
    details: dict[str, Any]

    @property
    def lossy(self) -> bool:
        return _variant(self.name).wire != "fp32"

    @property
    def fell_back(self) -> bool:
        """True if gradcast found no gain, and runs as DDP."""
        return bool(self.details.get("stats", {}).get("runs_as_ddp"))


@dataclass(frozen=True)
class Table:
    rows: list[VariantResult]
    bounds: dict[str, _core.Bound]  # by mode
    tolerance: float

    @property
    def compute_ms(self) -> float:
        return self.row(COMPUTE).step_ms

    @property
    def best_ddp(self) -> VariantResult:
        return min((row for row in self.rows if row.mode == "ddp"), key=lambda row: row.step_ms)

    @property
    def bound_ms(self) -> float:
        return self.bounds["overlap"].best_ns / 1e6

    def row(self, name: str) -> VariantResult:
        return next(row for row in self.rows if row.name == name)

    @property
    def wrong(self) -> list[VariantResult]:
        """The rows whose parameters differ from DDP's by more than the tolerance, or are NaN."""
        return [row for row in self.compared if not row.difference <= self.tolerance]

    @property
    def compared(self) -> list[VariantResult]:
        return [row for row in self.rows if row.difference is not None and not row.lossy]


def table_of(results: dict[str, Any], settings: Settings) -> Table:
    rounds = results["rounds"]
    names = list(rounds[0]["steps_ms"])
    steps_ms = {name: [ms for entry in rounds for ms in entry["steps_ms"][name]] for name in names}
    medians_ms = {name: statistics.median(steps_ms[name]) for name in names}
    profile = _core.Profile.from_json(json.dumps(results["profile"]))
    # The profile's compute is scaled to the measured step without communication.
    profile = scaled_profile(profile, 1e6 * medians_ms[COMPUTE] / compute_ns(profile))
    flight = settings.in_flight
    bounds = {mode: _core.bound(profile, profile.link, mode=mode, in_flight=flight) for mode in ("overlap", "hook")}
    best_ddp_ms = min(ms for name, ms in medians_ms.items() if _variant(name).mode == "ddp")

    def row(name: str) -> VariantResult:
        tenths = statistics.quantiles(steps_ms[name], n=10, method="inclusive")
        facts = results["variants"][name]
        busy = [entry["cores_busy"][name] for entry in rounds if entry["cores_busy"][name] is not None]
        ms, predicted_ms, replay = medians_ms[name], facts["predicted_ms"], facts.get("replay")
        return VariantResult(
            name=name,
            mode=_variant(name).mode,
            step_ms=ms,
            low_ms=tenths[0],
            high_ms=tenths[-1],
            steps_ms=steps_ms[name],
            ratio_to_best_ddp=best_ddp_ms / ms,
            ratio_to_bound=1e6 * ms / bounds["overlap"].best_ns,
            exposed_ms=None if name == COMPUTE else ms - medians_ms[COMPUTE],
            blocks=facts["blocks"],
            predicted_ms=predicted_ms,
            prediction_error=None if predicted_ms is None else predicted_ms / ms - 1,
            replayed_ms=None if replay is None else replay["replayed_ms"],
            replay_error=None if replay is None else replay["replayed_ms"] / replay["measured_ms"] - 1,
            cores_busy=statistics.mean(busy) if busy else None,
            difference=results["differences"].get(name),
            sent_bytes=[
                statistics.mean(host) for host in zip(*(entry["sent_bytes"][name] for entry in rounds), strict=True)
            ],
            details={key: value for key, value in facts.items() if key not in ("blocks", "predicted_ms", "replay")},
        )

    exact = settings.stand_in or settings.world_size <= _EXACT_RANKS
    return Table([row(name) for name in names], bounds, TOLERANCE if exact else _TOLERANCE_REAL)


def as_json(table: Table, results: dict[str, Any], settings: Settings) -> dict[str, Any]:
    fields = dataclasses.asdict(settings)
    for name in ("profile", "rates_bits_per_s", "ranks_per_host"):
        fields.pop(name)
    fields["latency_ms"] = 1e3 * fields.pop("latency_s")
    link = results["profile"]["link"]
    return {
        "settings": fields,
        "model": settings.model,
        "stand_in": settings.stand_in,
        "hosts": settings.hosts,
        "ranks_per_host": settings.ranks_per_host,
        "bandwidths_gbit_per_s": [bits / 1e9 for bits in settings.rates_bits_per_s],
        "torch": results["torch"],
        "parameter_bytes": results["parameter_bytes"],
        "link": link,
        "profile": results["profile"],
        "compute_ms": table.compute_ms,
        "bounds_ms": {
            mode: {"plain": bounds.plain_ns / 1e6, "best": bounds.best_ns / 1e6}
            for mode, bounds in table.bounds.items()
        },
        "best_ddp": table.best_ddp.name,
        "tolerance": table.tolerance,
        "parameters_equal": not table.wrong,
        "rows": [dataclasses.asdict(row) for row in table.rows],
    }


def _variant(name: str) -> Variant:
    return Variant(name, "ddp") if name.startswith("ddp") else variant(name)
