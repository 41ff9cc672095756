"""Whatever goes wrong ends with one sentence on stderr, an exit code of its kind, and no trace of Python or C++."""

import json
import re
import subprocess
import sys

import pytest

import gradcast
from conftest import NETWORK

BIG = 2**53


def assert_refused(result, *words, code=2):
    assert result.code == code
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
@pytest.mark.parametrize("command", ["simulate", "dev plan", "dev profile show"])
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
    assert_refused(run("dev", "plot", path, "-o", tmp_path / "x.png"), word)


def test_a_plan_of_another_profile(plan_path, tmp_path, run):
    result = run("dev", "plot", plan_path, "--profile", "vgg16", "-o", tmp_path / "x.png")
    assert_refused(result, "does not fit the profile vgg16", "made for another profile")


def test_a_plan_of_a_profile_of_the_same_size(profile_fields, plan_path, profile_path, tmp_path, run):
    """All bytes fit, and would average the gradient of one tensor into another."""
    profile_fields["tensors"][1]["bytes"], profile_fields["tensors"][2]["bytes"] = 8_000_000, 400
    other = tmp_path / "other.json"
    other.write_text(json.dumps(profile_fields))
    result = run("dev", "plot", plan_path, "--profile", other, "-o", tmp_path / "x.png")
    assert_refused(result, "made for another profile", str(profile_path), "give that one")
    profile_path.write_text(other.read_text())
    assert_refused(run("dev", "plot", plan_path, "-o", tmp_path / "x.png"), "has changed since the plan was made")


def test_files_of_another_kind(profile_path, plan_path, tmp_path, run):
    picture = tmp_path / "x.png"
    assert_refused(
        run("dev", "plot", profile_path, "-o", picture), "this is a profile; a plan is expected: `gradcast dev plan`"
    )
    assert_refused(run("simulate", plan_path, *NETWORK), "this is a plan; a profile is expected: `gradcast dev profile")
    assert_refused(
        run("simulate", "vgg16", "--link", plan_path), "this is a plan; a link is expected: `gradcast dev link"
    )


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
    arguments = ["simulate", path] if kind == "profile" else ["dev", "plot", path, "-o", tmp_path / "x.png"]
    assert_refused(run(*arguments), str(path))


