"""Predictions and alarms against published measurements, which stay where they are: the folder is an argument.

    python -m benchmarks.published_runs alarms FOLDER

``alarms``: cluster_speed_series.csv of CM-DARE (S. Li et al., ICDCS 2020, arXiv 2004.03072): speeds over time of
clusters of 1 to 8 workers with one parameter server. Expected are n times the speed of one worker.
"""

import argparse
import csv
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tabulate import tabulate

from gradcast.alarms import Alarms, Observation

SETTLED_S = 30.0
THRESHOLD = 0.067
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=PROGRAMS)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(arguments)
    PROGRAMS[args.what](args.folder)


PROGRAMS = {"alarms": print_alarms}

if __name__ == "__main__":
    main()
