"""Whatever a file holds, a command that reads it ends with a result without NaN, or with one sentence that names it.

Files of every kind that a command reads are damaged at random. tests/core/model/damaged_test.cc and tests/fuzz do the
same to the readers in C++.
"""

import importlib.util
import json
import random
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import damage
import pytest

from conftest import NETWORK
from diagnosis import doctor_runs
from diagnosis.test_report import results as bench_results
from gradcast.diagnosis.trace import merged as merged_trace
from gradcast.scaling.prices import sample_path

NO_NUMBER = re.compile(r"(?<![\w.-])-?(nan|inf|infinity)(?![\w.-])", re.IGNORECASE)
ACTS_ON_A_TERMINAL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
LIMIT_S = 60
COUNT = 10_000
# Tables, and TOML.
LAYERS = "layer,forward_ms,backward_ms,parameter_bytes\nconv,1,2,400\nfc,1.5,2,800\n"
SAMPLES = "bytes,time_ns,op\n" + "".join(
    f"{4**k},{100_000 + 4**k},{op}\n" for k in range(3, 9) for op in ("", "all_gather")
)
STEP_TIMES = "model,flops,tensors,step_ms\n" + "".join(f"m{k},{k}e9,{10 * k},{20 + 5 * k}\n" for k in range(1, 8))
PRICES = Path(sample_path()).read_text()


@dataclass
class Kind:
    """``commands``: those that read the file, which is "@" in them. ``others``: files that they read as well."""

    name: str
    text: Any
    damage: Any
    commands: list
    others: dict | None = None


def traces():
    return json.dumps(merged_trace.merge(doctor_runs.rank_traces(2, 2)))


def watched():
    lines = []
    for number in range(50):
        late = number > 30
        step = {"step": number, "step_ms": 400.0 if late else 300.0, "expected_ms": 310.0, "link_ms": 90.0}
        step |= {"compute_ms": [200.0] * 2, "data_ms": [10.0, 110.0 if late else 10.0], "expected_link_ms": 80.0}
        snapshots = {"step": 3, "age_s": 1.5, "stall_ms": 2.0, "overhead": 0.01, "failed": 1, "error": "no space"}
        lines.append(json.dumps({"observed": step, "snapshots": snapshots}))
    return "\n".join(lines)


def prices_in_json():
    spot = {"price_per_hour": 1, "revocations_per_hour": 0.1, "restart_time": "5min", "elastic": True}
    spot |= {"checkpoint_interval": "30min", "checkpoint_cost": "1min"}
    machine = {"name": "m", "workers": 1, "price_per_hour": 1.5, "bandwidth": "10gbit", "max_machines": 2, "spot": spot}
    return json.dumps({"version": 1, "date": "today", "currency": "EUR", "machine": [machine]})


def profile():
    tensors = [
        {"name": "first", "bytes": 4_000_000, "ready_ns": 6_000_000, "need_ns": 0, "shape": [1000, 1000]},
        {"name": "second", "bytes": 400, "ready_ns": 4_000_000, "need_ns": 1_000_000},
    ]
    link = {"all_reduce": [{"up_to_bytes": None, "alpha_ns": 100_000, "beta_ns_per_byte": 0.8}]}
    fields = {"version": 1, "name": "small", "world_size": 4, "forward_ns": 3_000_000, "backward_ns": 6_000_000}
    exchange = {"host_of": [0, 0, 1, 1], "form": "ring", "wire": "fp32"}
    return json.dumps(fields | {"tensors": tensors, "link": link, "exchange": exchange})


def link():
    return json.dumps(json.loads(profile())["link"])


def plan():
    block = {"op": "all_reduce", "ranges": [[0, 4_000_400]], "start_ns": 6_000_000, "reason": "all"}
    fields = {"version": 1, "policy": "ddp", "mode": "overlap", "in_flight": 1, "blocks": [block]}
    made_with = {"profile": "profile.json", "scale": 1.0, "network": "a ring", "link": json.loads(link())}
    return json.dumps(fields | {"made_with": made_with})


PAGE = ["-o", "page.html", "--prometheus", "run.prom"]
REPORT, TO_HTA = ["report", "@", *PAGE], ["report", ".", *PAGE, "--hta", "hta"]
ADVISE = ["advise", "vgg16", "--steps", "1000", "--runs", "10", "--time-limit", "1h", "--prices", "@"]
PREDICT = ["simulate", "vgg16", *NETWORK, "--policy", "ddp", "--flops", "4G", "--step-times", "@"]
FIT, WATCH, SIMULATE = ["dev", "link", "fit", "@"], ["watch", "@"], ["simulate", "@"]
EXPECTED = [*WATCH, "--expected", "335ms"]
COMPARE = [["compare", "@", "doctor.json"], ["compare", "doctor.json", "@", "--json"]]
OF_PROFILES = [
    *(SIMULATE, [*SIMULATE, "--powersgd", "2", "--json"], [*SIMULATE, "--scaling", "--workers", "2,8"]),
    *(["dev", "plan", "@"], ["dev", "profile", "show", "@"]),
]


