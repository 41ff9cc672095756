"""Command lines, settings and names that somebody else has chosen: a result, or one sentence, and never an escape."""

import contextlib
import io
import json
import re
import sys

import pytest

from conftest import NETWORK
from diagnosis import doctor_runs, pages
from gradcast import disk, terminal
from gradcast.cli import main
from gradcast.scaling import spot

R = "resnet50"
LONG = f"'{'9' * 40}…'"  # as a long number is shown
LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate", R, *NETWORK, "--scale", "1e-320"], "'1e-320' is too small for a number; write a larger one"),
        (["simulate", R, *NETWORK, "--scale", "1e-10"], "1e-10 times forward_ns of resnet50 is less than 1 ns"),
        (["simulate", R, *NETWORK, "--scale", "1e400"], "'1e400' is too large for a number"),
        (["simulate", R, *NETWORK, "--latency", "1e-320s"], "'1e-320s' is too small for a time"),
        (["simulate", R, "--workers", "8", "--bandwidth", "9" * 400 + "bit"], f"{LONG} is too large for a bandwidth"),
        (["simulate", R, "--bandwidth", "1gbit", "--workers", "9" * 5000], f"{LONG} is not a whole number from 1"),
        (["simulate", R, *NETWORK, "--in-flight", "9" * 5000], f"{LONG} is not a whole number from 1"),
        (["simulate", "x" * 5000], "there is no profile xxx"),
        (["simulate", "a\nb"], r"there is no profile a\nb: "),
        (["report", "x" * 5000], "file name too long"),
        (["compare", "x" * 5000, "."], "file name too long"),
        (["dev", "plan", R, *NETWORK, "--set", "block_tolerance=1e400"], "is too large for a parameter"),
        (["dev", "profile", "show", R, "--scale", "1e-12"], "is less than 1 ns"),
        (["dev", "lab", "train", "--model", R, "--scale-size", "1e-7"], "'1e-7' is not a number from 1e-06 to 1e+06"),
        (["dev", "lab", "adapt", "--factor", "1e15"], "'1e15' is not a number from 0.01 to 100"),
        (["advise", R, "--samples", "9e15T", "--batch", "1"], "'9e15T' is not a number from 1 to 1e+24"),
        (["advise", R, "--samples", "0.5", "--batch", "1"], "'0.5' is not a number from 1 to 1e+24"),
        (["advise", R, "--steps", "9" * 5000], f"{LONG} is not a whole number from 1"),
        (["watch", "run.jsonl", "--expected", "0s"], "'0s' is no time; write a longer one"),
        *(([*command.split(), ""], "the name is empty") for command in (
            f"simulate {R} --plot", f"simulate {R} --csv", f"simulate {R} --link", f"simulate {R} --step-times",
            f"dev plan {R} -o", "dev plot plan.json -o", "dev plot plan.json --profile", "dev link fit x.csv -o",
            "dev profile import x.csv -o", "dev profile import x.csv --name", "report run -o",
            "report run --prometheus", "report run --hta", "doctor -o", f"advise {R} --prices",
        )),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)  # fmt: skip
def test_numbers_and_names_that_make_no_sense(arguments, words, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(arguments, words)


@pytest.mark.parametrize(
    ("command", "changes", "words"),
    [
        ("doctor train.py", {"RANK": "x"}, "the environment variable RANK is wrong: 'x' is not a whole number"),
        ("doctor train.py", {"RANK": ""}, "the environment variable RANK is wrong: '' is not"),
        ("network", {"RANK": "-1"}, "RANK is wrong: '-1' is not a whole number from 0 to 1"),
        ("network", {"RANK": "2"}, "RANK is wrong: '2' is not a whole number from 0 to 1"),
        ("network", {"WORLD_SIZE": "two"}, "WORLD_SIZE is wrong: 'two'"),
        ("network", {"WORLD_SIZE": "0"}, "WORLD_SIZE is wrong: '0'"),
        ("network", {"MASTER_PORT": "99999"}, "MASTER_PORT is wrong: '99999' is not a whole number from 1 to 65535"),
    ],
)
def test_variables_of_a_launcher(command, changes, words, refused, monkeypatch):
    for name, value in (LAUNCHED | changes).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())  # of torch, which is not needed for this
    refused(command.split(), words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--bench --dtype fp8", "invalid choice: 'fp8' (choose from"),
        ("--bench --bytes-min 1B", "1B is not a size from 4B to 64GiB"),
        ("--bench --bytes-max 1", "'1' has no known unit of size; write for instance 25MiB, 4MB or 512B"),
        ("--bench --bytes-min 2MB --bytes-max 1MB", "--bytes-max (1 MB) is below --bytes-min (2 MB)"),
        ("--bench --bytes-max 512B", "--bytes-max (512 B) is below --bytes-min (1.02 kB)"),
        ("--bench --iterations 0", "'0' is not a whole number from 1 to 1000000"),
        ("--bench --duration 5s", "--duration is for the check; with --bench give --iterations and --bytes-max"),
        ("--dtype bf16", "--dtype is for --bench; add it, or omit the option"),
        ("--bytes-max 1MB", "--bytes-max is for --bench; add it, or omit the option"),
    ],
)
def test_options_of_the_networks_bench(arguments, words, refused, monkeypatch):
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    refused(["network", *arguments.split()], words)


