"""Whatever goes wrong ends with one sentence on stderr, an exit code of its kind, and no trace of Python or C++."""

import json
import subprocess
import sys

import pytest

import gradcast
from conftest import NETWORK
from diagnosis.test_report import results as bench_results

# Of each kind one: tests/core/model breaks every field.
BREAK_PROFILE = {
    "negative time": (lambda p: p["tensors"][1].update(ready_ns=-1), "tensors[1].ready_ns"),
    "missing bytes": (lambda p: p["tensors"][1].pop("bytes"), "tensors[1].bytes"),
    "version of the future": (lambda p: p.update(version=2), "version"),
    "NaN": (lambda p: p["tensors"][1].update(ready_ns=float("nan")), "NaN"),
    "sum beyond 2^53": (lambda p: [tensor.update(bytes=2**52) for tensor in p["tensors"]], "bytes"),
    "text for a number": (lambda p: p["tensors"][0].update(ready_ns="5"), "tensors[0].ready_ns"),
    "a long word in another alphabet": (lambda p: p.update(world_size="é" * 30), "world_size"),
    "negative alpha": (lambda p: p["link"]["all_reduce"][0].update(alpha_ns=-1), "link.all_reduce[0].alpha_ns"),
}


@pytest.mark.parametrize("case", BREAK_PROFILE)
@pytest.mark.parametrize("command", ["simulate", "dev plan", "dev profile show"])
def test_broken_profiles(case, command, profile_fields, tmp_path, refused):
    breaks, field = BREAK_PROFILE[case]
    breaks(profile_fields)
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(profile_fields))
    refused([*command.split(), path], str(path), field)


BREAK_PLAN = {
    "missing bytes": (lambda p: p["blocks"].pop(), "once"),
    "a range backwards": (lambda p: p["blocks"][0].update(ranges=[[8, 4]]), "blocks[0]"),
    "an unknown operation": (lambda p: p["blocks"][0].update(op="teleport"), "blocks[0].op"),
    "an unknown buffer": (lambda p: p["blocks"][0].update(buffer=7), "buffer"),
    "an operation that the link lacks": (lambda p: p["blocks"][0].update(op="all_gather"), ""),
    "a scale of text": (lambda p: p["made_with"].update(scale="half"), "made_with.scale"),
    "a broken link": (lambda p: p["made_with"].update(link={"all_reduce": 5}), "all_reduce"),
}


@pytest.mark.parametrize("case", BREAK_PLAN)
def test_broken_plans(case, plan_path, tmp_path, refused):
    breaks, word = BREAK_PLAN[case]
    fields = json.loads(plan_path.read_text())
    breaks(fields)
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(fields))
    refused(["dev", "plot", path, "-o", tmp_path / "x.png"], word)


def test_a_plan_of_a_profile_of_the_same_size(profile_fields, plan_path, profile_path, tmp_path, refused):
    """All bytes fit, and would average the gradient of one tensor into another."""
    profile_fields["tensors"][1]["bytes"], profile_fields["tensors"][2]["bytes"] = 8_000_000, 400
    other = tmp_path / "other.json"
    other.write_text(json.dumps(profile_fields))
    arguments = ["dev", "plot", plan_path, "-o", tmp_path / "x.png"]
    words = ("made for another profile", str(profile_path), "give that one")
    refused([*arguments, "--profile", other], *words)
    profile_path.write_text(other.read_text())
    refused(arguments, "has changed since the plan was made")


def test_files_of_another_kind(profile_path, plan_path, tmp_path, refused):
    picture = tmp_path / "x.png"
    refused(["dev", "plot", profile_path, "-o", picture], "this is a profile; a plan is expected: `gradcast dev plan`")
    refused(["simulate", plan_path, *NETWORK], "this is a plan; a profile is expected: `gradcast dev profile")
    refused(["simulate", "vgg16", "--link", plan_path], "this is a plan; a link is expected: `gradcast dev link")


def test_results_of_gradcast_bench_as_a_link(tmp_path, run, refused):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(bench_results()))
    assert "an all-reduce takes 100 us + 2 ms per MB" in run("simulate", "vgg16", "--link", path).out
    path.write_text(json.dumps({key: value for key, value in bench_results().items() if key != "link"}))
    refused(
        ["simulate", "vgg16", "--link", path], "these results have no link; it takes a sweep of three sizes or more"
    )
    path.write_text(json.dumps(bench_results(world_size=0)))
    refused(["simulate", "vgg16", "--link", path], "world_size is 0")


def test_a_scale_that_is_none():
    for scale in (-1, 0, float("nan"), float("inf")):
        with pytest.raises(gradcast.Error, match="scale is"):
            gradcast.load_profile("vgg16", scale=scale)


