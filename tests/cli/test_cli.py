"""The command line as a user meets it: what each command prints, writes and returns."""

import argparse
import csv
import json
import os
import re
import shlex
import subprocess
import sys

import pytest

import gradcast
from conftest import NETWORK
from gradcast import _core
from gradcast.cli import main

PNG = b"\x89PNG\r\n"
HIERARCHICAL = ["--algorithm", "hierarchical", "--ranks-per-host", "4", "--intra-bandwidth", "10GB/s"]
ON_HOSTS = ["--hosts", "4", "--ranks-per-host", "8"]
# As the help groups them.
COMMANDS = ["doctor", "network", "compare", "report", "watch", "info", "simulate", "advise", "dev"]


def parsers(parser):
    """All commands, with those inside others, by their names."""
    found = {parser.prog: parser}
    for action in parser._actions:
        for inner in action.choices.values() if isinstance(action, argparse._SubParsersAction) else ():
            found |= parsers(inner)
    return found


PARSERS = parsers(main.build_parser())


def test_version(run):
    result = run("--version")
    assert (result.code, result.out.strip()) == (0, f"gradcast {gradcast.__version__}")


@pytest.mark.parametrize("command", PARSERS)
def test_every_command_has_help_with_examples_that_can_be_parsed(command, run):
    result = run(*command.split()[1:], "--help")
    assert result.code == 0
    examples = result.out.partition("example:\n  ")[2]
    assert re.match(rf"(torchrun .* -m )?{command} ", f"{examples.splitlines()[0]} ") or command in examples
    for line in examples.replace("\\\n", "").splitlines():
        words = shlex.split(line.partition(" | ")[0].partition(" && ")[0].partition(" > ")[0])
        if "gradcast" in words:
            assert main.build_parser().parse_args(words[words.index("gradcast") + 1 :]).run


def test_the_help_lists_every_command_in_its_group(run):
    out = run("--help").out
    listed = re.findall(r"^  (\w+)  ", out.partition("options:")[0], re.MULTILINE)
    assert listed == COMMANDS
    assert out.index("for your training:") < out.index("  info ") < out.index("for studying schedules:")
    assert {name.split()[1] for name in PARSERS if " " in name} == set(COMMANDS)


def test_every_option_takes_one_word_for_one_thing():
    """A bandwidth is not called a rate, nor an algorithm a topology; the budget is money."""
    visible = {
        option: action
        for parser in PARSERS.values()
        for action in parser._actions
        if action.help != argparse.SUPPRESS
        for option in action.option_strings
    }
    assert not [option for option in visible if re.search(r"rate|topology|spread|-ms\b|seconds|cost", option)]
    assert visible["--budget"].metavar == "MONEY"
    assert {visible[option].metavar for option in ("--time-limit", "--timeout", "--duration", "--forward")} == {"TIME"}


MEASURED = ["resnet50", "vgg16"]
# Parameters as torchvision and transformers count them; of tied ones each counts once.
ESTIMATED = {
    "resnet18": 11_689_512,
    "resnet152": 60_192_808,
    "inception_v3": 27_161_264,
    "vit_b_16": 86_567_656,
    "bert_base": 109_514_298,
    "gpt2": 124_439_808,
}


def test_bundled_profiles_are_measured_or_estimated():
    assert sorted([*MEASURED, *ESTIMATED]) == gradcast.files.bundled_profiles()


@pytest.mark.parametrize("name", ESTIMATED)
def test_estimated_profiles_have_every_parameter(name):
    profile = gradcast.load_profile(name)
    assert sum(tensor.bytes for tensor in profile.tensors) == 4 * ESTIMATED[name]
    assert 2 * profile.forward_ns == profile.backward_ns
    assert len({tensor.name for tensor in profile.tensors}) == len(profile.tensors)
    # Layer by layer: what is needed later is ready earlier.
    ready_ns = [tensor.ready_ns for tensor in profile.tensors]
    assert ready_ns == sorted(ready_ns, reverse=True)


@pytest.mark.parametrize("name", MEASURED)
def test_measured_profiles_are_their_imported_tables(name, run, tmp_path):
    data = gradcast.files.DATA
    table = tmp_path / f"layers_{name}.csv"
    table.write_text((data / f"layers_{name}.csv").read_text())
    result = run("dev", "profile", "import", table, "--name", name)
    assert result.code == 0
    assert result.out == (data / f"{name}.json").read_text()


