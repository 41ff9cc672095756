"""Quantities as people write and read them: ``10gbit``, ``25MiB``, ``3.2 ms``, ``50us``, ``10%``.

Times, bandwidths and sizes need a unit, since a bare number easily hides a factor of 8 or 1000. The parsers return
nanoseconds (durations: seconds), bytes and bits per second.
"""

import re

from gradcast.errors import Error

_TIME_NS = {"ns": 1.0, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9, "min": 60e9, "h": 3600e9, "d": 86400e9}
_PREFIX = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
# No sign, "nan" or "inf": no quantity here can use them.
_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?"
_QUANTITY = re.compile(rf"\s*({_NUMBER})\s*([^\d\s.].*?)?\s*", re.IGNORECASE | re.ASCII)
_BANDWIDTH = re.compile(r"([kmgt]?i?)(bits?|[bB])(/s|ps)?", re.IGNORECASE)
_SIZE = re.compile(r"([kmgt]?i?)b", re.IGNORECASE)
# No larger value makes sense; the file formats also end at 2^53 bytes and nanoseconds. Nor does a smaller one but 0.
_MAX = 2.0**53
_MIN = 1e-12
_QUOTED_MAX = 40


def quoted(text: str) -> str:
    """Returns the user's own words, for messages."""
    return f"'{text}'" if len(text) <= _QUOTED_MAX else f"'{text[:_QUOTED_MAX]}…'"


def _split(text: str, what: str, example: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None and _QUANTITY.fullmatch(text.strip().removeprefix("-")):
        raise Error(f"{quoted(text)} is negative, which no {what} here can be; write for instance {example}")
    if match is None:
        raise Error(f"{quoted(text)} is not a {what}; write for instance {example}")
    return float(match[1]), match[2] or ""


def _checked(value: float, text: str, what: str) -> float:
    if value > _MAX:
        raise Error(f"{quoted(text)} is too large for a {what}; write a smaller one")
    if 0 < value < _MIN:
        raise Error(f"{quoted(text)} is too small for a {what}; write a larger one")
    return value


def _time_ns(text: str, example: str) -> float:
    number, unit = _split(text, "time", example)
    if unit.lower() not in _TIME_NS:
        raise Error(
            f"{quoted(text)} has no known unit of time; write ns, us, ms, s, min, h or d, for instance {example}"
        )
    return number * _TIME_NS[unit.lower()]


def parse_time_ns(text: str) -> float:
    return _checked(_time_ns(text, "50us or 3.2ms"), text, "time")


def parse_positive_time_ns(text: str) -> float:
    time_ns = parse_time_ns(text)
    if time_ns < 1:
        raise Error(f"{quoted(text)} is no time; write a longer one, for instance 50us or 3.2ms")
    return time_ns


def parse_duration_s(text: str) -> float:
    """Parses a time that may be longer than the 104 days that ``parse_time_ns`` allows."""
    return _checked(_time_ns(text, "90s or 4h") / 1e9, text, "time")


def parse_positive_duration_s(text: str) -> float:
    duration_s = parse_duration_s(text)
    if duration_s == 0:
        raise Error("the time is 0; write a longer one, for instance 90s or 4h")
    return duration_s


def parse_bandwidth_bits_per_s(text: str) -> float:
    """Parses ``10gbit``, ``10Gb/s``, ``10gbps`` (all equal) or ``1.25GB/s`` (a capital B means bytes)."""
    number, unit = _split(text, "bandwidth", "10gbit or 1.25GB/s")
    match = _BANDWIDTH.fullmatch(unit)
    if match is None or match[1].lower() not in _PREFIX:
        raise Error(f"{quoted(text)} has no known unit of bandwidth; write for instance 10gbit, 500mbit or 1.25GB/s")
    bits = 8 if match[2] == "B" else 1
    if bits == 8 and not match[3]:
        raise Error(
            f"{quoted(text)} is a size, not a bandwidth; write {text}/s for bytes per second, or 10gbit for bits"
        )
    if number == 0:
        raise Error("the bandwidth is 0; write for instance 10gbit")
    return _checked(number * _PREFIX[match[1].lower()] * bits, text, "bandwidth")


def parse_size_bytes(text: str) -> int:
    number, unit = _split(text, "size", "25MiB or 4MB")
    match = _SIZE.fullmatch(unit)
    if match is None or match[1].lower() not in _PREFIX:
        raise Error(f"{quoted(text)} has no known unit of size; write for instance 25MiB, 4MB or 512B")
    return round(_checked(number * _PREFIX[match[1].lower()], text, "size"))


def parse_fraction(text: str) -> float:
    """Parses ``10%`` or ``0.1`` as 0.1. The result is at least 0 and below 1."""
    number, unit = _split(text, "share", "10%")
    if unit not in ("", "%"):
        raise Error(f"{quoted(text)} is not a share; write for instance 10%")
    fraction = number / 100 if unit else number
    if fraction >= 1:
        raise Error(f"{quoted(text)} is 100 % or more; write a share below that, for instance 10%")
    return fraction


def parse_positive(text: str) -> float:
    number, unit = _split(text, "number", "0.5")
    if unit or number == 0:
        raise Error(f"{quoted(text)} is not a number above 0; write for instance 0.5")
    return _checked(number, text, "number")


def parse_parameter(text: str) -> tuple[str, float]:
    """Parses a policy's parameter, ``name=value``, such as ``cap_bytes=25MiB``. The name ends with the unit."""
    name, equals, value = text.partition("=")
    name = name.strip()
    if not equals or not name or not value.strip():
        raise Error(f"{quoted(text)} is not a parameter; write name=value, for instance cap_bytes=25MiB")
    if name.endswith("_bytes"):
        return name, float(parse_size_bytes(value))
    if name.endswith("_ns"):
        return name, parse_time_ns(value)
    number, unit = _split(value, "number", f"{name}=4")
    if unit not in ("", "%"):
        raise Error(f"{quoted(text)}: {name} has no unit; write a number alone")
    return name, _checked(number / 100 if unit else number, text, "parameter")


def _digits(value: float) -> str:
    """Returns three significant digits, or all digits of a larger whole number."""
    if value == 0:
        return "0"
    if value >= 99.95:
        return f"{value:.0f}"
    if value >= 9.995:
        return f"{value:.1f}".removesuffix(".0")
    return f"{value:.3g}"


def _format(value: float, steps: list[tuple[float, str]]) -> str:
    # 999.6 us rounds to 1000 us, so it is written in the next larger unit.
    size, unit = next((step for step in steps if value >= 0.9995 * step[0]), steps[-1])
    return f"{_digits(value / size)} {unit}"


def format_time(time_ns: float) -> str:
    return _format(time_ns, [(1e9, "s"), (1e6, "ms"), (1e3, "us"), (1.0, "ns")])


def format_ms(time_ns: float) -> str:
    """Formats in milliseconds, for columns of times."""
    return f"{_digits(time_ns / 1e6)} ms"


def format_size(size_bytes: float) -> str:
    return _format(size_bytes, [(1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")])


def format_bandwidth(bits_per_s: float) -> str:
    return _format(bits_per_s, [(1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"), (1.0, "bit/s")])


def format_percent(fraction: float) -> str:
    percent = 100 * fraction
    return f"{percent:.0f} %" if percent >= 9.95 else f"{percent:.1f} %"