@pytest.mark.parametrize("share", [0, 0.3, 0.99])
@pytest.mark.parametrize("kind", ["profile", "plan"])
def test_truncated_files(share, kind, profile_path, plan_path, tmp_path, refused):
    text = (profile_path if kind == "profile" else plan_path).read_text().rstrip()
    path = tmp_path / "truncated.json"
    path.write_text(text[: int(share * len(text))])
    arguments = ["simulate", path] if kind == "profile" else ["dev", "plot", path, "-o", tmp_path / "x.png"]
    refused(arguments, str(path))


@pytest.mark.parametrize(
    "content",
    [b"[]", b"5", b"null", b'"profile"', b"\xff\xfe\x00", b"{}", b"<html>", pytest.param(b"[" * 200_000, id="deep")],
)
def test_files_that_are_something_else(content, tmp_path, refused):
    path = tmp_path / "other.json"
    path.write_bytes(content)
    refused(["simulate", path, *NETWORK], str(path))
    refused(["dev", "plot", path, "-o", tmp_path / "x.png"], str(path))
    refused(["simulate", "vgg16", "--link", path], str(path))


R = "resnet50"
HIERARCHICAL = ["--algorithm", "hierarchical", "--intra-bandwidth", "1GB/s"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["COMMAND"]),
        (["fly"], ["fly"]),
        (["simulate", "nope"], ["nope", "resnet50"]),
        (["simulate", "nope.json"], ["nope.json", "does not exist"]),
        (["simulate", "."], ["cannot be read"]),
        (["simulate", R], ["no link", "--bandwidth"]),
        (["simulate", R, "--bandwidth", "-1gbit", "--workers", "8"], ["--bandwidth"]),
        (["simulate", R, "--bandwidth", "10", "--workers", "8"], ["--bandwidth", "10gbit"]),
        (["simulate", R, "--bandwidth", "10gbit"], ["--workers"]),
        (["simulate", R, "--workers", "8"], ["--bandwidth"]),
        (["simulate", R, "--network", "nope"], ["nope", "10gbe-8"]),
        (["simulate", R, "--network", "10gbe-8", "--workers", "8"], ["omit --workers, or predict"]),
        (
            ["simulate", R, "--network", "10gbe", "--workers", "8,9,16"],
            ["--workers and write --network 10gbe-8,10gbe-16"],
        ),
        (["dev", "plan", R, "--network", "10gbe-8", *NETWORK], ["2 networks", "takes one"]),
        (["dev", "plan", R, "--bandwidth", "1gbit,2gbit", "--workers", "2,4"], ["4 networks", "takes one"]),
        (["simulate", R, "vgg16", *NETWORK], ["several profiles only work with --scaling"]),
        (["simulate", R, *NETWORK, "--uncertainty", "5%"], ["--uncertainty only works with --scaling"]),
        (["simulate", R, *NETWORK, "--network", "10gbe-8", "--plot", "x.png"], ["omit --network"]),
        (["simulate", R, *NETWORK, "--algorithm", "ring,tree", "--plot", "x.png"], ["draws one algorithm"]),
        (["simulate", R, *NETWORK, "--algorithm", "star"], ["there is no algorithm star"]),
        (["simulate", R, *NETWORK, "--intra-latency", "5us"], ["--intra-latency"]),
        (["simulate", R, *NETWORK, "--algorithm", "hierarchical"], ["--ranks-per-host"]),
        (["simulate", R, *NETWORK, *HIERARCHICAL, "--ranks-per-host", "3"], ["multiple"]),
        (["simulate", R, *NETWORK, "--ranks-per-host", "3"], ["multiple"]),
        (["simulate", R, *NETWORK, "--hosts", "3"], ["omit --workers"]),
        (["simulate", R, "--network", "10gbe-8", "--hosts", "3"], ["--hosts needs --bandwidth or --wire"]),
        (
            ["simulate", R, "--network", "10gbe-8", "--hosts", "3", "--ranks-per-host", "2", "--wire", "bf16"],
            ["3 hosts of 2 ranks are not the 8 workers of this network"],
        ),
        (["simulate", R, *NETWORK, "--policy", "nope"], ["nope", "forecast"]),
        (["simulate", R, *NETWORK, "--scale", "0"], ["--scale"]),
        (["simulate", R, *NETWORK, "--scale", "1e15"], ["forward_ns"]),
        (["dev", "plan", R, *NETWORK, "--set", "nope=1"], ["nope"]),
        (["dev", "plan", R, *NETWORK, "--policy", "p3", "--set", "slice_elements=0"], ["slice_elements"]),
        (["dev", "plan", R, *NETWORK, "--policy", "ddp", "--set", "cap_bytes=512"], ["no known unit of size"]),
        (
            ["dev", "plan", R, *NETWORK, "--policy", "ddp", "--uncertainty", "10%"],
            ["--uncertainty only works with forecast"],
        ),
        (["simulate", R, *NETWORK, "--latency", "-5us"], ["--latency", "-5us", "negative"]),
        (["simulate", R, "--bandwith", "5gbit"], ["--bandwith", "`gradcast simulate --help`"]),
        (["dev", "link", "fit", "samples.csv", "--jsn"], ["--jsn", "`gradcast dev link fit --help`"]),
        (["dev", "plot", "nope.json"], ["-o"]),
        (["dev", "profile"], ["COMMAND"]),
        (["dev", "link", "fit", "nope.csv"], ["nope.csv"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments(arguments, words, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(arguments, *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["layers.csv"]),
        ("layer,forward_ms\na,1\n", ["backward_ms"]),
        ("layer,forward_ms,backward_ms,parameter_bytes\na,-1,2,400\n", ["line 2", "forward_ms"]),
        ('layer,forward_ms,backward_ms,parameter_bytes\n"a,1,1,4\n', ["line 2"]),
    ],
)
def test_broken_layer_tables(text, words, tmp_path, refused):
    path = tmp_path / "layers.csv"
    path.write_text(text)
    refused(["dev", "profile", "import", path], "layers.csv", *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["bytes"]),
        ("bytes\n", ["time_ns"]),
        ("bytes,time_ns\n", ["no samples"]),
        ("bytes,time_ns\n4096,100\n", []),
        ("bytes,time_ns\n4096,x\n", ["line 2", "time_ns"]),
        ("bytes,time_ns\n0,100\n", ["line 2", "bytes"]),
        ("bytes,time_ns\n1.5,100\n", ["line 2", "bytes"]),
        ("bytes,time_ns\n4096,nan\n", ["line 2", "time_ns"]),
        ("bytes,time_ns,op\n4096,100,teleport\n", ["line 2", "teleport"]),
    ],
)
def test_broken_samples(text, words, tmp_path, refused):
    path = tmp_path / "samples.csv"
    path.write_text(text)
    refused(["dev", "link", "fit", path], "samples.csv", *words)