def test_scaling_at_import_and_at_use_are_the_same(run, tmp_path):
    table = tmp_path / "layers.csv"
    table.write_text((gradcast.files.DATA / "layers_vgg16.csv").read_text())
    options = ["--name", "vgg16", "--scale", "0.5", "-o", tmp_path / "half.json"]
    assert run("dev", "profile", "import", table, *options).code == 0
    half, scaled = gradcast.load_profile(str(tmp_path / "half.json")), gradcast.load_profile("vgg16", 0.5)
    assert len(half.tensors) == len(scaled.tensors) == 16
    # Rounding to nanoseconds happens once in one and twice in the other.
    assert half.backward_ns == pytest.approx(scaled.backward_ns, abs=len(half.tensors))
    for one, other in zip(half.tensors, scaled.tensors, strict=True):
        assert one.ready_ns == pytest.approx(other.ready_ns, abs=50)


def test_show(run):
    result = run("dev", "profile", "show", "resnet50")
    assert result.code == 0
    assert "107 tensors, 102 MB" in result.out
    assert json.loads(run("dev", "profile", "show", "resnet50", "--json").out)["name"] == "resnet50"


def test_simulate_compares_all_policies_best_first(run):
    result = run("simulate", "resnet50", "--scale", "0.5", *NETWORK)
    assert (result.code, result.err) == (0, "")
    names = [info.name for info in _core.policies()]
    rows = [line.replace("*", "").split() for line in result.out.splitlines()]
    rows = [row for row in rows if row and row[0] in names and row[-1] == "x"]
    assert sorted(row[0] for row in rows) == sorted(names)
    times = [float(row[2]) for row in rows]
    assert times == sorted(times)
    assert rows[0][0] == "forecast"
    assert "The network is the limit: no schedule can go below" in result.out
    assert "forecast reaches" in result.out


def test_simulate_json_has_what_the_table_has(run):
    result = run("simulate", "resnet50", "--scale", "0.5", *NETWORK, "--json")
    (fields,) = json.loads(result.out)["networks"]
    rows = {row["policy"]: row for row in fields["policies"]}
    assert set(rows) == {info.name for info in _core.policies()}
    assert fields["skipped"] == {}
    for row in rows.values():
        assert row["step_ms"] >= row["bound_ms"] * (1 - 1e-9)
        assert row["bound_ms"] >= row["plain_bound_ms"] * (1 - 1e-9)
        assert row["ratio_to_bound"] == pytest.approx(row["step_ms"] / row["bound_ms"], rel=1e-5)
        assert row["speedup_over_ddp"] == pytest.approx(rows["ddp"]["step_ms"] / row["step_ms"], rel=1e-5)
    assert rows["dear"]["all_reduce_only"] is False
    assert rows["ddp"]["all_reduce_only"] is True
    assert fields["bound_ms"] <= fields["all_reduce_bound_ms"]


def test_simulate_marks_plans_with_another_bound(run):
    out = run("simulate", "resnet50", "--scale", "0.5", *NETWORK, "--policy", "dear,ddp").out
    assert "dear *" in out
    assert "* dear sends reduce-scatters and all-gathers here; its own bound is" in out
    # Where one block of everything is the best that can be done, the two bounds are the same, and one is enough.
    out = run("simulate", "resnet50", "--scale", "0.5", "--bandwidth", "100gbit", "--workers", "2").out
    assert "* dear sends reduce-scatters and all-gathers here." in out


def test_simulate_predicts_a_stage_of_a_pipeline(run):
    stage = ["--tensor", "2", "--pipeline", "4", "--micro-batches", "8", "--chunks", "2"]
    result = run("simulate", "resnet50", *NETWORK, *stage, "--policy", "forecast,ddp")
    assert "resnet50, tensor parallelism 2, 4 stages of 2 chunks, bubble 19 %, 8 micro-batches:" in result.out
    estimated = run("simulate", "gpt2", *NETWORK, "--tensor", "2").out
    assert "gpt2, tensor parallelism 2, 1 micro-batch, estimated and not measured:" in estimated
    assert run("simulate", "resnet50", *NETWORK, *stage, "--scaling").code == 0
    assert "do not fill" in run("simulate", "resnet50", *NETWORK, "--pipeline", "4").err


def test_simulate_names_the_policies_that_cannot_run(run):
    reasons = {
        "it sends during the next forward pass": [*NETWORK, "--mode", "hook"],
        "the link has no costs for reduce_scatter and all_gather": ["--network", "10gbe-8"],
    }
    for reason, options in reasons.items():
        assert f"dear is omitted: {reason}" in run("simulate", "resnet50", *options).out


