"""`gradcast dev lab adapt`: what it makes of a record of steps; on real hosts, a change is followed by a new plan."""

import json
import subprocess
import sys

import pytest

from conftest import lab_network
from gradcast.lab.adapt import AdaptSettings, phases, run
from lab.small_profile import small_profile


def settings(**fields):
    return AdaptSettings(
        **{"model": "m", "profile": "{}", "rates_bits_per_s": (1e9,) * 2, "scenario": "host", **fields}
    )


def step(number, ms, version, measuring=False):
    return {"step": number, "ms": ms, "version": version, "measuring": measuring}


def test_phases_of_a_record():
    steps = [step(number, 100, 1, measuring=True) for number in range(10)]
    steps += [step(number, 10, 2) for number in range(10, 40)]
    steps += [step(number, 30, 2) for number in range(40, 48)]  # the change
    steps += [step(number, 50, 3, measuring=True) for number in range(48, 54)]
    steps += [step(number, 20, 4) for number in range(54, 80)]
    steps += [step(number, 15, 4) for number in range(80, 120)]  # nobody notices the end
    first, second = phases({"steps": steps}, settings(steps=120))
    assert (first.change_step, first.before_ms, first.since_ms, first.after_ms) == (40, 10, 30, 20)
    assert (first.steps_to_plan, first.longest_ms) == (14, 50)
    assert (second.before_ms, second.since_ms, second.after_ms, second.steps_to_plan) == (20, 15, None, None)


def test_what_changes_is_said_in_words():
    assert settings(scenario="network", factor=2.5).description == "all links become 2.5 times slower"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--scenario", "storm"], "storm"),
        (["--steps", "30"], "120"),
        (["--model", "digits"], "digits"),
        (["--factor", "0"], "0"),
    ],
)
def test_what_cannot_be_run_is_refused(refused, monkeypatch, arguments, words):
    monkeypatch.setattr("gradcast.cli.dev.lab_options.obstacle", lambda: None)
    monkeypatch.setattr("gradcast.cli.dev.lab_adapt.train", lambda *_, **__: pytest.fail("it has run"))
    refused(["dev", "lab", "adapt", *arguments], words)


@pytest.mark.slow
def test_on_hosts_the_alarm_names_the_one_whose_link_is_slow():
    lab_network(2, 1e9).close()
    options = settings(
        profile=small_profile().to_json(),
        rates_bits_per_s=(100e6,) * 4,
        scenario="link",
        factor=5.0,
        scale_size=4.0,
        steps=120,
    )
    alarms = run(options, timeout_s=120, output=sys.stderr)["alarms"]
    named = [alarm["hosts"] for alarm in alarms if alarm["cause"] == "link" and alarm["step"] > options.changes_at]
    assert named[:1] == [[1]], alarms


@pytest.mark.slow
def test_on_hosts_a_change_is_followed_by_a_new_plan(tmp_path):
    lab_network(2, 1e9).close()
    picture = tmp_path / "adapt.png"
    # Five times as long: however busy the machine is, nobody can overlook it. Before, communication takes as long as
    # compute: where no plan gains anything, gradcast looks rarely.
    command = [
        "-m", "gradcast", "dev", "lab", "adapt", "--bandwidth", "200mbit", "--model", "resnet18", "--scale-size",
        "0.01", "--forward", "6ms", "--backward", "12ms", "--scenario", "batch", "--factor", "5", "--steps", "150",
        "--json", "--plot", str(picture),
    ]  # fmt: skip
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["settings"]["stand_in"] is True
    assert len(told["steps"]) == 150
    versions = [each["version"] for each in told["steps"]]
    assert versions[99] > versions[49]
    assert any("planned again" in each["line"] for each in told["said"])
    assert picture.stat().st_size > 10_000