def test_samples_without_all_reduce_make_no_link(tmp_path, refused):
    path = tmp_path / "samples.csv"
    path.write_text("bytes,time_ns,op\n" + "".join(f"{4**k},{100 + 4**k},all_gather\n" for k in range(4, 10)))
    refused(["dev", "link", "fit", path, "-o", tmp_path / "link.json"], "all_reduce")


def test_no_matplotlib(plan_path, tmp_path, run):
    code = (
        "import sys; sys.modules['matplotlib'] = None; from gradcast.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["dev", "plot", str(plan_path), "-o", str(tmp_path / "x.png")]
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    sentence = "plots need matplotlib, which is not installed; pip install 'gradcast[plot]'"
    assert (result.returncode, result.stderr) == (3, f"gradcast: error: {sentence}\n")


@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", R, *NETWORK, "--plot", "/no/such/folder/x.png"],
        ["simulate", R, *NETWORK, "--csv", "/no/such/folder/x.csv"],
        ["simulate", R, *NETWORK, "--scaling", "--plot", "/no/such/folder/x.png"],
        ["dev", "plan", R, *NETWORK, "-o", "/no/such/folder/plan.json"],
        ["dev", "plan", R, *NETWORK, "-o", "."],
    ],
)
def test_files_that_cannot_be_written(arguments, refused):
    refused(arguments, "cannot be written to", code=3)


@pytest.mark.parametrize("command", [["doctor", "train.py"], ["network"]])
def test_no_torch(command, refused, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    refused(command, "needs PyTorch, which is not installed", code=3)


def test_an_unknown_kind_of_picture(plan_path, tmp_path, refused):
    refused(["dev", "plot", plan_path, "-o", tmp_path / "x.nope"], "plot.png")


def test_a_defect_is_told_apart(run, monkeypatch):
    """An exit code of its own and a request to report; the trace only on demand."""

    def broken(*arguments, **options):
        raise RuntimeError("boom")

    monkeypatch.delenv("GRADCAST_DEBUG", raising=False)
    monkeypatch.setattr("gradcast.cli.dev.profile.load_profile", broken)
    result = run("dev", "profile", "show", "resnet50")
    assert result.code == 70
    assert "please report" in result.err
    assert "Traceback" not in result.err
    monkeypatch.setenv("GRADCAST_DEBUG", "1")
    with pytest.raises(RuntimeError):
        run("dev", "profile", "show", "resnet50")
