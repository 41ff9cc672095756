"""The results of the network check: the cost of all-reduces, and each pair of hosts."""

from typing import Any

from gradcast.diagnosis.report.html import axes, components, values
from gradcast.diagnosis.report.html.axes import LEFT, RIGHT, WIDTH, Scale
from gradcast.diagnosis.report.html.markup import Markup, element

_HEIGHT = 260.0


def draw(run: dict[str, Any]) -> Markup:
    heading = "Network"
    network = run.get("network")
    if not network:
        return components.missing("network", heading, "The network was not checked in this run.")
    findings = [element("li", each["sentence"]) for each in network.get("findings") or []]
    collective = network.get("collective") or {}
    return components.section(
        "network",
        heading,
        element("ul", findings, class_="findings") if findings else None,
        _cost(collective) if collective.get("samples") else None,
        _pairs(network.get("pairs") or []),
    )


def _cost(collective: dict[str, Any]) -> Markup:
    samples = sorted(collective["samples"], key=lambda sample: sample["bytes"])
    sizes, times = [sample["bytes"] for sample in samples], [sample["ms"] for sample in samples]
    x = Scale(max(min(sizes), 1), max(sizes), LEFT, WIDTH - RIGHT, log=True)
    y = Scale(max(min(times), 1e-4) / 1.3, max(times) * 1.3, _HEIGHT - 46, 14, log=True)
    powers = [10.0**power for power in range(-4, 16)]
    across = [(size, values.size(size)) for size in powers if max(1, min(sizes) * 0.9) <= size <= max(sizes) * 1.1]
    upwards = [(ms, f"{ms:g} ms") for ms in powers if min(times) / 1.3 <= ms <= max(times) * 1.3]
    made = axes.frame(x, y, across, upwards, "size")
    fit = _fit(collective)
    if fit is not None:
        made.append(axes.line([(x(size), y(fit[0] / 1e3 + fit[1] * size / 1e6)) for size in sizes], "curve"))
    rows = [[values.size(size), values.ms(ms)] for size, ms in zip(sizes, times, strict=True)]
    for size, ms, row in zip(sizes, times, rows, strict=True):
        made.append(axes.dot(x(size), y(ms), ": ".join(row), "measured"))
    op = str(collective.get("op", "all_reduce")).replace("_", "-")
    caption = f"Time of an {op} over its size."
    if fit is not None:
        caption += f" The line is the fit: {fit[0]:.3g} us + {fit[1]:.3g} ms per MB."
    if collective.get("bus_gbit_per_s") is not None:
        caption += f" Bus bandwidth: {values.rate(collective['bus_gbit_per_s'])}."
    picture = axes.svg(_HEIGHT, f"Time of an {op} over its size, both axes logarithmic, with the fitted cost.", made)
    table = components.table(["size", "time"], rows, "rr", f"Measured {op}s")
    return element("div", components.figure(picture, caption), table)


def _fit(fields: dict[str, Any]) -> tuple[float, float] | None:
    """Returns us and ns per byte, or None if one of them is unknown."""
    fit = fields.get("alpha_us"), fields.get("beta_ns_per_byte")
    return None if None in fit else fit


def _pairs(pairs: list[dict[str, Any]]) -> Markup | None:
    if not pairs:
        return None
    rows = [
        [f"{pair['a']} and {pair['b']}", _us(pair.get("latency_us")), values.rate(pair.get("tcp_gbit_per_s")),
         values.rate(pair.get("tcp_streams_gbit_per_s")), values.rate(pair.get("gloo_gbit_per_s")), _message(pair)]
        for pair in pairs
    ]  # fmt: skip
    streams = next((pair["streams"] for pair in pairs if pair.get("streams")), "several")
    headers = ["ranks", "latency", "TCP", f"TCP, {streams} streams", "Gloo", "Gloo message"]
    return components.table(headers, rows, "lrrrrr", "Pairs of ranks")


def _message(pair: dict[str, Any]) -> str:
    fit = _fit(pair)
    return values.UNKNOWN if fit is None else f"{_us(fit[0])} + {fit[1]:.3g} ms per MB"


def _us(value: float | None) -> str:
    return values.UNKNOWN if value is None else f"{value:.0f} us"