def test_a_bench_that_no_launcher_has_started(refused, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    refused(
        ["network", "--bench"], "RANK is not set, so there are no workers to measure between; start it with `torchrun"
    )


def test_a_compiler_with_an_open_quote(monkeypatch):
    pytest.importorskip("torch", reason="this needs torch, which is not installed: pip install torch")
    from gradcast.training.compat import native_build

    for name, function in (("CXXFLAGS", native_build.user_flags), ("CXX", native_build.compiler_command)):
        monkeypatch.setenv(name, '"-O2')
        with pytest.raises(native_build.BuildError, match=f"{name} is wrong: No closing quotation"):
            function()


@pytest.mark.parametrize("settings", [{"MPLBACKEND": "nope"}])
def test_a_matplotlib_that_does_not_start(settings, refused, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="this needs matplotlib, which is not installed: pip install matplotlib")
    for module in [name for name in sys.modules if name.startswith(("matplotlib", "gradcast.plots"))]:
        monkeypatch.delitem(sys.modules, module)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    refused(["simulate", R, *NETWORK, "--plot", tmp_path / "x.png"], "matplotlib does not start", code=3)


# --- Files that were valid once ---


def test_duplicate_names_are_refused(profile_fields, tmp_path, refused):
    profile_fields["tensors"][2]["name"] = "first"
    (tmp_path / "p.json").write_text(json.dumps(profile_fields))
    refused(["simulate", tmp_path / "p.json"], "p.json: tensors[2].name is ", "tensors[0]; give each its own")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"exchange": "x"}, 'p.json: exchange is "x"; an object is expected'),
        ({"exchange": {"host_of": [0, -1], "form": "ring", "wire": "fp32"}}, "exchange.host_of[1] is -1"),
        ({"exchange": {"host_of": [0, 0], "form": "ring", "wire": "fp32"}}, "host_of has 2 ranks; those of "),
        ({"exchange": {"host_of": [0] * 4, "form": "star", "wire": "fp32"}}, 'form is "star"; one of ring, flat, two-'),
        ({"exchange": {"host_of": [0] * 4, "form": "ring", "wire": "fp7"}}, 'wire is "fp7"; one of fp32, bf16'),
        ({"shape": "x"}, 'p.json: tensors[0].shape is "x"; a list is expected'),
        ({"shape": [3, -1]}, "p.json: tensors[0].shape[1] is -1; a whole number"),
    ],
)  # fmt: skip
def test_what_the_core_does_not_read_of_a_profile(changes, words, profile_fields, tmp_path, refused):
    (profile_fields["tensors"][0] if "shape" in changes else profile_fields).update(changes)
    (tmp_path / "p.json").write_text(json.dumps(profile_fields))
    refused(["simulate", tmp_path / "p.json", "--powersgd", "2"], words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scale": True}, "made_with.scale is true; a number"),
        ({"scale": 1e-320}, "made_with.scale is 1e-320; a number from 1e-12"),
        ({"profile": 5}, "made_with.profile is 5; a text"),
        ({"profile": "a\0b.json"}, "cannot be read"),
        ({"link": "x"}, 'made_with.link is "x"; an object'),
        ({"link": {}}, "plan.json: made_with: link.all_reduce is missing"),
        ({"tensors": [5]}, "made_with.tensors[0] is 5; a text"),
    ],
)
def test_what_the_core_does_not_read_of_a_plan(changes, words, plan_path, tmp_path, refused):
    fields = json.loads(plan_path.read_text())
    fields["made_with"] |= changes
    plan_path.write_text(json.dumps(fields))
    refused(["dev", "plot", plan_path, "-o", tmp_path / "x.png"], words)


def test_times_that_no_costs_fit_make_no_link(tmp_path, refused):
    times = (1e3, 9e9, 2e3, 8e9, 5e2, 7e9, 1e1, 6e9)
    lines = [f"{1024 * k},{time}" for k, time in enumerate(times, 1)]
    (tmp_path / "samples.csv").write_text("\n".join(["bytes,time_ns", *lines]))
    words = "samples.csv, all_reduce: no costs fit these times: the best are off by 100 %"
    refused(["dev", "link", "fit", tmp_path / "samples.csv", "-o", tmp_path / "link.json"], words)
    assert not (tmp_path / "link.json").exists()


def test_too_many_revocations_are_left_out_with_the_reason(run, tmp_path, monkeypatch):
    monkeypatch.setattr(spot, "_DRAWS_MAX", 10_000)
    out = run("advise", R, "--steps", "1000000", "--runs", "1000").out
    assert (
        "Omitted, because 1000 simulated trainings with so many revocations take too long; give fewer --runs: " in out
    )
    assert "x p3.2xlarge (spot)" in out


