"""The parameters, from cells of WFBP at 4 and 8 GPUs and from nothing else.

Each parameter is found from the one cell that it moves most, by bisection; a cell outside the reach of its parameter
leaves the parameter at the end of its range. There are as many parameters as cells: how well the fitted cells are
met says nothing, the other cells do.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cells import FIT_METHOD, Cell, find
from models import Model
from predict import Parameters, error, iteration_ns

# What is searched, wide enough that only a cell out of reach ends at a border.
RANGES = {
    "wire_bytes_per_s": (0.1e9, 5e9),
    "operation_ns": (0.0, 20e6),
    "update_ns_per_byte": (0.0, 1.0),
    "contention": (0.0, 20.0),
    "scheduler_ns": (0.0, 20e6),
}


@dataclass(frozen=True)
class Fit:
    name: str
    parameters: Parameters
    fitted: tuple[str, ...]  # parameters that a cell determined
    at_limit: tuple[str, ...]  # parameters that stayed at the end of their range
    cells: tuple[Cell, ...]


def bisect(function: Callable[[float], float], low: float, high: float) -> float:
    """Where an increasing function crosses 0, or the end of the range that it stays beyond."""
    if function(low) >= 0:
        return low
    if function(high) <= 0:
        return high
    while high - low > 1e-8 * high:
        middle = (low + high) / 2
        if function(middle) < 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


class Fitter:
    """Fits one parameter at a time, all others fixed."""

    def __init__(self, models: Mapping[str, Model], cells: list[Cell]) -> None:
        self._models = models
        self._cells = cells

    def cell(self, model: str, worker_count: int) -> Cell:
        return find(self._cells, model, FIT_METHOD, worker_count)

    def _excess_ns(self, cell: Cell, parameters: Parameters) -> float:
        return iteration_ns(self._models[cell.model], cell, parameters) - cell.iteration_ns

    def met(self, name: str, cell: Cell, parameters: Parameters) -> Parameters:
        """The value of one parameter under which the cell is met. All but the wire's make an iteration longer."""
        sign = -1 if name == "wire_bytes_per_s" else 1

        def excess_ns(value: float) -> float:
            return sign * self._excess_ns(cell, parameters.replace(**{name: value}))

        return parameters.replace(**{name: bisect(excess_ns, *RANGES[name])})


def _fit(name: str, parameters: Parameters, names: tuple[str, ...], cells: list[Cell]) -> Fit:
    at_limit = tuple(each for each in names if getattr(parameters, each) in RANGES[each])
    fitted = tuple(each for each in names if each not in at_limit)
    return Fit(name, parameters, fitted, at_limit, tuple(cells))


def fit_both(models: Mapping[str, Model], cells: list[Cell]) -> Fit:
    """Four parameters from the four cells of both models.

    Contention from ResNet-50 on 4 GPUs, where all traffic can hide under backward; the update from BERT-Base on 4 GPUs;
    wire and start-up cost from the two cells of 8 GPUs: many small tensors here, many bytes there.
    """
    fitter = Fitter(models, cells)
    resnet4, resnet8 = fitter.cell("ResNet-50", 4), fitter.cell("ResNet-50", 8)
    bert4, bert8 = fitter.cell("BERT-Base", 4), fitter.cell("BERT-Base", 8)
    parameters = Parameters()
    for _ in range(30):
        before = parameters
        parameters = fitter.met("contention", resnet4, parameters)
        parameters = fitter.met("update_ns_per_byte", bert4, parameters)
        if parameters == before:
            break

    # A slower start leaves less time for the bytes, so BERT-Base then wants a faster wire: along that curve the
    # iteration of ResNet-50, which has more tensors per byte, still gets longer.
    def on_curve(operation_ns: float) -> Parameters:
        return fitter.met("wire_bytes_per_s", bert8, parameters.replace(operation_ns=operation_ns))

    def excess_ns(operation_ns: float) -> float:
        return iteration_ns(models["ResNet-50"], resnet8, on_curve(operation_ns)) - resnet8.iteration_ns

    parameters = on_curve(bisect(excess_ns, *RANGES["operation_ns"]))
    names = ("wire_bytes_per_s", "operation_ns", "update_ns_per_byte", "contention")
    return _fit("both", parameters, names, [resnet4, resnet8, bert4, bert8])


def fit_one(models: Mapping[str, Model], cells: list[Cell], model: str, spare: str) -> Fit:
    """Two parameters from the two cells of one model; the wire has its line rate.

    ``spare`` is what takes up the time that 4 GPUs lose: "contention" or "update_ns_per_byte". One cell cannot tell
    which it is, so the other is left out.
    """
    fitter = Fitter(models, cells)
    four, eight = fitter.cell(model, 4), fitter.cell(model, 8)
    parameters = fitter.met(spare, four, Parameters())
    parameters = fitter.met("operation_ns", eight, parameters)
    return _fit(model, parameters, ("operation_ns", spare), [four, eight])


def fit_line_rate(models: Mapping[str, Model], cells: list[Cell]) -> Fit:
    """As fit_both, but with the wire at its line rate: of the cells of 8 GPUs only ResNet-50's is met."""
    both = fit_both(models, cells)
    fitter = Fitter(models, cells)
    parameters = both.parameters.replace(wire_bytes_per_s=Parameters().wire_bytes_per_s)
    parameters = fitter.met("operation_ns", fitter.cell("ResNet-50", 8), parameters)
    return _fit("line rate", parameters, ("operation_ns", "update_ns_per_byte", "contention"), list(both.cells))


def fit_scheduler(models: Mapping[str, Model], cells: list[Cell], parameters: Parameters, model: str) -> Parameters:
    """ByteScheduler's work per operation from its 4- and 8-GPU cells of one model: least squares of the relative error.

    These are not cells of WFBP: the result is reported apart from the prediction.
    """
    fitted = [find(cells, model, "ByteScheduler-A2A", count) for count in (4, 8)]

    def loss(scheduler_ns: float) -> float:
        changed = parameters.replace(scheduler_ns=scheduler_ns)
        return sum(error(models[model], cell, changed) ** 2 for cell in fitted)

    # The loss has one valley: each predicted time never falls as the cost rises.
    low, high = RANGES["scheduler_ns"]
    while high - low > 1.0:
        third = (high - low) / 3
        if loss(low + third) <= loss(high - third):
            high -= third
        else:
            low += third
    return parameters.replace(scheduler_ns=(low + high) / 2)
