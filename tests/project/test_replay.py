"""The replay of published throughput: its fits find known parameters, its tables are complete, and its page is current.

Whether the predictions are good is for the page to say; here they only have to be the ones that the page shows.
"""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest

from conftest import ROOT

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "evaluation" / "predictions.md"


@pytest.fixture(scope="module")
def program():
    """The modules of benchmarks/replay."""
    from benchmarks.replay import __main__, fit, predict

    return SimpleNamespace(main=__main__, fit=fit, predict=predict)


@pytest.fixture(scope="module")
def replay(program):
    return program.fit.Replay()


def changed(replay, factor, is_changed):
    """The published cells with some of them faster by a factor."""
    return [
        dataclasses.replace(cell, samples_per_s=factor * cell.samples_per_s) if is_changed(cell) else cell
        for cell in replay.cells
    ]


def test_fits_recover_known_parameters(program, replay):
    """With what the model itself predicts in place of what was measured."""
    truth = program.predict.Parameters(wire_bytes_per_s=1.1e9, operation_ns=400e3, update_ns_per_byte=0.004)

    def refitted(parameters):
        found = replay.results(parameters)
        return program.fit.Replay([dataclasses.replace(r.cell, samples_per_s=r.samples_per_s) for r in found])

    for name, expected in dataclasses.asdict(truth).items():
        assert getattr(refitted(truth).both, name) == pytest.approx(expected, rel=1e-4), name
    at_line_rate = dataclasses.replace(truth, wire_bytes_per_s=program.predict.LINE_RATE_BYTES_PER_S)
    found = refitted(at_line_rate).from_one("BERT-Base")
    assert found.operation_ns == pytest.approx(400e3, rel=1e-4)
    assert found.update_ns_per_byte == pytest.approx(0.004, rel=1e-4)


def test_fits_see_only_the_cells_that_they_may(program, replay):
    """Every other cell changed: the parameters stay."""
    fitted = {result.cell for result in replay.results(replay.both) if result.fitted}
    assert {(cell.method, cell.worker_count) for cell in fitted} == {("WFBP-A2A", 4), ("WFBP-A2A", 8)}
    other = program.fit.Replay(changed(replay, 1 / 3, lambda cell: cell not in fitted))
    assert other.both == replay.both
    for model in program.fit.FIT_MODELS:
        other = program.fit.Replay(changed(replay, 1 / 3, lambda cell, model=model: cell.model != model))
        assert other.from_one(model) == replay.from_one(model)


def test_every_all_reduce_cell_is_predicted_once(program, replay):
    results = replay.results(replay.both)
    keys = [(r.cell.model, r.cell.method, r.cell.worker_count) for r in results]
    models = (*program.fit.FIT_MODELS, "BERT-Large")
    assert sorted(keys) == sorted(itertools.product(models, program.predict.METHODS, (4, 8, 16, 32)))
    assert sum(result.fitted for result in results) == 4
    assert sum(result.tested for result in results) == 28


@pytest.mark.parametrize(
    ("name", "tensor_count", "megabytes"),
    [("ResNet-50", 161, 102.2), ("BERT-Base", 206, 440.4), ("BERT-Large", 398, 1344.9)],
)
def test_layer_shapes(replay, name, tensor_count, megabytes):
    """The numbers of gradients and bytes that the models have at run time."""
    profile = replay.models[name].profile(300e6)
    assert len(profile.tensors) == tensor_count
    assert sum(tensor.bytes for tensor in profile.tensors) / 1e6 == pytest.approx(megabytes, abs=0.05)
    assert profile.forward_ns + profile.backward_ns == pytest.approx(300e6)
    # The first layer's gradients are the last to be ready; in BERT they contain the head's matrix.
    assert profile.tensors[0].ready_ns == pytest.approx(profile.backward_ns)


def test_32_gpus_are_predicted_from_4_to_16(program, replay):
    """By gradcast.scaling, and on its links by the replay; neither sees what it predicts."""
    results = replay.scaled()
    assert len(results) == 8
    assert {result.cell.worker_count for result in results} == {32}
    assert program.fit.mean_error(results) <= 0.10
    assert all(result.slowest <= result.samples_per_s <= result.fastest for result in results)
    unseen = program.fit.Replay(changed(replay, 1 / 3, lambda cell: cell.worker_count == 32)).scaled()
    assert [result.samples_per_s for result in unseen] == [result.samples_per_s for result in results]
    # Were the network of 16 GPUs as slow as this, the cells of 32 would be missed.
    slow = program.fit.Replay(changed(replay, 1 / 3, lambda cell: cell.worker_count == 16))
    assert program.fit.mean_error(slow.scaled()) > 0.10


def test_the_page_shows_what_the_program_computes(program, replay):
    page = PAGE.read_text(encoding="utf-8")
    for mark, table in program.main.TABLES.items():
        text = f"<!-- {mark} -->\n{table(replay)}\n<!-- /{mark} -->"
        assert text in page, f"{mark}: run `python -m benchmarks.replay --refresh {PAGE.relative_to(ROOT)}`"


def test_a_page_is_refreshed(program, replay, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(program.main, "Replay", lambda: replay)
    monkeypatch.setattr(program.main, "TABLES", {"replay:fits": program.main.fits})
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- replay:fits -->\nold\n<!-- /replay:fits -->\nafter\n")
    assert program.main.main(["--refresh", str(page)]) == 0
    table = capsys.readouterr().out.strip()
    assert page.read_text() == f"before\n<!-- replay:fits -->\n{table}\n<!-- /replay:fits -->\nafter\n"
