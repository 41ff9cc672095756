"""The price file of ``gradcast advise``: machines, prices and connections (data/prices_sample.toml explains them)."""

import dataclasses
import datetime
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from gradcast.disk import read_text
from gradcast.documents import (
    Reader,
    Wrong,
    checked,
    examined,
    list_of,
    number,
    parsed,
    record,
    refuse,
    shown,
    that,
    truth,
    version,
    whole,
)
from gradcast.errors import Error, first_line
from gradcast.units import parse_bandwidth_bits_per_s, parse_duration_s, parse_time_ns

_MACHINES_MAX = 100_000


def _text(value: Any) -> str:
    # TOML has dates of its own.
    if not isinstance(value, (str, datetime.date)) or not str(value):
        refuse(value, "a text that is not empty")
    return str(value)


def _quantity(parse: Callable[[str], float], example: str) -> Reader:
    def convert(value: Any) -> float:
        if not isinstance(value, str):
            refuse(value, f"a text with a unit, for instance {example},")
        try:
            return parse(value)
        except Error as error:
            raise Wrong(f"is wrong: {error}") from None

    return convert


_bandwidth = _quantity(parse_bandwidth_bits_per_s, '"10gbit"')
_time_ns = _quantity(parse_time_ns, '"50us"')
_duration_s = _quantity(parse_duration_s, '"30min"')


def _spot(value: Any) -> "Spot":
    spot: Spot = _reader(Spot)(value)
    if spot.checkpoint_interval_s < 1:
        raise Wrong("is shorter than a second; write for instance 30min").inside("checkpoint_interval")
    if spot.elastic and spot.revocations_per_hour == 0:
        raise Wrong("needs a lifetime; give revocations_per_hour, 1 over the mean lifetime in hours").inside("elastic")
    return spot


def _field(name: str, reader: Reader, *default: Any) -> Any:
    """A field of a table: its name in the file, its reader, and its default unless it is required."""
    given = {"default": default[0]} if default else {}
    return dataclasses.field(**given, metadata={"name": name, "reader": reader})


_PRICE = number(0, 1e9)
_REVOCATIONS = number(1e-9, 3600, or_zero=True)  # 1 over the mean lifetime in hours


@dataclass(frozen=True)
class Spot:
    price_per_hour: float = _field("price_per_hour", _PRICE)  # of one machine
    revocations_per_hour: float = _field("revocations_per_hour", _REVOCATIONS)  # of one machine
    checkpoint_interval_s: float = _field("checkpoint_interval", _duration_s)  # training time between two checkpoints
    checkpoint_cost_s: float = _field("checkpoint_cost", _duration_s)  # training stops while a checkpoint is written
    restart_s: float = _field("restart_time", _duration_s)  # from a revocation until training goes on
    # Of the Weibull distribution of lifetimes; above 1, older machines are revoked more often.
    shape: float = _field("weibull_shape", number(0.1, 100), 1.0)
    elastic: bool = _field("elastic", truth, False)  # the training goes on with the machines that are left


@dataclass(frozen=True)
class Machine:
    name: str = _field("name", _text)
    workers: int = _field("workers", whole(1, 1024))
    price_per_hour: float = _field("price_per_hour", _PRICE)
    speed: float = _field("speed", number(1e-6, 1e6), 1.0)  # of one worker, compared with the one that was profiled
    bandwidth_bits_per_s: float | None = _field("bandwidth", _bandwidth, None)  # of the machine's connection
    latency_ns: float = _field("latency", _time_ns, 50e3)  # of a hop between machines
    intra_bandwidth_bits_per_s: float | None = _field("intra_bandwidth", _bandwidth, None)  # of one worker, inside
    intra_latency_ns: float = _field("intra_latency", _time_ns, 5e3)
    max_machines: int = _field("max_machines", whole(1, _MACHINES_MAX), 64)
    spot: Spot | None = _field("spot", _spot, None)  # noqa: RUF009


def _machine(value: Any) -> Machine:
    machine: Machine = _reader(Machine)(value)
    if machine.max_machines > 1 and machine.bandwidth_bits_per_s is None:
        raise Wrong("is missing; give it, or max_machines = 1").inside("bandwidth")
    if machine.workers > 1 and machine.intra_bandwidth_bits_per_s is None:
        others = f"the connection of each of the {machine.workers} workers to the others"
        raise Wrong(f"is missing: {others}").inside("intra_bandwidth")
    return machine


def _check_names(machines: list[Machine]) -> None:
    names = [machine.name for machine in machines]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise (
                Wrong(f"is {shown(name)}, as that of machine[{names.index(name)}]; give each its own")
                .inside("name")
                .inside(index)
            )


@dataclass(frozen=True)
class _File:
    version: int = _field("version", version(1))
    date: str = _field("date", _text)
    currency: str = _field("currency", _text)
    machine: list[Machine] = _field("machine", that(list_of(_machine, least=1), _check_names))  # noqa: RUF009
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
    text = read_text(path, "price file")
    value = parsed(text, path) if Path(path).suffix.lower() == ".json" else _parsed_toml(text, path)
    if not isinstance(value, dict):
        raise Error(f"{path}: a price file is an object with the field machine; see the bundled sample {sample_path()}")
    file: _File = checked(value, _reader(_File), path)
    return Prices(path, file.date, file.currency, tuple(file.machine))


def _parsed_toml(text: str, path: str) -> Any:
    toml = _toml()
    try:
        value = toml.loads(text)
    except RecursionError:
        raise Error(f"{path} is not valid TOML: it nests too deeply") from None
    except ValueError as error:  # also of a number with very many digits
        raise Error(f"{path} is not valid TOML: {first_line(error)}") from None
    return examined(value, path)


def _toml() -> Any:
    for name in ("tomllib", "tomli"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    raise Error(
        "reading TOML needs Python 3.11 or newer, or `pip install tomli`; or write the prices as .json", "environment"
    )


def _reader(cls: Any) -> Reader:
    """Reads a table as a ``cls``."""
    fields = {field.metadata["name"]: field for field in dataclasses.fields(cls)}
    readers = {name: field.metadata["reader"] for name, field in fields.items()}
    required = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
    read = record(
        {name: each for name, each in readers.items() if name in required},
        {name: each for name, each in readers.items() if name not in required},
        others=False,
    )

    def read_table(value: Any) -> Any:
        found = read(value)
        return cls(**{fields[name].name: each for name, each in found.items() if each is not None})

    return read_table
