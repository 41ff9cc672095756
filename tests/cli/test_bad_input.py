"""Whatever a user gets wrong ends with one sentence on stderr, exit code 2, and no trace of Python or C++."""

import json
import re
import subprocess
import sys

import pytest

import gradcast
from conftest import NETWORK

BIG = 2**53


def assert_refused(result, *words):
    assert result.code == 2
    assert result.out == ""
    assert len(result.err.strip().splitlines()) == 1, result.err
    assert result.err.startswith("gradcast: error: ")
    # Neither Python's nor C++'s insides: no traces, types, addresses, or source files.
    assert not re.search(r"Traceback|\.py\b|\.cc\b|\.h:|std::|nlohmann|gradcast::|0x[0-9a-f]{6}|NoneType", result.err)
    for word in words:
        assert word in result.err


BREAK_PROFILE = {
    "negative ready": (lambda p: p["tensors"][1].update(ready_ns=-1), "tensors[1].ready_ns"),
    "negative need": (lambda p: p["tensors"][0].update(need_ns=-5), "tensors[0].need_ns"),
    "negative update": (lambda p: p["tensors"][0].update(update_ns=-5), "tensors[0].update_ns"),
    "negative bytes": (lambda p: p["tensors"][2].update(bytes=-4), "tensors[2].bytes"),
    "negative forward": (lambda p: p.update(forward_ns=-1), "forward_ns"),
    "missing forward": (lambda p: p.pop("forward_ns"), "forward_ns"),
    "missing bytes": (lambda p: p["tensors"][1].pop("bytes"), "tensors[1].bytes"),
    "missing tensors": (lambda p: p.pop("tensors"), "tensors"),
    "missing version": (lambda p: p.pop("version"), "version"),
    "version of the future": (lambda p: p.update(version=2), "version"),
    "NaN": (lambda p: p["tensors"][1].update(ready_ns=float("nan")), "NaN"),
    "infinity": (lambda p: p.update(backward_ns=float("inf")), "Infinity"),
    "unsorted needs": (lambda p: p["tensors"].reverse(), "need_ns"),
    "no tensors": (lambda p: p.update(tensors=[]), "tensors"),
    "tensor of zero bytes": (lambda p: p["tensors"][0].update(bytes=0), "tensors[0].bytes"),
    "tensor beyond 2^53": (lambda p: p["tensors"][0].update(bytes=BIG + 4), "tensors[0].bytes"),
    "sum beyond 2^53": (lambda p: [tensor.update(bytes=BIG // 2) for tensor in p["tensors"]], "bytes"),
    "half an element": (lambda p: p["tensors"][0].update(bytes=6), "tensors[0].element_bytes"),
    "fraction of a byte": (lambda p: p["tensors"][0].update(bytes=4.5), "tensors[0].bytes"),
    "text for a number": (lambda p: p["tensors"][0].update(ready_ns="5"), "tensors[0].ready_ns"),
    "number for a name": (lambda p: p["tensors"][0].update(name=5), "tensors[0].name"),
    "ready after backward": (lambda p: p["tensors"][0].update(ready_ns=7e6), "tensors[0].ready_ns"),
    "needed after forward": (lambda p: p["tensors"][2].update(need_ns=7e6), "tensors[2].need_ns"),
    "tensor is a list": (lambda p: p.update(tensors=[[]]), "tensors[0]"),
    "a long word in another alphabet": (lambda p: p.update(world_size="é" * 30), "world_size"),
    "no workers": (lambda p: p.update(world_size=0), "world_size"),
    "link without pieces": (lambda p: p["link"].update(all_reduce=[]), "all_reduce"),
    "link that ends": (lambda p: p["link"]["all_reduce"][0].update(up_to_bytes=9), "up_to_bytes"),
    "negative alpha": (lambda p: p["link"]["all_reduce"][0].update(alpha_ns=-1), "link.all_reduce[0].alpha_ns"),
}


@pytest.mark.parametrize("case", BREAK_PROFILE)
@pytest.mark.parametrize("command", ["simulate", "plan", "profile show"])
def test_broken_profiles(case, command, profile_fields, tmp_path, run):
    breaks, field = BREAK_PROFILE[case]
    breaks(profile_fields)
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(profile_fields))
    assert_refused(run(*command.split(), path), str(path), field)


BREAK_PLAN = {
    "missing bytes": (lambda p: p["blocks"].pop(), "once"),
    "repeated bytes": (lambda p: p["blocks"].append(p["blocks"][0]), "block"),
    "a cut element": (lambda p: p["blocks"][0]["ranges"][0].__setitem__(1, p["blocks"][0]["ranges"][0][1] - 1), ""),
    "an empty range": (lambda p: p["blocks"][0].update(ranges=[[4, 4]]), "blocks[0]"),
    "a range backwards": (lambda p: p["blocks"][0].update(ranges=[[8, 4]]), "blocks[0]"),
    "no ranges": (lambda p: p["blocks"][0].update(ranges=[]), "blocks[0]"),
    "no blocks": (lambda p: p.update(blocks=[]), ""),
    "an unknown operation": (lambda p: p["blocks"][0].update(op="teleport"), "blocks[0].op"),
    "an unknown mode": (lambda p: p.update(mode="sideways"), "mode"),
    "an unknown buffer": (lambda p: p["blocks"][0].update(buffer=7), "buffer"),
    "none in flight": (lambda p: p.update(in_flight=0), "in_flight"),
    "bytes beyond the profile": (lambda p: p["blocks"][0]["ranges"][-1].__setitem__(1, BIG), ""),
    "an operation that the link lacks": (lambda p: p["blocks"][0].update(op="all_gather"), ""),
    "a scale of text": (lambda p: p["made_with"].update(scale="half"), "made_with.scale"),
    "a broken link": (lambda p: p["made_with"].update(link={"all_reduce": 5}), "all_reduce"),
}


@pytest.mark.parametrize("case", BREAK_PLAN)
def test_broken_plans(case, plan_path, tmp_path, run):
    breaks, word = BREAK_PLAN[case]
    fields = json.loads(plan_path.read_text())
    breaks(fields)
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(fields))
    assert_refused(run("plot", path, "-o", tmp_path / "x.png"), word)


def test_a_plan_of_another_profile(plan_path, tmp_path, run):
    result = run("plot", plan_path, "--profile", "vgg16", "-o", tmp_path / "x.png")
    assert_refused(result, "does not fit the profile vgg16", "made for another profile")


def test_a_plan_of_a_profile_of_the_same_size(profile_fields, plan_path, profile_path, tmp_path, run):
    """All bytes fit, and would average the gradient of one tensor into another."""
    profile_fields["tensors"][1]["bytes"], profile_fields["tensors"][2]["bytes"] = 8_000_000, 400
    other = tmp_path / "other.json"
    other.write_text(json.dumps(profile_fields))
    result = run("plot", plan_path, "--profile", other, "-o", tmp_path / "x.png")
    assert_refused(result, "made for another profile", str(profile_path), "give that one")
    profile_path.write_text(other.read_text())
    assert_refused(run("plot", plan_path, "-o", tmp_path / "x.png"), "has changed since the plan was made")


def test_files_of_another_kind(profile_path, plan_path, tmp_path, run):
    picture = tmp_path / "x.png"
    assert_refused(run("plot", profile_path, "-o", picture), "this is a profile; a plan is expected: `gradcast plan`")
    assert_refused(run("simulate", plan_path, *NETWORK), "this is a plan; a profile is expected: `gradcast profile")
    assert_refused(run("simulate", "vgg16", "--link", plan_path), "this is a plan; a link is expected: `gradcast link")


def test_a_scale_that_is_none():
    for scale in (-1, 0, float("nan"), float("inf")):
        with pytest.raises(gradcast.Error, match="scale is"):
            gradcast.load_profile("vgg16", scale=scale)


@pytest.mark.parametrize("share", [0, 0.001, 0.3, 0.9, 0.99])
@pytest.mark.parametrize("kind", ["profile", "plan"])
def test_truncated_files(share, kind, profile_path, plan_path, tmp_path, run):
    text = (profile_path if kind == "profile" else plan_path).read_text().rstrip()
    path = tmp_path / "truncated.json"
    path.write_text(text[: int(share * len(text))])
    arguments = ["simulate", path] if kind == "profile" else ["plot", path, "-o", tmp_path / "x.png"]
    assert_refused(run(*arguments), str(path))


@pytest.mark.parametrize(
    "content",
    [b"[]", b"5", b"null", b'"profile"', b"\xff\xfe\x00", b"{}", b"<html>", pytest.param(b"[" * 200_000, id="deep")],
)
def test_files_that_are_something_else(content, tmp_path, run):
    path = tmp_path / "other.json"
    path.write_bytes(content)
    assert_refused(run("simulate", path, *NETWORK), str(path))
    assert_refused(run("plot", path, "-o", tmp_path / "x.png"), str(path))
    assert_refused(run("simulate", "vgg16", "--link", path), str(path))


R = "resnet50"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["COMMAND"]),
        (["fly"], ["fly"]),
        (["simulate"], ["PROFILE"]),
        (["simulate", "nope"], ["nope", "resnet50"]),
        (["simulate", "nope.json"], ["nope.json", "does not exist"]),
        (["simulate", "."], ["cannot be read"]),
        (["simulate", R], ["no link", "--bandwidth"]),
        (["simulate", R, "--bandwidth", "0gbit", "--workers", "8"], ["--bandwidth", "0"]),
        (["simulate", R, "--bandwidth", "-1gbit", "--workers", "8"], ["--bandwidth"]),
        (["simulate", R, "--bandwidth", "10", "--workers", "8"], ["--bandwidth", "10gbit"]),
        (["simulate", R, "--bandwidth", "10gbit"], ["--workers"]),
        (["simulate", R, "--bandwidth", "10gbit", "--workers", "0"], ["--workers"]),
        (["simulate", R, "--bandwidth", "10gbit", "--workers", "x"], ["--workers"]),
        (["simulate", R, "--workers", "8"], ["--bandwidth"]),
        (["simulate", R, "--network", "nope"], ["nope", "10gbe-8"]),
        (["simulate", R, "--network", "10gbe-8", "--workers", "8"], ["--workers"]),
        (["simulate", R, "--network", "10gbe-8", "--bandwidth", "1gbit"], ["--network", "--bandwidth"]),
        (["simulate", R, *NETWORK, "--latency", "50"], ["--latency", "50us"]),
        (["simulate", R, *NETWORK, "--intra-latency", "5us"], ["--intra-latency"]),
        (["simulate", R, *NETWORK, "--topology", "hierarchical"], ["--workers-per-node"]),
        (
            [
                "simulate",
                R,
                *NETWORK,
                "--topology",
                "hierarchical",
                "--workers-per-node",
                "3",
                "--intra-bandwidth",
                "1GB/s",
            ],
            ["multiple"],
        ),
        (["simulate", R, *NETWORK, "--policy", "nope"], ["nope", "forecast"]),
        (["simulate", R, *NETWORK, "--policy", ","], ["policy"]),
        (["simulate", R, *NETWORK, "--policy", "dear", "--mode", "hook"], ["dear"]),
        (["simulate", R, *NETWORK, "--mode", "sideways"], ["--mode"]),
        (["simulate", R, *NETWORK, "--in-flight", "0"], ["--in-flight"]),
        (["simulate", R, *NETWORK, "--scale", "0"], ["--scale"]),
        (["simulate", R, *NETWORK, "--scale", "-1"], ["--scale"]),
        (["simulate", R, *NETWORK, "--scale", "nan"], ["--scale"]),
        (["simulate", R, *NETWORK, "--scale", "1e15"], ["forward_ns"]),
        (["simulate", R, *NETWORK, "--plot", "/no/such/folder/x.png"], ["/no/such/folder"]),
        (["plan", R, *NETWORK, "--policy", "nope"], ["nope", "forecast"]),
        (["plan", R, *NETWORK, "--policy", "dear", "--mode", "hook"], ["dear"]),
        (["plan", R, *NETWORK, "--set", "nope=1"], ["nope"]),
        (["plan", R, *NETWORK, "--set", "nope"], ["name=value"]),
        (["plan", R, *NETWORK, "--policy", "p3", "--set", "slice_elements=0"], ["slice_elements"]),
        (["plan", R, *NETWORK, "--policy", "ddp", "--set", "cap_bytes=fast"], ["size"]),
        (["plan", R, *NETWORK, "--policy", "ddp", "--uncertainty", "10%"], ["--uncertainty only works with forecast"]),
        (["simulate", R, *NETWORK, "--latency", "-5us"], ["--latency", "-5us", "negative"]),
        (["simulate", R, "--bandwith", "5gbit"], ["--bandwith", "`gradcast simulate --help`"]),
        (["link", "fit", "samples.csv", "--jsn"], ["--jsn", "`gradcast link fit --help`"]),
        (["plan", R, *NETWORK, "--uncertainty", "100%"], ["--uncertainty"]),
        (["plan", R, *NETWORK, "-o", "/no/such/folder/plan.json"], ["/no/such/folder"]),
        (["plan", R, *NETWORK, "-o", "."], ["folder"]),
        (["plot", "nope.json", "-o", "x.png"], ["nope.json"]),
        (["plot", "nope.json"], ["-o"]),
        (["sweep", R, "--workers", "8"], ["--bandwidths"]),
        (["sweep", R, "--workers", "8", "--bandwidths", "1gbit,0gbit"], ["--bandwidths"]),
        (["sweep", R, "--workers", "", "--bandwidths", "1gbit"], ["--workers"]),
        (["sweep", R, "--workers", "8", "--bandwidths", "1gbit", "--policies", "nope"], ["nope"]),
        (["sweep", R, "--workers", "8", "--bandwidths", "1gbit", "-o", "/no/such/folder/x.csv"], ["/no/such/folder"]),
        (["profile"], ["ACTION"]),
        (["profile", "import", "nope.csv"], ["nope.csv"]),
        (["profile", "show"], ["PROFILE"]),
        (["link", "fit", "nope.csv"], ["nope.csv"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments(arguments, words, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_refused(run(*arguments), *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["layers.csv"]),
        ("layer,forward_ms\na,1\n", ["backward_ms"]),
        ("layer,forward_ms,backward_ms,parameter_bytes\n", []),
        ("layer,forward_ms,backward_ms,parameter_bytes\na,1,2,0\n", []),
        ("layer,forward_ms,backward_ms,parameter_bytes\na,1,2\n", ["line 2"]),
        ("layer,forward_ms,backward_ms,parameter_bytes\na,-1,2,400\n", ["line 2", "forward_ms"]),
        ("layer,forward_ms,backward_ms,parameter_bytes\na,1,nan,400\n", ["line 2", "backward_ms"]),
        ("layer,forward_ms,backward_ms,parameter_bytes\na,1,1,4.5\n", ["line 2", "parameter_bytes"]),
        ('layer,forward_ms,backward_ms,parameter_bytes\n"a,1,1,4\n', ["line 2"]),
    ],
)
def test_broken_layer_tables(text, words, tmp_path, run):
    path = tmp_path / "layers.csv"
    path.write_text(text)
    assert_refused(run("profile", "import", path), "layers.csv", *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["bytes"]),
        ("bytes\n", ["time_ns"]),
        ("bytes,time_ns\n", ["no samples"]),
        ("bytes,time_ns\n4096,100\n", []),
        ("bytes,time_ns\n4096,x\n", ["line 2", "time_ns"]),
        ("bytes,time_ns\n4096\n", ["line 2", "time_ns"]),
        ("bytes,time_ns\n0,100\n", ["line 2", "bytes"]),
        ("bytes,time_ns\n-5,100\n", ["line 2", "bytes"]),
        ("bytes,time_ns\n1.5,100\n", ["line 2", "bytes"]),
        ("bytes,time_ns\n4096,nan\n", ["line 2", "time_ns"]),
        ("bytes,time_ns\n4096,inf\n", ["line 2", "time_ns"]),
        ("bytes,time_ns,op\n4096,100,teleport\n", ["line 2", "teleport"]),
    ],
)
def test_broken_samples(text, words, tmp_path, run):
    path = tmp_path / "samples.csv"
    path.write_text(text)
    assert_refused(run("link", "fit", path), "samples.csv", *words)


