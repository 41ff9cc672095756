"""Everything that the page and the terminal show, computed once."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from cells import METHODS, MODELS, Cell, find, load_cells, may_fit
from fit import Fit, fit_both, fit_line_rate, fit_one, fit_scheduler
from models import BERT_BASE, Model, bert, published_models, resnet50
from predict import Assumptions, Parameters, iteration_ns


@dataclass(frozen=True)
class Result:
    cell: Cell
    predicted_samples_per_s: float
    fitted: bool  # a parameter was fitted on it

    @property
    def error(self) -> float:
        return self.predicted_samples_per_s / self.cell.samples_per_s - 1


def mean_absolute_error(results: Iterable[Result]) -> float:
    errors = [abs(result.error) for result in results]
    return sum(errors) / len(errors)


def tested(results: Iterable[Result]) -> list[Result]:
    return [result for result in results if not result.fitted]


@dataclass(frozen=True)
class Variant:
    """The same, with one choice changed and the parameters fitted again."""

    name: str
    parameters: Parameters
    results: list[Result]


@dataclass(frozen=True)
class Crossing:
    """Parameters of one model, tested on others."""

    fit: Fit
    tested_on: str
    results: list[Result]


class Replay:
    def __init__(self) -> None:
        self.models: Mapping[str, Model] = published_models()
        self.cells = load_cells()
        self.large_cells = load_cells("throughput_bert_large.csv")

    def results(
        self,
        parameters: Parameters,
        *,
        cells: list[Cell] | None = None,
        models: Mapping[str, Model] | None = None,
        assumptions: Assumptions | None = None,
        fitted: Callable[[Cell], bool] = may_fit,
    ) -> list[Result]:
        models = models or self.models
        return [
            Result(
                cell,
                cell.samples_per_s_at(iteration_ns(models[cell.model], cell, parameters, assumptions)),
                fitted(cell),
            )
            for cell in (self.cells if cells is None else cells)
        ]

    @cached_property
    def both(self) -> Fit:
        return fit_both(self.models, self.cells)

    @cached_property
    def main_results(self) -> list[Result]:
        return self.results(self.both.parameters)

    @cached_property
    def third_model(self) -> list[Result]:
        """BERT-Large: nothing was fitted on it."""
        return self.results(self.both.parameters, cells=self.large_cells, fitted=lambda cell: False)

    @cached_property
    def crossings(self) -> list[Crossing]:
        crossings = []
        for model, other, spare in (
            ("ResNet-50", "BERT-Base", "contention"),
            ("BERT-Base", "ResNet-50", "update_ns_per_byte"),
        ):
            fit = fit_one(self.models, self.cells, model, spare)
            cells = [cell for cell in self.cells if cell.model == other]
            crossings.append(Crossing(fit, other, self.results(fit.parameters, cells=cells, fitted=lambda cell: False)))
        return crossings

    @cached_property
    def scheduler_crossings(self) -> list[tuple[str, Parameters, list[Result]]]:
        """(model that it was fitted on, parameters, ByteScheduler's cells of both models)."""
        cells = [cell for cell in self.cells if cell.method == "ByteScheduler-A2A"]
        crossings = []
        for model in MODELS:
            parameters = fit_scheduler(self.models, self.cells, self.both.parameters, model)

            def fitted(cell: Cell, model: str = model) -> bool:
                return cell.model == model and cell.worker_count in (4, 8)

            crossings.append((model, parameters, self.results(parameters, cells=cells, fitted=fitted)))
        return crossings

    @cached_property
    def bsp_choice(self) -> list[tuple[str, list[Result]]]:
        """BSP on ResNet-50 with 4 and 8 GPUs, fused and not: what the choice between them could rest on."""
        cells = [find(self.cells, "ResNet-50", "BSP-A2A", count) for count in (4, 8)]
        return [
            (name, self.results(self.both.parameters, cells=cells, assumptions=Assumptions(fused_bsp=fused)))
            for name, fused in (("fused", True), ("one operation per tensor", False))
        ]

    @cached_property
    def baseline(self) -> list[Result]:
        """No model at all: every method is as fast as WFBP was on 4 GPUs, and per GPU on 8 or more as it was on 8."""
        results = []
        for cell in self.cells:
            known = find(self.cells, cell.model, "WFBP-A2A", min(cell.worker_count, 8))
            speed = known.samples_per_s * cell.worker_count / known.worker_count
            results.append(Result(cell, speed, may_fit(cell)))
        return results

    @cached_property
    def variants(self) -> list[Variant]:
        return [*self._assumption_variants(), *self._shape_variants(), *self._parameter_variants()]

    def _assumption_variants(self) -> list[Variant]:
        parameters = self.both.parameters
        named = [
            (f"start-up cost grows {words}", Assumptions(growth=growth))
            for growth, words in (
                ("tree", "like a tree's, log2 P"),
                ("nodes", "with the nodes, M - 1"),
                ("published", "like the published start-up costs"),
                ("constant", "not at all: negotiation only"),
            )
        ]
        named.append(("BSP sends one operation per tensor", Assumptions(fused_bsp=False)))
        named.append(("MG-WFBP plans with the modelled network", Assumptions(mgwfbp_plans_with="network")))
        return [
            Variant(name, parameters, self.results(parameters, assumptions=assumptions)) for name, assumptions in named
        ]

    def _shape_variants(self) -> list[Variant]:
        bert_forty = dataclasses.replace(bert(BERT_BASE), forward_share=0.4)
        changed = [
            ("ResNet-50: forward is 1/3 of compute", {**self.models, "ResNet-50": resnet50(forward_share=1 / 3)}),
            ("BERT-Base: forward is 0.4 of compute", {**self.models, "BERT-Base": bert_forty}),
        ]
        variants = []
        for name, models in changed:
            parameters = fit_both(models, self.cells).parameters
            variants.append(Variant(name, parameters, self.results(parameters, models=models)))
        return variants

    def _parameter_variants(self) -> list[Variant]:
        line_rate = fit_line_rate(self.models, self.cells).parameters
        no_update = self.both.parameters.replace(update_ns_per_byte=0.0)
        contended = fit_one(self.models, self.cells, "BERT-Base", "contention").parameters
        return [
            Variant("wire at its line rate, 10 Gbit/s", line_rate, self.results(line_rate)),
            Variant("no time for the update", no_update, self.results(no_update)),
            Variant("BERT-Base loses time to contention, not to the update", contended, self.results(contended)),
        ]


def group_errors(results: list[Result]) -> list[tuple[str, str, float, int]]:
    """(kind of group, group, mean absolute error, cells) of the tested cells."""
    rest = tested(results)
    groups = [("method", name, [r for r in rest if r.cell.method == name]) for name in METHODS]
    names = list(dict.fromkeys(result.cell.model for result in results))
    groups += [("model", name, [r for r in rest if r.cell.model == name]) for name in names]
    counts = sorted({result.cell.worker_count for result in results})
    groups += [("GPUs", str(count), [r for r in rest if r.cell.worker_count == count]) for count in counts]
    groups.append(("all", "all", rest))
    groups.append(("all", "all but ByteScheduler", [r for r in rest if r.cell.method != "ByteScheduler-A2A"]))
    return [(kind, name, mean_absolute_error(group), len(group)) for kind, name, group in groups]
