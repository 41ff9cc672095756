"""Numbers for loggers and for Prometheus."""

import json
import math
import os
import re

import pytest

from diagnosis import doctor_runs
from gradcast.diagnosis.report import metrics
from gradcast.diagnosis.runs import PARTS
from gradcast.disk import write_file
from gradcast.errors import Error

# The text format, from its specification: a line is a comment with a purpose, or a sample.
LABELS = r'\{(?:[a-zA-Z_]\w*="(?:[^"\\\n]|\\\\|\\"|\\n)*"(?:,|(?=\})))*\}'
SAMPLE = re.compile(rf"([a-zA-Z_:][\w:]*)({LABELS})? (\S+)")
STATS = {
    "step": 120, "mode": "overlap", "measured_ms": 41.5, "exposed_ms": None, "runs_as_ddp": False, "tries_ddp": True,
    "gradient_buffer_bytes": 1024, "engine_us_per_block": 12.0, "expected_gain": math.nan,
}  # fmt: skip


def read(text):
    """Parses the text as a scraper does, and rejects what a scraper would reject."""
    found, seen, current = {}, set(), None
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# "):
            _, kind, name, *_ = line.split(" ", 3)
            assert kind in ("HELP", "TYPE")
            if name != current:
                assert name not in seen, f"{name} comes back"
                seen.add(name)
            current = name
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        assert match[1] == current, "samples stand below their own TYPE"
        key = (match[1], match[2] or "")
        assert key not in found, "a sample twice"
        found[key] = float(match[3])
    return found


@pytest.fixture(scope="module")
def doctor():
    return doctor_runs.doctor()


def test_a_flat_dict_of_a_run(doctor):
    flat = metrics.flat(doctor)
    assert flat["gradcast/step_ms"] == doctor["step"]["ms"]
    assert flat["gradcast/part/network_ms"] == next(part["ms"] for part in doctor["parts"] if part["key"] == "network")
    assert flat["gradcast/action/wire_speedup"] == doctor["actions"][0]["speedup"]
    assert all(isinstance(value, int | float) for value in flat.values())
    assert json.loads(json.dumps(flat)) == flat


def test_what_is_not_known_is_left_out():
    flat = metrics.flat(doctor_runs.bare())
    assert not [key for key in flat if "predicted" in key or "floor" in key or "action" in key]
    assert read(metrics.prometheus(doctor_runs.bare()))


def test_a_flat_dict_of_stats():
    flat = metrics.flat_stats(STATS)
    assert flat == {
        "gradcast/step": 120, "gradcast/measured_ms": 41.5, "gradcast/runs_as_ddp": 0, "gradcast/tries_ddp": 1,
        "gradcast/gradient_buffer_bytes": 1024, "gradcast/engine_us_per_block": 12.0,
    }  # fmt: skip


def test_prometheus_reads_a_run(doctor):
    found = read(metrics.prometheus(doctor))
    assert found["gradcast_step_seconds", ""] == pytest.approx(doctor["step"]["ms"] / 1e3)
    backward = doctor["ranks"][2]["parts"]["backward"]
    labels = '{rank="2",host="host1",part="backward"}'
    assert found["gradcast_part_seconds", labels] == pytest.approx(backward / 1e3)
    assert found["gradcast_bus_bytes_per_second", ""] == pytest.approx(2.8e9 / 8)
    assert len([name for name, _ in found if name == "gradcast_part_seconds"]) == 4 * len(PARTS)
    for name in {name for name, _ in found}:
        assert f"# HELP {name} " in metrics.prometheus(doctor)


def test_prometheus_reads_stats():
    found = read(metrics.prometheus_stats(STATS, rank=3, host="h"))
    labels = '{rank="3",host="h"}'
    assert found["gradcast_measured_seconds", labels] == pytest.approx(0.0415)
    assert found["gradcast_tries_ddp", labels] == 1
    assert found["gradcast_engine_seconds_per_block", labels] == pytest.approx(12e-6)
    assert len(found) == 6


def test_alarms_are_a_gauge_for_each_cause():
    stats = STATS | {"alarms": [{"cause": "link"}]}
    found = read(metrics.prometheus_stats(stats, rank=3))
    assert found["gradcast_alarm", '{rank="3",cause="link"}'] == 1
    assert found["gradcast_alarm", '{rank="3",cause="data"}'] == 0
    assert metrics.flat_stats(stats)["gradcast/alarm/link"] == 1
    assert metrics.flat_stats(STATS | {"alarms": []})["gradcast/alarm/link"] == 0


def test_labels_are_escaped():
    run = doctor_runs.doctor(model={"name": 'a"b\\c\nd', "tensors": 1, "bytes": 1})
    assert 'model="a\\"b\\\\c\\nd"' in metrics.prometheus(run)
    read(metrics.prometheus(run))


def test_a_file_is_whole_or_not_there(tmp_path, monkeypatch):
    path = tmp_path / "x.prom"
    write_file(path, "old\n", "file")
    assert path.stat().st_mode & 0o777 == 0o644

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(Error, match="no space left on device"):
        write_file(path, "new\n", "file")
    assert path.read_text() == "old\n"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(Error, match="the file cannot be written to"):
        write_file(tmp_path / "none" / "x", "new", "file")