def test_simulate_uses_the_profiles_own_link(run, profile_path):
    result = run("simulate", profile_path, "--policy", "forecast,ddp")
    assert result.code == 0
    assert "the profile's own link: an all-reduce takes 100 us + 800 us per MB" in result.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--bandwidth", "10gbit", "--workers", "8"], "ring of 8 workers, 10 Gbit/s, 50 us per hop"),
        (["--bandwidth", "10gbit", "--workers", "1"], "ring of 1 worker,"),
        (["--bandwidth", "1GB/s", "--workers", "8", "--algorithm", "tree"], "tree of 8 workers, 8 Gbit/s"),
        ([*HIERARCHICAL, "--bandwidth", "10gbit", "--workers", "8"], "hierarchical, 2 hosts of 4 ranks"),
        (["--network", "56gbib-16"], "56gbib-16"),
        (
            ["--bandwidth", "10gbit", "--workers", "8", "--wire", "bf16"],
            "50 us per hop, bf16 on the wire: an all-reduce takes 700 us + 700 us per MB",
        ),
        # A byte leaves a host 2 * 31/32 times in a ring, 2 * 3/4 in two levels, and half of 2 * 8 * 3/4 as bf16 flat.
        (
            ["--bandwidth", "8gbit", *ON_HOSTS, "--algorithm", "ring"],
            "ring of 32 workers on 4 hosts of 8 ranks, 8 Gbit/s, 50 us per hop: an all-reduce takes 3.1 ms + 1.94 ms",
        ),
        (
            ["--bandwidth", "8gbit", *ON_HOSTS, "--wire", "bf16"],
            "80 Gbit/s inside, bf16 on the wire: an all-reduce takes 370 us + 925 us per MB",
        ),
        (
            ["--bandwidth", "8gbit", *ON_HOSTS, "--algorithm", "hierarchical", "--intra-latency", "0us"],
            "8 Gbit/s, 50 us per hop, 80 Gbit/s inside: an all-reduce takes 300 us + 1.68 ms per MB",
        ),
        (
            ["--bandwidth", "8gbit", *ON_HOSTS, "--algorithm", "hierarchical", "--wire", "fp16"],
            "80 Gbit/s inside, fp16 on the wire: an all-reduce takes 370 us + 925 us per MB",
        ),
        (
            ["--network", "10gbe-8", "--ranks-per-host", "4", "--wire", "bf16"],
            "bf16 on the wire (1.14 times fp32's cost per byte): an all-reduce takes 523 us + 980 us per MB",
        ),
    ],
)
def test_networks_of_every_kind(options, words, run):
    result = run("simulate", "vgg16", *options, "--policy", "forecast,fifo")
    assert result.code == 0
    assert words in result.out


def test_several_ranks_per_host_compare_the_ring_with_two_levels(run):
    out = run("simulate", "vgg16", "--bandwidth", "10gbit", "--hosts", "2,4", "--ranks-per-host", "4").out
    found = [line.split()[0].rstrip(",") for line in out.splitlines() if " hosts of 4 ranks" in line]
    assert found == ["ring"] * 2 + ["hierarchical"] * 2


def test_a_profile_without_compute_on_a_link_without_cost(run, tmp_path):
    """Every time is 0: nothing may be divided by it."""
    tensor = gradcast.Tensor(name="a", bytes=400, ready_ns=0, need_ns=0)
    path = tmp_path / "nothing.json"
    path.write_text(gradcast.Profile(name="nothing", forward_ns=0, backward_ns=0, tensors=[tensor]).to_json())
    options = ["--bandwidth", "1gbit", "--workers", "1"]
    assert run("simulate", path, *options).code == 0
    assert run("simulate", path, *options, "--json").code == 0
    assert run("dev", "plan", path, *options, "-o", tmp_path / "plan.json").code == 0
    assert run("dev", "plot", tmp_path / "plan.json", "-o", tmp_path / "plan.png").code == 0


def test_simulate_draws_the_comparison(run, tmp_path):
    options = ["--in-flight", "2", "--mode", "hook", "--plot", tmp_path / "all.png"]
    out = run("simulate", "vgg16", *NETWORK, *options).out
    assert "up to 2 blocks in flight" in out
    assert "hook mode: the next forward pass starts when all gradients have arrived" in out
    assert (tmp_path / "all.png").read_bytes().startswith(PNG)


