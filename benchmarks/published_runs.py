"""Predictions and alarms against published measurements, which stay where they are: the folder is an argument.

    python -m benchmarks.published_runs alarms FOLDER
    python -m benchmarks.published_runs elastic FOLDER
    python -m benchmarks.published_runs flops FOLDER

``alarms``: cluster_speed_series.csv of CM-DARE (S. Li et al., ICDCS 2020, arXiv 2004.03072): speeds over time of
clusters of 1 to 8 workers with one parameter server. Expected are n times the speed of one worker.

``elastic``: runs.csv of transient-deep-learning (S. Li et al., ICAC 2019, arXiv 1903.00045): trainings whose machines
are revoked. The others go on at the speed that on-demand workers have.

``flops``: step_time_by_model.csv of CM-DARE: 20 models on one K80, each predicted from the others.
"""

import argparse
import csv
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from gradcast.alarms import Alarms, Observation
from gradcast.scaling.spot import elastic_run
from gradcast.scaling.step_times import Fit, ModelStep, fit

SETTLED_S = 30.0
THRESHOLD = 0.067
START_S = 340.0  # from the start of a machine to that of its training
UNDECIDED = 0.02  # nearer to the threshold than this, either answer is right


class Series(NamedTuple):
    name: str
    workers: int
    speeds: tuple[float, ...]  # steps per second, after SETTLED_S
    expected: float  # n times one worker's mean
    alarm_step: int | None  # the first sample with an alarm

    @property
    def loss(self) -> float:
        return 1 - statistics.mean(self.speeds) / self.expected

    @property
    def is_decided(self) -> bool:
        return abs(self.loss - THRESHOLD) > UNDECIDED

    @property
    def is_right(self) -> bool:
        return (self.alarm_step is not None) == (self.loss > THRESHOLD)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def alarm_series(folder: Path) -> list[Series]:
    speeds: dict[tuple[str, int], list[float]] = {}
    for row in rows(folder / "cluster_speed_series.csv"):
        if float(row["seconds_since_start"]) > SETTLED_S:
            key = f"{row['config']} {row['model']}", int(row["workers"])
            speeds.setdefault(key, []).append(float(row["steps_per_second"]))
    found = []
    for (name, workers), values in speeds.items():
        expected = workers * statistics.mean(speeds[name, 1])
        found.append(Series(name, workers, tuple(values), expected, _first_alarm(values, expected, workers)))
    return found


def _first_alarm(speeds: Sequence[float], expected: float, workers: int) -> int | None:
    alarms = Alarms(workers, exact=True)
    for step, speed in enumerate(speeds, 1):
        alarm = alarms.add(Observation(step, step_ms=1e3 / speed, expected_ms=1e3 / expected))
        if alarm is not None:
            return alarm.step
    return None


def print_alarms(folder: Path) -> None:
    series = alarm_series(folder)
    table = [
        (each.name, each.workers, f"{each.loss:.1%}", each.alarm_step or "-", "" if each.is_decided else "undecided")
        for each in series
        if each.alarm_step is not None or not each.is_right or not each.is_decided
    ]
    print(tabulate(table, ["series", "workers", "below expected", "alarm at sample", ""]))
    decided = [each for each in series if each.is_decided]
    delays = [each.alarm_step for each in decided if each.alarm_step is not None]
    print(
        f"\n{sum(each.is_right for each in decided)} of {len(decided)} decided series right, of all "
        f"{sum(each.is_right for each in series)} of {len(series)}; alarms after {statistics.median(delays):g} samples "
        f"in the median, {max(delays)} at most"
    )


class Revoked(NamedTuple):
    name: str
    ends_s: tuple[float, ...]  # from the start of the training
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def revoked_runs(folder: Path) -> list[Revoked]:
    table = rows(folder / "runs.csv")
    times_s: dict[int, list[float]] = {}
    for row in table:
        if row["cluster"] == "k80-on-demand":
            times_s.setdefault(int(row["workers"]), []).append(float(row["duration_s_64k_steps"]))
    # Trainings per second and worker; 3 workers were not measured.
    speed = {workers: 1 / statistics.mean(values) / workers for workers, values in times_s.items()}
    speeds = [count * speed.get(count, speed[max(speed)]) for count in range(1, max(speed) + 1)]
    found = []
    for row in table:
        ends_s = sorted(max(0.0, float(uptime) - START_S) for uptime in row["uptimes_s_of_revoked_vms"].split())
        if ends_s:
            run = elastic_run(speeds[: int(row["workers"])], ends_s)
            name = f"{row['cluster']} {row['workers']} {row['zone']} {row['run']}"
            assert run is not None, "these trainings have ended"
            found.append(Revoked(name, tuple(ends_s), float(row["duration_s_64k_steps"]), run.time_s))
    return found


def print_elastic(folder: Path) -> None:
    found = revoked_runs(folder)
    table = [
        (
            each.name,
            " ".join(f"{end:.0f}" for end in each.ends_s),
            each.measured_s,
            each.predicted_s,
            f"{each.error:+.1%}",
        )
        for each in found
    ]
    print(tabulate(table, ["training", "revoked at s", "measured s", "predicted s", "error"], floatfmt=".0f"))
    errors = [abs(each.error) for each in found]
    print(f"\n{len(errors)} trainings, error {statistics.mean(errors):.1%} in the mean, {max(errors):.1%} at most")


def step_times(folder: Path) -> Fit:
    return fit(
        [
            ModelStep(row["model"], float(row["model_flops"]), int(row["tensors"]), 1e3 * float(row["mean_step_s"]))
            for row in rows(folder / "step_time_by_model.csv")
        ]
    )


def inner_errors(found: Fit) -> list[float]:
    """The errors of models inside the range of the others; the rest would be extrapolated."""
    models = found.models
    ends = [end(models, key=key) for key in (lambda m: m.flops, lambda m: m.tensors) for end in (min, max)]
    return [abs(error) for model, error in zip(models, found.errors, strict=True) if model not in ends]


def print_flops(folder: Path) -> None:
    found = step_times(folder)
    table = [
        (model.name, model.flops / 1e9, model.tensors, model.step_ms, f"{error:+.1%}")
        for model, error in zip(found.models, found.errors, strict=True)
    ]
    print(tabulate(table, ["model", "GFLOPs", "tensors", "step ms", "error when left out"], floatfmt=".1f"))
    inner = inner_errors(found)
    print(
        f"\nerror {found.mean_error:.1%} in the mean, {found.worst_error:.1%} at most; of the {len(inner)} models at "
        f"no end of a range {statistics.mean(inner):.1%}, {max(inner):.1%}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=PROGRAMS)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(arguments)
    PROGRAMS[args.what](args.folder)


PROGRAMS = {"alarms": print_alarms, "elastic": print_elastic, "flops": print_flops}

if __name__ == "__main__":
    main()
