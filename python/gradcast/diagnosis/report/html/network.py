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
    bottom = _HEIGHT - 46
    x = Scale(max(min(sizes), 1), max(sizes), LEFT, WIDTH - RIGHT, log=True)
    y = Scale(max(min(times), 1e-4) / 1.3, max(times) * 1.3, bottom, 14, log=True)
    powers = [10.0**power for power in range(-4, 7) if min(times) / 1.3 <= 10.0**power <= max(times) * 1.3]
    made = axes.left_axis(y, powers, LEFT, WIDTH - RIGHT, [f"{value:g} ms" for value in powers])
    marks = [10.0**power for power in range(16) if min(sizes) * 0.9 <= 10.0**power <= max(sizes) * 1.1]
    made += [axes.text(x(size), bottom + 16, values.size(size), "middle", "tick") for size in marks]
    made.append(axes.text(WIDTH - RIGHT, bottom + 34, "size", "end", "tick"))
    if collective.get("beta_ns_per_byte") is not None and collective.get("alpha_us") is not None:
        made.append(axes.line([(x(size), y(_fitted(collective, size))) for size in sizes], "curve"))
    made += [
        axes.dot(x(size), y(ms), f"{values.size(size)}: {values.ms(ms)}", "measured")
        for size, ms in zip(sizes, times, strict=True)
    ]
    op = str(collective.get("op", "all_reduce")).replace("_", "-")
    table = components.table(
        ["size", "time"],
        [[values.size(size), values.ms(ms)] for size, ms in zip(sizes, times, strict=True)],
        "rr",
        f"Measured {op}s",
    )
    picture = axes.svg(_HEIGHT, f"Time of an {op} over its size, both axes logarithmic, with the fitted cost.", made)
    return element("div", components.figure(picture, _caption(collective, op)), table)


def _fitted(collective: dict[str, Any], size: float) -> float:
    return collective["alpha_us"] / 1e3 + collective["beta_ns_per_byte"] * size / 1e6


def _caption(collective: dict[str, Any], op: str) -> str:
    caption = f"Time of an {op} over its size."
    if collective.get("alpha_us") is not None and collective.get("beta_ns_per_byte") is not None:
        caption += (
            f" The line is the fit: {collective['alpha_us']:.3g} us + {collective['beta_ns_per_byte']:.3g} ms per MB."
        )
    if collective.get("bus_gbit_per_s") is not None:
        caption += f" Bus bandwidth: {values.rate(collective['bus_gbit_per_s'])}."
    return caption


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
    if pair.get("alpha_us") is None or pair.get("beta_ns_per_byte") is None:
        return values.UNKNOWN
    return f"{_us(pair['alpha_us'])} + {pair['beta_ns_per_byte']:.3g} ms per MB"


def _us(value: float | None) -> str:
    return values.UNKNOWN if value is None else f"{value:.0f} us"