def test_a_profile_of_many_tensors_takes_no_longer(tmp_path, run):
    """The list of all tensors was copied for each tensor of each block: minutes."""
    count = 20_000
    tensors = [{"name": f"t{k}", "bytes": 4, "ready_ns": count - k, "need_ns": k} for k in range(count)]
    fields = {"version": 1, "name": "many", "world_size": 4, "forward_ns": count, "backward_ns": count}
    link = {"all_reduce": [{"up_to_bytes": None, "alpha_ns": 100, "beta_ns_per_byte": 0.8}]}
    (tmp_path / "many.json").write_text(json.dumps(fields | {"tensors": tensors, "link": link}))
    for command in (["dev", "plan"], ["dev", "profile", "show"]):
        assert run(*command, tmp_path / "many.json").code == 0


# --- What acts on a terminal ---

ESCAPES = "a\x1b[31m\x9b1m\u202eb"
SHOWN = r"a\u001b[31m\u009b1m\u202eb"


def test_names_with_escapes_are_shown(profile_fields, tmp_path, run, monkeypatch):
    monkeypatch.chdir(tmp_path)
    profile_fields["name"] = profile_fields["tensors"][0]["name"] = ESCAPES + "\nThe plan is safe."
    (tmp_path / "p.json").write_text(json.dumps(profile_fields))
    (tmp_path / "run.json").write_text(
        json.dumps(doctor_runs.bare() | {"verdict": {"kind": ESCAPES, "sentence": ESCAPES}})
    )
    line = {"observed": None, "snapshots": {"step": None, "failed": 1, "error": ESCAPES}}
    (tmp_path / "run.jsonl").write_text(json.dumps(line))
    (tmp_path / "s.csv").write_text(f"bytes,time_ns,op\n1,1,{ESCAPES}\n")
    commands = [
        ["simulate", "p.json"], ["dev", "plan", "p.json"], ["dev", "profile", "show", "p.json"], ["watch", "run.jsonl"],
        ["compare", "run.json", "run.json"], ["report", "run.json"], ["dev", "link", "fit", "s.csv"],
        ["simulate", ESCAPES],
    ]  # fmt: skip
    for command in commands:
        result = run(*command)
        said = result.out + result.err
        assert SHOWN in said, command
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", said), command
        assert "\nThe plan is safe." not in said
    shown = run("dev", "profile", "show", "p.json", "--json").out
    assert json.loads(shown)["name"] == profile_fields["name"]


def test_a_page_has_no_characters_that_act():
    """Of XML, which the page is as well, some must not be in it."""
    run_ = doctor_runs.doctor()
    run_["model"]["name"] = run_["hosts"][0] = run_["ranks"][0]["host"] = ESCAPES + "\0\r"
    words = pages.words_of(pages.parsed(run_))
    assert SHOWN + r"\u0000\r" in words
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]", words)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize(
    "command", ["dev policies", "simulate --help", "dev profile show p.json", "dev plan p.json --json"]
)
def test_a_terminal_that_knows_few_characters(command, encoding, profile_fields, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    profile_fields["tensors"][0]["name"] = "ü…😀"
    (tmp_path / "p.json").write_text(json.dumps(profile_fields))
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    with pytest.raises(SystemExit, match="0") if "--help" in command else contextlib.nullcontext():
        assert main.main(command.split()) == 0
    printed = raw.getvalue().decode(encoding)
    if "profile show" in command:
        assert terminal.visible("ü…😀", encoding) + " " in printed
    if "--json" in command:
        assert json.loads(printed)["made_with"]["tensors"][0] == "ü…😀"


def test_what_a_script_of_the_user_prints_is_its_own(tmp_path, capsys):
    pytest.importorskip("torch", reason="this needs torch, which is not installed: pip install torch")
    (tmp_path / "train.py").write_text(r"print('\x1b[31mred')")
    assert main.main(["doctor", "-o", str(tmp_path / "out"), str(tmp_path / "train.py")]) == 0
    assert capsys.readouterr().out == "\x1b[31mred\n"


# --- The files of a trace ---


@pytest.mark.parametrize(
    ("pid", "words"),
    [
        ("../../evil", 'traceEvents[0].pid is "../../evil"; a whole number'),
        ([1], "traceEvents[0].pid is [1]; a whole number"),
        (1.5, "traceEvents[0].pid is 1.5; a whole number"),
        (2, "traceEvents[0].pid is 2; a rank below distributedInfo.world_size, 2, is expected"),
    ],
)
def test_the_rank_of_an_event_becomes_no_path(pid, words, tmp_path, refused):
    event = {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {}}
    trace = {"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 2}, "traceEvents": [event]}
    (tmp_path / "doctor.json").write_text(json.dumps(doctor_runs.bare()))
    disk.write_file(tmp_path / "trace.json.gz", json.dumps(trace), "trace")
    refused(["report", tmp_path, "-o", tmp_path / "x.html", "--hta", tmp_path / "hta"], "trace.json.gz: ", words)
    assert not (tmp_path / "hta").exists()
    assert not (tmp_path / "x.html").exists()
