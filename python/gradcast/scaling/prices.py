"""The price file of ``gradcast advise``: machines, prices and connections (data/prices_sample.toml explains them)."""

import dataclasses
import datetime
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from gradcast.errors import Error
from gradcast.files import read_text
from gradcast.units import parse_bandwidth_bits_per_s, parse_duration_s, parse_time_ns

_MACHINES_MAX = 100_000


def _text(value: Any) -> str:
    # TOML has dates of its own.
    if not isinstance(value, (str, datetime.date)) or not str(value):
        raise Error(f"{value!r} is not text")
    return str(value)


def _whole(low: int, high: int) -> Callable[[Any], int]:
    def convert(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise Error(f"{value!r} is not a whole number from {low} to {high}")
        return value

    return convert


def _number(low: float) -> Callable[[Any], float]:
    def convert(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value < float("inf"):
            raise Error(f"{value!r} is not a number of at least {low:g}")
        return float(value)

    return convert


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Error(f"{value!r} is neither true nor false")
    return value


def _quantity(parse: Callable[[str], float], example: str) -> Callable[[Any], float]:
    def convert(value: Any) -> float:
        if not isinstance(value, str):
            raise Error(f"{value!r} is not text with a unit; write for instance {example}")
        return parse(value)

    return convert


_bandwidth = _quantity(parse_bandwidth_bits_per_s, '"10gbit"')
_time_ns = _quantity(parse_time_ns, '"50us"')
_duration_s = _quantity(parse_duration_s, '"30min"')


def _tables(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value or not all(isinstance(entry, dict) for entry in value):
        raise Error("there must be at least one [[machine]]")
    return value


def _spot(value: Any) -> "Spot":
    if not isinstance(value, dict):
        raise Error("it must be a table")
    spot = _from_table(Spot, value, "")
    if spot.checkpoint_interval_s == 0:
        raise Error("checkpoint_interval is 0; write for instance 30min")
    if spot.elastic and spot.revocations_per_hour == 0:
        raise Error("elastic needs a lifetime; give revocations_per_hour, 1 over the mean lifetime in hours")
    return spot


def _field(name: str, convert: Callable[[Any], Any], *default: Any) -> Any:
    """A field of a table: its name in the file, what checks and converts it, and its default unless it is required."""
    given = {"default": default[0]} if default else {}
    return dataclasses.field(**given, metadata={"name": name, "convert": convert})


@dataclass(frozen=True)
class Spot:
    price_per_hour: float = _field("price_per_hour", _number(0))  # of one machine
    revocations_per_hour: float = _field("revocations_per_hour", _number(0))  # of one machine; 1 over its mean lifetime
    checkpoint_interval_s: float = _field("checkpoint_interval", _duration_s)  # training time between two checkpoints
    checkpoint_cost_s: float = _field("checkpoint_cost", _duration_s)  # training stops while a checkpoint is written
    restart_s: float = _field("restart_time", _duration_s)  # from a revocation until training goes on
    # Of the Weibull distribution of lifetimes; above 1, older machines are revoked more often.
    shape: float = _field("weibull_shape", _number(0.1), 1.0)
    elastic: bool = _field("elastic", _truth, False)  # the training goes on with the machines that are left


@dataclass(frozen=True)
class Machine:
    name: str = _field("name", _text)
    workers: int = _field("workers", _whole(1, 1024))
    price_per_hour: float = _field("price_per_hour", _number(0))
    speed: float = _field("speed", _number(1e-6), 1.0)  # of one worker, compared with the one that was profiled
    bandwidth_bits_per_s: float | None = _field("bandwidth", _bandwidth, None)  # of the machine's connection
    latency_ns: float = _field("latency", _time_ns, 50e3)  # of a hop between machines
    intra_bandwidth_bits_per_s: float | None = _field("intra_bandwidth", _bandwidth, None)  # of one worker, inside
    intra_latency_ns: float = _field("intra_latency", _time_ns, 5e3)
    max_machines: int = _field("max_machines", _whole(1, _MACHINES_MAX), 64)
    spot: Spot | None = _field("spot", _spot, None)  # noqa: RUF009


@dataclass(frozen=True)
class _File:
    version: int = _field("version", _whole(1, 1))
    date: str = _field("date", _text)
    currency: str = _field("currency", _text)
    machine: list[dict[str, Any]] = _field("machine", _tables)  # noqa: RUF009
    source: str = _field("source", _text, "")


@dataclass(frozen=True)
class Prices:
    path: str
    date: str
    currency: str
    machines: tuple[Machine, ...]


def sample_path() -> str:
    return str(resources.files("gradcast") / "data" / "prices_sample.toml")


def load_prices(path: str) -> Prices:
    """Loads a TOML file, or a JSON file with the same fields if its name ends with .json."""
    file = _from_table(_File, _read(path), f"{path}: ")
    machines = tuple(_machine(table, f"{path}: machine[{index}]: ") for index, table in enumerate(file.machine))
    names = [machine.name for machine in machines]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise Error(f"{path}: two machines are called {twice}; give each its own name")
    return Prices(path, file.date, file.currency, machines)


def _read(path: str) -> dict[str, Any]:
    text = read_text(path, "price file")
    is_json = Path(path).suffix.lower() == ".json"
    try:
        value = json.loads(text) if is_json else _toml().loads(text)
    except (ValueError, RecursionError) as error:  # both parsers' syntax errors are ValueErrors
        raise Error(f"{path} is not valid {'JSON' if is_json else 'TOML'}: {error}") from None
    if not isinstance(value, dict):
        raise Error(f"{path}: a price file is an object with the field machine; see the bundled sample {sample_path()}")
    return value


def _toml() -> Any:
    for name in ("tomllib", "tomli"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise Error(
        "reading TOML needs Python 3.11 or newer, or `pip install tomli`; or write the prices as .json", "environment"
    )


def _from_table(cls: Any, table: dict[str, Any], where: str) -> Any:
    """Makes a ``cls`` of the table's fields. ``where``: the table, for errors."""
    fields = {field.metadata["name"]: field for field in dataclasses.fields(cls)}
    values = {}
    for name, field in fields.items():
        if name in table:
            try:
                values[field.name] = field.metadata["convert"](table[name])
            except Error as error:
                raise Error(f"{where}{name}: {error}") from None
        elif field.default is dataclasses.MISSING:
            raise Error(f"{where}{name} is missing")
    if unknown := next((name for name in table if name not in fields), None):
        raise Error(f"{where}there is no field {unknown}; the fields are {', '.join(fields)}")
    return cls(**values)


def _machine(table: dict[str, Any], where: str) -> Machine:
    machine = _from_table(Machine, table, where)
    if machine.max_machines > 1 and machine.bandwidth_bits_per_s is None:
        raise Error(f"{where}bandwidth is missing; give it, or max_machines = 1")
    if machine.workers > 1 and machine.intra_bandwidth_bits_per_s is None:
        others = f"the connection of each of the {machine.workers} workers to the others"
        raise Error(f"{where}intra_bandwidth is missing: {others}")
    return machine
