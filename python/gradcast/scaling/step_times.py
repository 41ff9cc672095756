"""Step time of a model on another machine, from the steps of other models there. Pure.

A step of one worker takes ``a + b · FLOPs + c · tensors``: a constant, the arithmetic, and a launch per tensor. None of
the three is negative, and relative errors count (least squares). The error is estimated by predicting each model from
the others.
"""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from gradcast.comparison.compare import compute_ns
from gradcast.disk import read_text
from gradcast.documents import number, table_number, table_rows, whole
from gradcast.errors import Error
from gradcast.files import load_profile

# With fewer, leaving one out leaves hardly more models than there are unknowns.
_MODELS_MIN = 5
_CODE = "invalid_option"


@dataclass(frozen=True)
class ModelStep:
    """``flops``: of a step. ``step_ms``: of one worker, without communication."""

    name: str
    flops: float
    tensors: int
    step_ms: float

    @property
    def _features(self) -> tuple[float, float, float]:
        return 1.0, self.flops, float(self.tensors)


@dataclass(frozen=True)
class Fit:
    """``coefficients``: ms, ms per FLOP, ms per tensor. ``errors``: relative, of each model from the others."""

    models: tuple[ModelStep, ...]
    coefficients: tuple[float, float, float]
    errors: tuple[float, ...]

    @property
    def mean_error(self) -> float:
        return statistics.mean(abs(error) for error in self.errors)

    @property
    def worst_error(self) -> float:
        return max(abs(error) for error in self.errors)

    def step_ms(self, flops: float, tensors: int) -> float:
        """Predicts a step. Raises Error outside of the models' range."""
        for what, value, known in (
            ("FLOPs", flops, [model.flops for model in self.models]),
            ("tensors", tensors, [model.tensors for model in self.models]),
        ):
            if not min(known) <= value <= max(known):
                raise Error(
                    f"a model of {value:g} {what} cannot be predicted from models of {min(known):g} to {max(known):g}; "
                    "add a model on the other side of it to the step times"
                )
        return _predicted(self.coefficients, ModelStep("", flops, tensors, 0))


def fit(models: Sequence[ModelStep]) -> Fit:
    """Raises Error for fewer than five models."""
    if len(models) < _MODELS_MIN:
        raise Error(
            f"step times of {_MODELS_MIN} models or more are needed to predict another; given are {len(models)}"
        )
    errors = []
    for index, model in enumerate(models):
        others = [*models[:index], *models[index + 1 :]]
        errors.append(_predicted(_coefficients(others), model) / model.step_ms - 1)
    return Fit(tuple(models), _coefficients(models), tuple(errors))


def load_step_times(path: str) -> list[ModelStep]:
    """A CSV file with the columns flops, and tensors and step_ms, or profile; and perhaps model, a name."""
    rows = table_rows(read_text(path, "step times"), path, ("flops",), _CODE)
    return [_model(row, where) for where, row in rows]


def _model(row: dict[str, str], where: str) -> ModelStep:
    name = row.get("model") or row.get("profile") or ""
    flops = table_number(row, "flops", number(1, 1e24), where, _CODE)
    if row.get("profile"):
        try:
            profile = load_profile(row["profile"])
        except Error as error:
            raise Error(f"{where}: {error}", error.code) from None
        return ModelStep(name, flops, len(profile.tensors), compute_ns(profile) / 1e6)
    tensors = table_number(row, "tensors", whole(1, 10**9), where, _CODE)
    return ModelStep(name, flops, tensors, table_number(row, "step_ms", number(1e-6, 1e10), where, _CODE))


def _predicted(coefficients: Sequence[float], model: ModelStep) -> float:
    return sum(each * feature for each, feature in zip(coefficients, model._features, strict=True))


def _coefficients(models: Sequence[ModelStep]) -> tuple[float, float, float]:
    """The best of the least squares over each choice of terms whose coefficients are not negative."""
    scaled = [[feature / model.step_ms for feature in model._features] for model in models]
    best, least = (0.0, 0.0, 0.0), float("inf")
    for count in (3, 2, 1):
        for terms in itertools.combinations(range(3), count):
            solved = _least_squares([[row[term] for term in terms] for row in scaled])
            if solved is None or min(solved) < 0:
                continue
            found = [0.0, 0.0, 0.0]
            for term, value in zip(terms, solved, strict=True):
                found[term] = value
            residual = sum((sum(a * b for a, b in zip(found, row, strict=True)) - 1) ** 2 for row in scaled)
            if residual < least:
                best, least = (found[0], found[1], found[2]), residual
    return best


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """The x that minimizes the sum of (row · x - 1)²; None if it is not determined."""
    count = len(rows[0])
    units = [max(abs(row[i]) for row in rows) for i in range(count)]  # so that pivots can be compared
    scaled = [[value / unit for value, unit in zip(row, units, strict=True)] for row in rows]
    table = [[sum(row[i] * row[j] for row in scaled) for j in range(count)] for i in range(count)]
    for i, line in enumerate(table):
        line.append(sum(row[i] for row in scaled))
    for i in range(count):
        pivot = max(range(i, count), key=lambda k: abs(table[k][i]))
        table[i], table[pivot] = table[pivot], table[i]
        if abs(table[i][i]) < 1e-9 * len(rows):
            return None
        for k in range(count):
            if k != i:
                factor = table[k][i] / table[i][i]
                table[k] = [a - factor * b for a, b in zip(table[k], table[i], strict=True)]
    return [table[i][count] / table[i][i] / units[i] for i in range(count)]
