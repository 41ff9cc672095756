"""`gradcast simulate --scaling` against published throughput: 32 GPUs from 4 to 16, and the page that shows it."""

import dataclasses
import sys
from pathlib import Path

import pytest

REPLAY = Path(__file__).resolve().parents[2] / "benchmarks" / "replay"
PAGE = REPLAY.parents[1] / "docs" / "evaluation" / "predictions.md"


@pytest.fixture(scope="module")
def program():
    """The module of benchmarks/replay, which is a program and no package."""
    sys.path.insert(0, str(REPLAY))
    try:
        import scaling_check
    finally:
        sys.path.remove(str(REPLAY))
    return scaling_check


@pytest.fixture(scope="module")
def check(program):
    return program.ScalingCheck()


def test_32_gpus_are_predicted_from_4_to_16(program, check):
    results = check.results()
    assert len(results) == 8
    assert {result.cell.worker_count for result in results} == {32}
    assert program.mean_error(results) <= 0.10
    assert all(result.slowest <= result.predicted <= result.fastest for result in results)


def test_the_band_and_the_replay_agree_on_what_both_can_do(program, check):
    """WFBP through scaling.band and, on the same link, through the replay's own iterations."""
    network = check.network((8, 16))
    estimate = program.Cluster(network, program._NODES).estimate("ring", 32)
    cells = [cell for cell in check.cells if (cell.method, cell.worker_count) == ("WFBP-A2A", 32)]
    assert len(cells) == 2
    for cell in cells:
        found = [check.of_band(cell, network), check.of_replay(cell, estimate)]
        speeds = [(result.slowest, result.predicted, result.fastest) for result in found]
        assert speeds[0] == pytest.approx(speeds[1])
        assert found[0] in check.results()


def test_the_prediction_does_not_see_what_it_predicts(program, check):
    changed = [
        dataclasses.replace(cell, samples_per_s=cell.samples_per_s / 3) if cell.worker_count == 32 else cell
        for cell in check.cells
    ]
    other = program.ScalingCheck(changed).results()
    assert [result.predicted for result in other] == [result.predicted for result in check.results()]


def test_the_check_can_fail(program, check):
    """Were the network of 16 GPUs four times as slow, the cells of 32 would be missed."""
    changed = [
        dataclasses.replace(cell, samples_per_s=cell.samples_per_s / 3) if cell.worker_count == 16 else cell
        for cell in check.cells
    ]
    assert program.mean_error(program.ScalingCheck(changed).results()) > 0.10


@pytest.mark.parametrize("count", [8, 16])
def test_the_link_meets_the_cells_that_it_comes_from(program, check, count):
    for result in check.results((count,), count):
        if result.cell.method == "WFBP-A2A":
            assert result.error == pytest.approx(0, abs=1e-3)


def test_the_page_shows_what_the_program_computes(program, check):
    assert program.marked(program.block(check)) in PAGE.read_text(encoding="utf-8"), (
        "run `python benchmarks/replay/scaling_check.py --refresh docs/evaluation/predictions.md`"
    )


def test_refresh_mends_a_page(program, check, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(program, "ScalingCheck", lambda: check)
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- scaling:check -->\nold\n<!-- /scaling:check -->\nafter\n")
    assert program.main(["--refresh", str(page)]) == 0
    text = page.read_text()
    assert "old" not in text
    assert text.startswith("before\n<!-- scaling:check -->\n|")
    assert program.main([]) == 0
    assert capsys.readouterr().out.strip() in text