def run_text():
    return json.dumps(doctor_runs.doctor())


ONE_RUN = {"doctor.json": run_text}
KINDS = {
    "run": Kind("run.json", run_text, damage.as_json, [REPORT, [*REPORT, "--json"], *COMPARE], ONE_RUN),
    "trace": Kind("trace.json.gz", traces, damage.as_packed_json, [TO_HTA], ONE_RUN),
    "bench": Kind("bench.json", lambda: json.dumps(bench_results()), damage.as_json, [["report", "@", "-o", "x.svg"]]),
    "watch": Kind("run.jsonl", watched, damage.as_lines_of_json, [WATCH, [*WATCH, "--json"], EXPECTED]),
    "prices": Kind("prices.toml", lambda: PRICES, damage.as_words, [ADVISE, [*ADVISE, "--json", "--all"]]),
    "json_prices": Kind("prices.json", prices_in_json, damage.as_json, [ADVISE]),
    "layers": Kind("layers.csv", lambda: LAYERS, damage.as_words, [["dev", "profile", "import", "@"]]),
    "samples": Kind("samples.csv", lambda: SAMPLES, damage.as_words, [FIT, [*FIT, "--json"]]),
    "step_times": Kind("steps.csv", lambda: STEP_TIMES, damage.as_words, [PREDICT, [*PREDICT, "--json"]]),
    "profile": Kind("profile.json", profile, damage.as_json, OF_PROFILES),
    "plan": Kind("plan.json", plan, damage.as_json, [["dev", "plot", "@", "-o", "x.svg"]], {"profile.json": profile}),
    "link": Kind("link.json", link, damage.as_json, [["simulate", "vgg16", "--policy", "ddp,forecast", "--link", "@"]]),
}  # fmt: skip
MAKES = ("page.html", "run.prom")
DRAWN = ("bench", "plan")


def no_constant(name):
    raise AssertionError(f"{name} in JSON")


def ends_well(run, kind, text, seed):
    """Returns True if the file was read, False if it was refused. Anything else fails."""
    dice = random.Random(seed)
    Path(kind.name).write_bytes(kind.damage(text, dice))
    command = [kind.name if part == "@" else part for part in dice.choice(kind.commands)]
    for made in MAKES:
        Path(made).unlink(missing_ok=True)
    signal.alarm(LIMIT_S)  # its signal ends the tests: nothing here may take so long
    result = run(*command)
    signal.alarm(0)
    said = SimpleNamespace(seed=seed, command=command, code=result.code, err=result.err[:500], out=result.out[-500:])
    assert result.code in (0, 1, 2, 3), said
    if result.code in (2, 3):
        assert re.fullmatch(r"gradcast: error: [^\n]+\n", result.err), said
        return False
    if result.out.startswith("{"):
        json.loads(result.out, parse_constant=no_constant)
    # A machine may be called nan.
    names_one = re.search(r'"[^"\n]*(nan|inf)[^"\n]*"', Path(kind.name).read_bytes().decode(errors="replace"))
    texts = [Path(made).read_text() for made in MAKES if Path(made).exists()]
    for output in texts if result.out.startswith("{") else [result.out, *texts]:
        assert names_one or not NO_NUMBER.search(output), said
    assert not ACTS_ON_A_TERMINAL.search("".join([result.out, result.err, *texts])), said
    return True


@pytest.mark.parametrize("count", [12, pytest.param(COUNT, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", KINDS)
def test_damaged_files_are_read_or_refused(run, name, count, tmp_path, monkeypatch):
    if name in DRAWN and importlib.util.find_spec("matplotlib") is None:
        pytest.skip("this draws pictures: pip install 'gradcast[plot]'")
    monkeypatch.delenv("GRADCAST_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)
    kind = KINDS[name]
    text = kind.text()
    for other, made in (kind.others or {}).items():
        Path(other).write_text(made())
    if name in DRAWN and count < COUNT:
        count = 6  # a picture takes long
    good = sum(ends_well(run, kind, text, seed) for seed in range(count))
    print(f"{name}: {good} of {count} damaged files were read, the others refused")
    if count == COUNT:  # else nothing is tried but the parser
        assert 0.02 * count < good < count