def test_samples_without_all_reduce_make_no_link(tmp_path, run):
    path = tmp_path / "samples.csv"
    path.write_text("bytes,time_ns,op\n" + "".join(f"{4**k},{100 + 4**k},all_gather\n" for k in range(4, 10)))
    assert_refused(run("link", "fit", path, "-o", tmp_path / "link.json"), "all_reduce")


def test_no_matplotlib(plan_path, tmp_path, run):
    code = (
        "import sys; sys.modules['matplotlib'] = None; from gradcast.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["plot", str(plan_path), "-o", str(tmp_path / "x.png")]
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == (
        "gradcast: error: plots need matplotlib, which is not installed; pip install 'gradcast[plot]'\n"
    )


def test_an_unknown_kind_of_picture(plan_path, tmp_path, run):
    assert_refused(run("plot", plan_path, "-o", tmp_path / "x.nope"), "plot.png")


def test_the_process_itself_ends_with_2(tmp_path):
    """Once from outside: the exit code reaches the shell, and nothing but the sentence reaches stderr."""
    path = tmp_path / "truncated.json"
    path.write_text('{"version":1,"name"')
    result = subprocess.run([sys.executable, "-m", "gradcast", "simulate", path], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1


def test_a_defect_is_told_apart(run, monkeypatch):
    """Exit code 1 and a request to report; the trace only on demand."""

    def broken(*arguments, **options):
        raise RuntimeError("boom")

    monkeypatch.delenv("GRADCAST_DEBUG", raising=False)
    monkeypatch.setattr("gradcast.cli.common.load_profile", broken)
    result = run("profile", "show", "resnet50")
    assert result.code == 1
    assert "please report" in result.err
    assert "Traceback" not in result.err
    monkeypatch.setenv("GRADCAST_DEBUG", "1")
    with pytest.raises(RuntimeError):
        run("profile", "show", "resnet50")
