"""The replay of published throughput: its fits find known parameters, its tables are complete, and its page is current.

Whether the predictions are good is for the page to say; here they only have to be the ones that the page shows.
"""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPLAY = Path(__file__).resolve().parents[2] / "benchmarks" / "replay"
PAGE = REPLAY.parents[1] / "docs" / "evaluation" / "predictions.md"


@pytest.fixture(scope="module")
def modules():
    """The modules of benchmarks/replay, which is a program and no package."""
    sys.path.insert(0, str(REPLAY))
    try:
        import cells
        import fit
        import models
        import predict
        import results
        import tables
    finally:
        sys.path.remove(str(REPLAY))
    from types import SimpleNamespace

    return SimpleNamespace(cells=cells, fit=fit, models=models, predict=predict, results=results, tables=tables)


@pytest.fixture(scope="module")
def program(modules):
    """The command itself, without starting another process."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("replay_main", REPLAY / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def replay(modules):
    return modules.results.Replay()


def synthetic_cells(modules, replay, parameters):
    """The published cells with what the model itself predicts in place of what was measured."""
    return [
        dataclasses.replace(result.cell, samples_per_s=result.predicted_samples_per_s)
        for result in replay.results(parameters)
    ]


def test_fit_of_both_models_recovers_the_parameters(modules, replay):
    truth = modules.predict.Parameters(wire_bytes_per_s=1.1e9, operation_ns=400e3, update_ns_per_byte=0.004)
    cells = synthetic_cells(modules, replay, truth)
    found = modules.fit.fit_both(replay.models, cells).parameters
    for name, expected in dataclasses.asdict(truth).items():
        assert getattr(found, name) == pytest.approx(expected, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(
    ("model", "spare", "value"), [("ResNet-50", "contention", 0.5), ("BERT-Base", "update_ns_per_byte", 0.008)]
)
def test_fit_of_one_model_recovers_the_parameters(modules, replay, model, spare, value):
    truth = modules.predict.Parameters(operation_ns=300e3).replace(**{spare: value})
    fit = modules.fit.fit_one(replay.models, synthetic_cells(modules, replay, truth), model, spare)
    assert fit.parameters.operation_ns == pytest.approx(300e3, rel=1e-4)
    assert getattr(fit.parameters, spare) == pytest.approx(value, rel=1e-4)
    assert set(fit.fitted) == {"operation_ns", spare}


def test_fit_sees_only_the_cells_that_it_may(modules, replay):
    """Every other cell changed: the parameters stay."""
    changed = [
        cell if modules.cells.may_fit(cell) else dataclasses.replace(cell, samples_per_s=cell.samples_per_s / 3)
        for cell in replay.cells
    ]
    assert modules.fit.fit_both(replay.models, changed).parameters == replay.both.parameters
    assert {(cell.method, cell.worker_count) for cell in replay.both.cells} == {("WFBP-A2A", 4), ("WFBP-A2A", 8)}


@pytest.mark.parametrize("model", ["ResNet-50", "BERT-Base"])
def test_fit_of_one_model_does_not_see_the_other(modules, replay, model):
    changed = [
        cell if cell.model == model else dataclasses.replace(cell, samples_per_s=cell.samples_per_s / 3)
        for cell in replay.cells
    ]
    before = modules.fit.fit_one(replay.models, replay.cells, model, "update_ns_per_byte")
    assert modules.fit.fit_one(replay.models, changed, model, "update_ns_per_byte").parameters == before.parameters


def test_a_cell_out_of_reach_leaves_its_parameter_at_the_limit(modules, replay):
    """WFBP on 4 GPUs faster than one GPU would be: no slowdown explains that."""
    fast = [
        dataclasses.replace(cell, samples_per_s=10 * cell.samples_per_s) if cell.worker_count == 4 else cell
        for cell in replay.cells
    ]
    fit = modules.fit.fit_one(replay.models, fast, "ResNet-50", "contention")
    assert fit.parameters.contention == 0
    assert fit.at_limit == ("contention",)
    # And slower than if compute stood still beside all of its traffic.
    slow = [dataclasses.replace(cell, samples_per_s=cell.samples_per_s / 3) for cell in replay.cells]
    fit = modules.fit.fit_one(replay.models, slow, "ResNet-50", "contention")
    assert fit.parameters.contention == modules.fit.RANGES["contention"][1]
    assert "contention" in fit.at_limit


def test_every_all_reduce_cell_is_predicted_once(modules, replay):
    keys = [(r.cell.model, r.cell.method, r.cell.worker_count) for r in replay.main_results]
    wanted = {
        (model, method, count)
        for model in modules.cells.MODELS
        for method in modules.cells.METHODS
        for count in modules.cells.WORKER_COUNTS
    }
    assert len(keys) == len(wanted) == 32
    assert set(keys) == wanted
    assert sum(result.fitted for result in replay.main_results) == 4
    assert len(replay.third_model) == 16


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


def test_contention_only_ever_slows(modules, replay):
    parameters = modules.predict.Parameters(operation_ns=300e3)
    for cell in replay.cells:
        model = replay.models[cell.model]
        times = [
            modules.predict.iteration_ns(model, cell, parameters.replace(contention=contention))
            for contention in (0.0, 0.2, 1.0)
        ]
        assert times == sorted(times), cell


def test_the_page_shows_what_the_program_computes(modules, program, replay):
    page = PAGE.read_text(encoding="utf-8")
    for table in modules.tables.all_tables(replay):
        assert program.block(table) in page, f"{table.key}: run `python benchmarks/replay --refresh {PAGE}`"


def test_refresh_mends_a_page(modules, program, replay, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- replay:bsp -->\nold\n<!-- /replay:bsp -->\nafter\n")
    monkeypatch.setattr(program, "Replay", lambda: replay)
    assert program.main(["--refresh", str(page)]) == 0
    text = page.read_text()
    assert "old" not in text
    assert text.startswith("before\n<!-- replay:bsp -->\n|")
    assert text.endswith("<!-- /replay:bsp -->\nafter\n")


def test_json_agrees_with_the_table(program, replay, capsys, monkeypatch):
    monkeypatch.setattr(program, "Replay", lambda: replay)
    assert program.main(["--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    first = printed["fits"][0]
    assert first["fitted_on"] == "both"
    assert len(first["cells"]) == 32
    for cell, result in zip(first["cells"], replay.main_results, strict=True):
        assert cell["error"] == pytest.approx(result.error)
    assert program.main([]) == 0
    assert "parameter-server methods" in capsys.readouterr().out