def test_lists_of_networks_are_a_table_and_a_line_per_policy(run, tmp_path):
    arguments = ["simulate", "vgg16", "--bandwidth", "1gbit,10gbit", "--workers", "8,2", "--policy", "forecast,ddp"]
    result = run(*arguments, "--csv", tmp_path / "networks.csv", "--plot", tmp_path / "networks.png")
    assert result.code == 0
    assert "[4/4] ring of 8 workers, 10 Gbit/s, 50 us per hop" in result.err
    table = [line for line in result.out.splitlines() if line.startswith("ring of ")]
    assert [line.split()[2] for line in table] == ["2", "2", "8", "8"]
    assert all(line.endswith(" x") and " forecast " in line for line in table)
    rows = list(csv.DictReader((tmp_path / "networks.csv").open()))
    assert len(rows) == 8
    assert {(row["workers"], row["bandwidth_gbit_per_s"]) for row in rows} == {
        ("2", "1.0"), ("2", "10.0"), ("8", "1.0"), ("8", "10.0"),
    }  # fmt: skip
    for row in rows:
        assert float(row["step_ms"]) >= float(row["bound_ms"]) - 1e-5
        assert row["policy"] != "ddp" or float(row["speedup_over_ddp"]) == 1
    assert (tmp_path / "networks.png").read_bytes().startswith(PNG)


def test_csv_can_be_printed_alone(run):
    arguments = ["simulate", "vgg16", "--bandwidth", "1gbit", "--workers", "2", "--policy", "ddp", "--csv", "-"]
    lines = run(*arguments).out.splitlines()
    assert lines[0].startswith("profile,scale,mode,in_flight,network,algorithm,")
    assert len(lines) == 2


def test_networks_of_several_kinds_side_by_side(run):
    arguments = ["simulate", "vgg16", "--network", "10gbe-8,56gbib-8", *NETWORK, "--algorithm", "ring,tree", "--json"]
    fields = json.loads(run(*arguments, "--policy", "forecast,ddp").out)
    assert [network["algorithm"] for network in fields["networks"]] == [None, None, "ring", "tree"]
    assert fields["networks"][3]["network"] == "tree of 8 workers, 5 Gbit/s, 50 us per hop"
    assert fields["networks"][3]["latency_ms"] == 0.05


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "vgg16", *NETWORK, "--policy", "ddp"],
        ["simulate", "vgg16", *NETWORK, "--scaling"],
        ["advise", "vgg16", "--steps", "9", "--runs", "10"],
        ["info"],
        ["dev", "policies"],
        ["dev", "published-networks"],
        ["dev", "plan", "vgg16", *NETWORK],
        ["dev", "profile", "show", "vgg16"],
    ],
    ids=" ".join,
)
def test_json_has_a_version_and_one_unit_of_time(arguments, run):
    fields = json.loads(run(*arguments, "--json").out)
    is_file = arguments[:2] in (["dev", "plan"], ["dev", "profile"])
    assert fields["version"] == (1 if is_file else 2)
    if not is_file and arguments[0] != "dev":
        assert not [key for key in keys_of(fields) if re.search(r"(?<!_per)_(ns|us|s)$", key)]


def keys_of(value):
    if isinstance(value, dict):
        return [*value, *(key for each in value.values() for key in keys_of(each))]
    return [key for each in value for key in keys_of(each)] if isinstance(value, list) else []


@pytest.mark.parametrize("arguments", [["dev", "profile", "show", "resnet50", "--json"], ["--help"], ["--version"]])
def test_a_closed_pipe_is_no_error_and_a_full_disk_has_a_sentence(arguments):
    command = [sys.executable, "-m", "gradcast", *arguments]
    reader, writer = os.pipe()
    os.close(reader)
    closed = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    with open("/dev/full", "w") as full:
        no_space = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (closed.stderr, closed.returncode) == ("", 0)
    assert no_space.stderr == "gradcast: error: cannot write to the standard output: No space left on device\n"
    assert no_space.returncode == 3


def test_no_standard_output_at_all():
    command = f"{shlex.quote(sys.executable)} -m gradcast dev policies >&-"
    process = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True)
    sentence = "gradcast: error: cannot write to the standard output: it is closed\n"
    assert (process.returncode, process.stderr) == (3, sentence)


def test_estimated_times_are_called_so(run):
    assert "estimated and not measured" in run("simulate", "bert_base", "--bandwidth", "10gbit", "--workers", "8").out
    measured = run("simulate", "vgg16", "--scale", "0.5", "--bandwidth", "10gbit", "--workers", "8").out
    assert "estimated" not in measured
