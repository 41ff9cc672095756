"""Steps on a machine that one does not have: known coefficients are found, and what cannot be predicted is refused."""

import json

import pytest

import gradcast
from gradcast.scaling.step_times import ModelStep, fit, load_step_times

SHAPES = [(1e9, 50), (2e9, 80), (3e9, 60), (5e9, 200), (8e9, 120), (4e9, 300)]


def models(once_ms=10.0, per_flop=40e-9, per_tensor=0.5):
    return [
        ModelStep(f"m{k}", flops, tensors, once_ms + per_flop * flops + per_tensor * tensors)
        for k, (flops, tensors) in enumerate(SHAPES)
    ]


@pytest.mark.parametrize("known", [(10.0, 40e-9, 0.5), (0.0, 40e-9, 0.5), (10.0, 40e-9, 0.0), (0.0, 40e-9, 0.0)])
def test_coefficients_are_found(known):
    found = fit(models(*known))
    assert found.coefficients == pytest.approx(known, rel=1e-6, abs=1e-9)
    assert found.worst_error < 1e-6
    assert found.step_ms(6e9, 100) == pytest.approx(known[0] + known[1] * 6e9 + known[2] * 100)


def test_no_coefficient_is_negative():
    """Steps that get shorter with more tensors: the term is left out."""
    found = fit(models(100.0, 40e-9, -0.2))
    assert found.coefficients[2] == 0
    assert found.mean_error > 0.01


def test_what_no_model_tells_is_left_out():
    """All have equally many tensors, so these and what a step takes once are the same."""
    same = [ModelStep("", flops, 100, 40e-9 * flops + 30) for flops, _ in SHAPES]
    assert fit(same).step_ms(6e9, 100) == pytest.approx(40e-9 * 6e9 + 30)


def test_relative_errors_count():
    """One step of the six is off by a tenth: the large ones do not decide alone."""
    some = models()
    some[0] = ModelStep("m0", *SHAPES[0], 1.1 * some[0].step_ms)
    assert fit(some).step_ms(*SHAPES[0]) == pytest.approx(some[0].step_ms, rel=0.06)


@pytest.mark.parametrize(
    ("flops", "tensors", "what"), [(0.9e9, 60, "FLOPs"), (9e9, 60, "FLOPs"), (2e9, 301, "tensors")]
)
def test_outside_of_the_range_is_refused(flops, tensors, what):
    with pytest.raises(gradcast.Error, match=f"{what} cannot be predicted from models of"):
        fit(models()).step_ms(flops, tensors)


def test_too_few_models_are_refused():
    with pytest.raises(gradcast.Error, match="given are 4"):
        fit(models()[:4])


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "steps.csv"
    lines = [f"{each.name},{each.flops},{each.tensors},{each.step_ms}" for each in models()]
    path.write_text("\n".join(["model,flops,tensors,step_ms", *lines]))
    return path


def test_a_table_is_read(table):
    assert load_step_times(str(table)) == models()


def test_a_profile_gives_tensors_and_step(tmp_path):
    path = tmp_path / "steps.csv"
    path.write_text("flops,profile\n4.1e9,resnet50\n")
    profile = gradcast.load_profile("resnet50")
    (found,) = load_step_times(str(path))
    updates_ns = sum(tensor.update_ns for tensor in profile.tensors)
    step_ms = (profile.forward_ns + profile.backward_ns + updates_ns) / 1e6
    assert found == ModelStep("resnet50", 4.1e9, len(profile.tensors), pytest.approx(step_ms))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("m,1e9,50,", "line 8: step_ms is missing"),
        ("\nm,1e9,50,", "line 9: step_ms is missing"),
        ("m,-1,50,3", "flops is -1.0; a number from 1"),
        ("m,1e9,many,3", 'tensors is "many"; a whole number'),
    ],
)
def test_wrong_lines_are_named(table, line, words):
    table.write_text(f"{table.read_text()}\n{line}\n")
    with pytest.raises(gradcast.Error, match=words):
        load_step_times(str(table))


def test_commands_predict_with_it_and_say_how_well(run, table):
    network = ["--bandwidth", "10gbit", "--workers", "8"]
    options = ["--step-times", table, "--flops", "4.1G"]
    result = run("simulate", "resnet50", *network, *options)
    expected_ms = 10 + 40e-9 * 4.1e9 + 0.5 * 107
    assert f"compute is predicted from 6 other models: {expected_ms:.1f} ms" in result.out
    for arguments in (["simulate"], ["simulate", "--scaling"], ["advise"]):
        more = ["--steps", "1000"] if arguments == ["advise"] else network
        command, *rest = arguments
        found = json.loads(run(command, "resnet50", *rest, *more, *options, "--json").out)
        assert found["step_time"]["step_ms"] == pytest.approx(expected_ms)
        assert found["step_time"]["mean_error"] < 1e-6
        assert "predicted from 6 other models" in run(command, "resnet50", *rest, *more, *options).out


def test_what_does_not_go_together_is_refused(refused, table):
    command = ["simulate", "resnet50", "--bandwidth", "10gbit", "--workers", "8"]
    refused([*command, "--step-times", table], "need each other")
    refused([*command, "--flops", "4G"], "need each other")
    refused([*command, "--step-times", table, "--flops", "4G", "--scale", "2"], "omit --scale")
    refused([*command, "--step-times", table, "--flops", "40G"], "cannot be predicted")
