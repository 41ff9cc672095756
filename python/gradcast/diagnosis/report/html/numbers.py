"""Numbers as the page writes them: always with a unit, a dash for what is not known."""

UNKNOWN = "–"  # noqa: RUF001


def ms(value: float | None, unit: bool = True) -> str:
    """Three digits at most behind which nothing is certain: 412 ms, 41.2 ms, 4.12 ms."""
    if value is None:
        return UNKNOWN
    text = _rounded(value, value)
    return f"{text} ms" if unit else text


def ms_range(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return UNKNOWN
    larger = max(low, high, key=abs)
    return f"{_rounded(low, larger)} to {_rounded(high, larger)}"


def _rounded(value: float, like: float) -> str:
    """With as many digits behind the point as a number of the size of ``like`` has."""
    digits = 0 if abs(like) >= 100 else 1 if abs(like) >= 10 else 2
    text = f"{value:.{digits}f}"
    return text if float(text) else "0"  # never "-0.00"


def percent(fraction: float | None) -> str:
    if fraction is None:
        return UNKNOWN
    return f"{100 * fraction:.1f} %" if 0 < abs(fraction) < 0.0095 else f"{100 * fraction:.0f} %"


def size(size_bytes: float | None) -> str:
    if size_bytes is None:
        return UNKNOWN
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.3g} {unit}"
    return f"{size_bytes:.0f} B"


def rate(gbit_per_s: float | None) -> str:
    if gbit_per_s is None:
        return UNKNOWN
    return f"{gbit_per_s:.3g} Gbit/s" if gbit_per_s >= 0.1 else f"{1e3 * gbit_per_s:.3g} Mbit/s"


def times(factor: float | None) -> str:
    return UNKNOWN if factor is None else f"{factor:.2f}×"  # noqa: RUF001


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