@pytest.mark.parametrize(
    "content",
    [b"[]", b"5", b"null", b'"profile"', b"\xff\xfe\x00", b"{}", b"<html>", pytest.param(b"[" * 200_000, id="deep")],
)
def test_files_that_are_something_else(content, tmp_path, run):
    path = tmp_path / "other.json"
    path.write_bytes(content)
    assert_refused(run("simulate", path, *NETWORK), str(path))
    assert_refused(run("dev", "plot", path, "-o", tmp_path / "x.png"), str(path))
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
        (["simulate", R, "--network", "10gbe-8", "--workers", "8"], ["leave out --workers, or predict"]),
        (
            ["simulate", R, "--network", "10gbe", "--workers", "8,9,16"],
            ["--workers and write --network 10gbe-8,10gbe-16"],
        ),
        (["dev", "plan", R, "--network", "10gbe-8", *NETWORK], ["2 networks", "takes one"]),
        (["dev", "plan", R, "--bandwidth", "1gbit,2gbit", "--workers", "2,4"], ["4 networks", "takes one"]),
        (["simulate", R, "vgg16", *NETWORK], ["several profiles only work with --scaling"]),
        (["simulate", R, *NETWORK, "--uncertainty", "5%"], ["--uncertainty only works with --scaling"]),
        (["simulate", R, *NETWORK, "--network", "10gbe-8", "--plot", "x.png"], ["leave out --network"]),
        (["simulate", R, *NETWORK, "--algorithm", "ring,tree", "--plot", "x.png"], ["draws one algorithm"]),
        (["simulate", R, *NETWORK, "--algorithm", "star"], ["there is no algorithm star"]),
        (["simulate", R, *NETWORK, "--latency", "50"], ["--latency", "50us"]),
        (["simulate", R, *NETWORK, "--intra-latency", "5us"], ["--intra-latency"]),
        (["simulate", R, *NETWORK, "--algorithm", "hierarchical"], ["--workers-per-node"]),
        (
            [
                "simulate",
                R,
                *NETWORK,
                "--algorithm",
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
        (["dev", "plan", R, *NETWORK, "--policy", "nope"], ["nope", "forecast"]),
        (["dev", "plan", R, *NETWORK, "--policy", "dear", "--mode", "hook"], ["dear"]),
        (["dev", "plan", R, *NETWORK, "--set", "nope=1"], ["nope"]),
        (["dev", "plan", R, *NETWORK, "--set", "nope"], ["name=value"]),
        (["dev", "plan", R, *NETWORK, "--policy", "p3", "--set", "slice_elements=0"], ["slice_elements"]),
        (["dev", "plan", R, *NETWORK, "--policy", "ddp", "--set", "cap_bytes=fast"], ["size"]),
        (["dev", "plan", R, *NETWORK, "--policy", "ddp", "--set", "cap_bytes=512"], ["no known unit of size"]),
        (
            ["dev", "plan", R, *NETWORK, "--policy", "ddp", "--uncertainty", "10%"],
            ["--uncertainty only works with forecast"],
        ),
        (["simulate", R, *NETWORK, "--latency", "-5us"], ["--latency", "-5us", "negative"]),
        (["simulate", R, "--bandwith", "5gbit"], ["--bandwith", "`gradcast simulate --help`"]),
        (["dev", "link", "fit", "samples.csv", "--jsn"], ["--jsn", "`gradcast dev link fit --help`"]),
        (["dev", "plan", R, *NETWORK, "--uncertainty", "100%"], ["--uncertainty"]),
        (["dev", "plot", "nope.json", "-o", "x.png"], ["nope.json"]),
        (["dev", "plot", "nope.json"], ["-o"]),
        (["simulate", R, "--workers", "8", "--bandwidth", "1gbit,0gbit"], ["--bandwidth"]),
        (["simulate", R, "--workers", "", "--bandwidth", "1gbit"], ["--workers"]),
        (["simulate", R, "--workers", "2,8", "--bandwidth", "1gbit", "--policy", "nope"], ["nope"]),
        (["dev"], ["COMMAND"]),
        (["dev", "profile"], ["COMMAND"]),
        (["dev", "profile", "import", "nope.csv"], ["nope.csv"]),
        (["dev", "profile", "show"], ["PROFILE"]),
        (["dev", "link", "fit", "nope.csv"], ["nope.csv"]),
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
    assert_refused(run("dev", "profile", "import", path), "layers.csv", *words)


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
    assert_refused(run("dev", "link", "fit", path), "samples.csv", *words)


def test_samples_without_all_reduce_make_no_link(tmp_path, run):
    path = tmp_path / "samples.csv"
    path.write_text("bytes,time_ns,op\n" + "".join(f"{4**k},{100 + 4**k},all_gather\n" for k in range(4, 10)))
    assert_refused(run("dev", "link", "fit", path, "-o", tmp_path / "link.json"), "all_reduce")


def test_no_matplotlib(plan_path, tmp_path, run):
    code = (
        "import sys; sys.modules['matplotlib'] = None; from gradcast.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["dev", "plot", str(plan_path), "-o", str(tmp_path / "x.png")]
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert result.returncode == 3
    assert result.stderr == (
        "gradcast: error: plots need matplotlib, which is not installed; pip install 'gradcast[plot]'\n"
    )


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
def test_files_that_cannot_be_written(arguments, run):
    assert_refused(run(*arguments), "cannot be written to", code=3)


@pytest.mark.parametrize("command", [["doctor", "train.py"], ["network"]])
def test_no_torch(command, run, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert_refused(run(*command), "needs PyTorch, which is not installed", code=3)


RENAMED = {
    "sweep resnet50": "`gradcast sweep` is now `gradcast simulate PROFILE --bandwidth 1gbit,10gbit --workers 2,8`",
    "scaling resnet50": "`gradcast scaling` is now `gradcast simulate PROFILE --scaling`",
    "networks": "`gradcast networks` is now `gradcast dev published-networks`",
    "plan resnet50": "`gradcast plan` is now `gradcast dev plan`",
    "lab train --model vgg16": "`gradcast lab` is now `gradcast dev lab`",
    "doctor --seconds 5 train.py": "`gradcast doctor` has no --seconds any more; write --duration 60s",
    "network --seconds 5": "`gradcast network` has no --seconds any more; write --duration 10s",
    "simulate resnet50 --topology tree": "`gradcast simulate` has no --topology any more; write --algorithm",
    "simulate resnet50 --bandwidths 1gbit": "`gradcast simulate` has no --bandwidths any more; write --bandwidth",
    "advise resnet50 --cost 500": "`gradcast advise` has no --cost any more; write --budget",
    "dev lab train --rates 1gbit,1gbit": "`gradcast dev lab train` has no --rates any more; write --bandwidth",
    "dev lab train -o x.png": "`gradcast dev lab train` has no -o any more; write --plot",
    "dev lab run --rate 1gbit -- x.py": "`gradcast dev lab run` has no --rate any more; write --bandwidth",
    "dev lab adapt --forward-ms 5": "`gradcast dev lab adapt` has no --forward-ms any more; write --forward 100ms",
}


@pytest.mark.parametrize("arguments", RENAMED)
def test_old_names_are_answered_with_the_new_ones(arguments, run):
    result = run(*arguments.split())
    assert (result.code, result.err) == (2, f"gradcast: error: {RENAMED[arguments]}\n")


def test_an_unknown_kind_of_picture(plan_path, tmp_path, run):
    assert_refused(run("dev", "plot", plan_path, "-o", tmp_path / "x.nope"), "plot.png")


def test_the_process_itself_ends_with_2(tmp_path):
    """Once from outside: the exit code reaches the shell, and nothing but the sentence reaches stderr."""
    path = tmp_path / "truncated.json"
    path.write_text('{"version":1,"name"')
    result = subprocess.run([sys.executable, "-m", "gradcast", "simulate", path], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1


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
