"""The results of the network check: the cost of all-reduces, and each pair of hosts."""

from typing import Any

from gradcast.diagnosis.report.html import axes, components, values
from gradcast.diagnosis.report.html.axes import Scale
from gradcast.diagnosis.report.html.markup import Markup, element
from gradcast.units import format_size

_HEIGHT = 260.0


def draw(run: dict[str, Any]) -> list[Markup | None]:
    network = run["network"]
    findings = [element("li", each["sentence"]) for each in network.get("findings") or []]
    return [
        element("ul", findings, class_="findings") if findings else None,
        _cost(network["collective"]),
        _pairs(network.get("pairs")),
    ]


def _cost(collective: dict[str, Any]) -> Markup:
    samples = sorted(collective["samples"], key=lambda sample: sample["bytes"])
    sizes, times = [sample["bytes"] for sample in samples], [sample["ms"] for sample in samples]
    x = Scale(min(sizes), max(sizes), log=True)
    y = Scale(min(times) / 1.3, max(times) * 1.3, _HEIGHT - 46, 14, log=True)
    powers = [10.0**power for power in range(-4, 16)]
    across = [(size, format_size(size)) for size in powers if min(sizes) * 0.9 <= size <= max(sizes) * 1.1]
    upwards = [(ms, f"{ms:g} ms") for ms in powers if min(times) / 1.3 <= ms <= max(times) * 1.3]
    drawn = axes.frame(x, y, across, upwards, "size")
    op = str(collective.get("op", "all_reduce")).replace("_", "-")
    caption = f"Time of an {op} over its size."
    if fit := _fit(collective):
        drawn.append(axes.curve([(x(size), y(fit[0] / 1e3 + fit[1] * size / 1e6)) for size in sizes], "curve"))
        caption += f" The line is the fit: {fit[0]:.3g} us + {fit[1]:.3g} ms per MB."
    rows = [[format_size(size), values.ms(ms)] for size, ms in zip(sizes, times, strict=True)]
    for size, ms, row in zip(sizes, times, rows, strict=True):
        drawn.append(axes.dot(x(size), y(ms), ": ".join(row), "measured"))
    if collective.get("bus_gbit_per_s") is not None:
        caption += f" Bus bandwidth: {values.rate(collective['bus_gbit_per_s'])}."
    label = f"Time of an {op} over its size, both axes logarithmic, with the fitted cost."
    table = components.table(["size", "time"], rows, "rr", f"Measured {op}s")
    return element("div", axes.figure(_HEIGHT, label, caption, drawn), table)


def _fit(fields: dict[str, Any]) -> tuple[float, float] | None:
    """Returns us and ns per byte, or None if one of them is unknown."""
    fit = fields.get("alpha_us"), fields.get("beta_ns_per_byte")
    return None if None in fit else fit


def _pairs(pairs: list[dict[str, Any]] | None) -> Markup | None:
    if not pairs:
        return None
    rates = ("tcp_gbit_per_s", "tcp_streams_gbit_per_s", "gloo_gbit_per_s")
    rows = [
        [
            f"{pair['a']} and {pair['b']}",
            _us(pair.get("latency_us")),
            *(values.rate(pair.get(key)) for key in rates),
            f"{_us(fit[0])} + {fit[1]:.3g} ms per MB" if (fit := _fit(pair)) else values.UNKNOWN,
        ]
        for pair in pairs
    ]
    headers = ["ranks", "latency", "TCP", f"TCP, {pairs[0].get('streams', 'several')} streams", "Gloo", "Gloo message"]
    return components.table(headers, rows, "lrrrrr", "Pairs of ranks")


def _us(value: float | None) -> str:
    return values.UNKNOWN if value is None else f"{value:.0f} us"
