"""Formats values for the page: always with a unit, and a dash for unknown values."""

from gradcast.units import format_bandwidth, format_percent

UNKNOWN = "–"  # noqa: RUF001


def ms(value: float | None, unit: bool = True) -> str:
    """Formats with about three significant digits: 412 ms, 41.2 ms, 4.12 ms."""
    return UNKNOWN if value is None else _rounded(value, value) + (" ms" if unit else "")


def ms_range(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return UNKNOWN
    larger = max(low, high, key=abs)
    return f"{_rounded(low, larger)} to {_rounded(high, larger)}"


def _rounded(value: float, like: float) -> str:
    """Formats with the decimals of a number of the size of ``like``."""
    digits = 0 if abs(like) >= 100 else 1 if abs(like) >= 10 else 2
    text = f"{value:.{digits}f}"
    return text if float(text) else "0"  # never "-0.00"


def percent(fraction: float | None) -> str:
    """Formats a fraction, which may be negative: parts of a step may add up to more than the step."""
    if fraction is None:
        return UNKNOWN
    text = format_percent(abs(fraction))
    return f"-{text}" if fraction < 0 and float(text.split()[0]) else text


def rate(gbit_per_s: float | None) -> str:
    return UNKNOWN if gbit_per_s is None else format_bandwidth(1e9 * gbit_per_s)


def times(factor: float) -> str:
    return f"{factor:.2f}×"  # noqa: RUF001


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
