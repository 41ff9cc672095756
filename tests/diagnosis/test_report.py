"""`gradcast report` and `gradcast info`."""

import json

import pytest

from gradcast.cli.main import main


def results(**changes):
    sweep = [
        {"op": op, "size_bytes": size, "time_ns": 1e5 + 2.0 * size, "low_ns": 9e4, "high_ns": 4e5 + 2.0 * size,
         "errors": 0}
        for op in ("all_reduce", "all_gather") for size in (1024, 4096, 16384)
    ]  # fmt: skip
    schedule = [
        {"policy": policy, "blocks": 3, "step_ns": step_ns, "low_ns": 0.9 * step_ns, "high_ns": 1.1 * step_ns,
         "compute_ns": 5e6, "exposed_ns": step_ns - 5e6, "predicted_ns": 0.98 * step_ns, "prediction_error": -0.02,
         "bound_ns": 5.9e6}
        for policy, step_ns in (("forecast", 6e6), ("ddp", 9e6))
    ]  # fmt: skip
    link = {"all_reduce": [{"up_to_bytes": None, "alpha_ns": 1e5, "beta_ns_per_byte": 2.0}]}
    whole = {"version": 1, "kind": "gradcast-bench", "transport": "mpi", "world_size": 4, "sweep": sweep, "link": link}
    return whole | {"schedule": schedule, "profile": "resnet50", "mode": "overlap"} | changes


@pytest.fixture
def _plots():
    pytest.importorskip("matplotlib", reason="this needs matplotlib, which is not installed: pip install matplotlib")


def report(tmp_path, content):
    path, picture = tmp_path / "bench.json", tmp_path / "bench.png"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return main(["report", str(path), "-o", str(picture)]), picture


@pytest.mark.usefixtures("_plots")
def test_the_picture_omits_what_was_out_of_place(tmp_path):
    """A training reduces in place."""
    sweep = results()["sweep"]
    away = [row | {"in_place": False, "time_ns": 9e9, "high_ns": 9e9} for row in sweep]
    pictures = []
    for number, rows in enumerate((sweep, sweep + away)):
        path, picture = tmp_path / f"{number}.json", tmp_path / f"{number}.png"
        path.write_text(json.dumps(results(sweep=rows)))
        assert main(["report", str(path), "-o", str(picture)]) == 0
        pictures.append(picture.read_bytes())
    assert pictures[0] == pictures[1]


@pytest.mark.usefixtures("_plots")
def test_the_picture_and_the_sentences(tmp_path, capsys):
    code, picture = report(tmp_path, results())
    assert code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "forecast is the fastest: 6.0 ms per step, 1.50x faster than ddp; the lower bound is 5.9 ms" in said
    assert "Predictions are off by 2% at most" in said
    assert "do not train" not in said


@pytest.mark.usefixtures("_plots")
@pytest.mark.parametrize("left_out", ["sweep", "schedule"])
def test_one_part_alone(tmp_path, left_out):
    code, picture = report(tmp_path, results(**{left_out: []}))
    assert code == 0
    assert picture.exists()


@pytest.mark.usefixtures("_plots")
def test_wrong_sums_are_the_first_thing_that_is_said(tmp_path, capsys):
    whole = results()
    whole["sweep"][1]["errors"] = 7
    report(tmp_path, whole)
    assert capsys.readouterr().out.startswith("7 elements of the sums were wrong: do not train over this transport.")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not valid JSON: it ends too early"),
        ("[]", "was written neither by gradcast doctor nor by gradcast-bench"),
        ({"kind": "else"}, "was written neither by gradcast doctor nor by gradcast-bench"),
        (results(version=2), "this gradcast reads version 1"),
        (results(sweep=[], schedule=[]), "nothing to draw"),
    ],
)
def test_what_it_cannot_draw(tmp_path, capsys, content, words):
    code, picture = report(tmp_path, content)
    assert code == 2
    assert words in capsys.readouterr().err
    assert not picture.exists()


def test_a_file_that_is_not_there(tmp_path, capsys):
    assert main(["report", str(tmp_path / "none.json"), "-o", str(tmp_path / "x.png")]) == 2
    assert "does not exist; check the path" in capsys.readouterr().err


def test_info_names_every_part(capsys):
    assert main(["info"]) == 0
    table = capsys.readouterr().out
    assert main(["info", "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)
    assert {"gradcast", "python", "torch", "gradcast-bench"} <= set(parts)
    for name in parts:
        assert name == "version" or name in table
