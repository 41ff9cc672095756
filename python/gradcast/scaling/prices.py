"""The price file of ``gradcast advise``: machines, their prices and their connections (docs/guide/scaling.md)."""

import datetime
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

from gradcast.errors import Error
from gradcast.files import read_text
from gradcast.scaling.spot import Spot
from gradcast.units import parse_bandwidth_bits_per_s, parse_duration_s, parse_time_ns

VERSION = 1
_MACHINES_MAX = 100_000


@dataclass(frozen=True)
class Machine:
    name: str
    workers: int
    price_per_hour: float
    speed: float = 1.0  # of one worker, compared with the one that was profiled
    bandwidth_bits_per_s: float | None = None  # of the machine's connection
    latency_ns: float = 50e3  # of a hop between machines
    intra_bandwidth_bits_per_s: float | None = None  # of one worker's connection inside
    intra_latency_ns: float = 5e3
    max_machines: int = 64
    spot: Spot | None = None


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
    fields = _Fields(_read(path), f"{path}: ")
    fields.take("version", _whole(VERSION, VERSION))
    date, currency = fields.take("date", _text), fields.take("currency", _text)
    fields.take("source", _text, "")
    tables = fields.take("machine", _tables)
    fields.end()
    machines = tuple(_machine(_Fields(table, f"{path}: machine[{index}]: ")) for index, table in enumerate(tables))
    names = [machine.name for machine in machines]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise Error(f"{path}: two machines are called {twice}; give each its own name")
    return Prices(path, date, currency, machines)


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


class _Fields:
    """Takes the fields of a table one by one, and finds those that are left over."""

    def __init__(self, fields: dict[str, Any], where: str) -> None:
        self._fields = dict(fields)
        self._where = where

    def take(self, name: str, convert: Callable[[Any], Any], *default: Any) -> Any:
        if name not in self._fields:
            if default:
                return default[0]
            self.refuse(f"{name} is missing")
        try:
            return convert(self._fields.pop(name))
        except Error as error:
            self.refuse(f"{name}: {error}")

    def end(self) -> None:
        if self._fields:
            self.refuse(f"there is no field {next(iter(self._fields))}; docs/guide/scaling.md lists the fields")

    def refuse(self, sentence: str) -> NoReturn:
        raise Error(f"{self._where}{sentence}") from None


def _machine(fields: _Fields) -> Machine:
    machine = Machine(
        name=fields.take("name", _text),
        workers=fields.take("workers", _whole(1, 1024)),
        price_per_hour=fields.take("price_per_hour", _number(0)),
        speed=fields.take("speed", _number(1e-6), Machine.speed),
        bandwidth_bits_per_s=fields.take("bandwidth", _bandwidth, None),
        latency_ns=fields.take("latency", _time_ns, Machine.latency_ns),
        intra_bandwidth_bits_per_s=fields.take("intra_bandwidth", _bandwidth, None),
        intra_latency_ns=fields.take("intra_latency", _time_ns, Machine.intra_latency_ns),
        max_machines=fields.take("max_machines", _whole(1, _MACHINES_MAX), Machine.max_machines),
        spot=fields.take("spot", lambda table: _spot(_Fields(_table(table), "")), None),
    )
    fields.end()
    if machine.max_machines > 1 and machine.bandwidth_bits_per_s is None:
        fields.refuse("bandwidth is missing; give it, or max_machines = 1")
    if machine.workers > 1 and machine.intra_bandwidth_bits_per_s is None:
        fields.refuse(
            f"intra_bandwidth is missing: the connection of each of the {machine.workers} workers to the others"
        )
    return machine


def _spot(fields: _Fields) -> Spot:
    spot = Spot(
        price_per_hour=fields.take("price_per_hour", _number(0)),
        revocations_per_hour=fields.take("revocations_per_hour", _number(0)),
        checkpoint_interval_s=fields.take("checkpoint_interval", _duration_s),
        checkpoint_cost_s=fields.take("checkpoint_cost", _duration_s),
        restart_s=fields.take("restart_time", _duration_s),
        shape=fields.take("weibull_shape", _number(0.1), Spot.shape),
    )
    fields.end()
    if spot.checkpoint_interval_s == 0:
        fields.refuse("checkpoint_interval is 0; write for instance 30min")
    return spot


def _text(value: Any) -> str:
    # TOML has dates of its own.
    if not isinstance(value, (str, datetime.date)) or not str(value):
        raise Error(f"{value!r} is not text")
    return str(value)


def _table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Error("it must be a table")
    return value


def _tables(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value or not all(isinstance(entry, dict) for entry in value):
        raise Error("there must be at least one [[machine]]")
    return value


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


def _quantity(parse: Callable[[str], float], example: str) -> Callable[[Any], float]:
    def convert(value: Any) -> float:
        if not isinstance(value, str):
            raise Error(f"{value!r} is not text with a unit; write for instance {example}")
        return parse(value)

    return convert


_bandwidth = _quantity(parse_bandwidth_bits_per_s, '"10gbit"')
_time_ns = _quantity(parse_time_ns, '"50us"')
_duration_s = _quantity(parse_duration_s, '"30min"')
