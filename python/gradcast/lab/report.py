"""The text report of ``gradcast dev lab train``."""

from tabulate import tabulate

from gradcast.lab.results import Table, VariantResult
from gradcast.lab.settings import Settings
from gradcast.lab.variants import COMPUTE
from gradcast.units import format_bandwidth, format_percent, format_size, format_time

# Above this share, processes wait for a core as much as for the network.
_CORES_TOO_BUSY = 0.9
_HEADERS = [
    "", "ms per step", "80 % of steps", "speed-up over\nbest DDP", "time /\nbound", "exposed\nms", "blocks",
    "predicted\nms", "replayed\nms", "cores\nbusy", "MB out of a host\n(x gradients)", "difference\nto ddp",
]  # fmt: skip


def describe_network(settings: Settings) -> str:
    late = f" and {format_time(settings.latency_s * 1e9)}" if settings.latency_s > 0 else ""
    return f"{describe_links(settings.rates_bits_per_s, settings.ranks_per_host)}{late}"


def describe_links(rates_bits_per_s: tuple[float, ...], ranks_per_host: int) -> str:
    different = dict.fromkeys(rates_bits_per_s)
    shown = rates_bits_per_s if len(different) > 1 else different
    ranks = "" if ranks_per_host == 1 else f" of {ranks_per_host} ranks"
    return f"{len(rates_bits_per_s)} hosts{ranks} with links of {', '.join(map(format_bandwidth, shown))}"


def describe_model(settings: Settings, parameter_bytes: int) -> str:
    size = format_size(parameter_bytes)
    if not settings.stand_in:
        return f"{settings.model} ({size} of gradients)"
    return f"timed stand-in for {settings.model} on an accelerator ({size} of gradients)"


def report(table: Table, settings: Settings, parameter_bytes: int) -> str:
    cells = [_cells(row, parameter_bytes) for row in table.rows]
    text = tabulate(cells, _HEADERS, tablefmt="simple", stralign="right", colalign=("left",), disable_numparse=True)
    counted = settings.rounds * (settings.steps - 1)
    best, hook = table.bounds["overlap"], table.bounds["hook"]
    notes = (
        f"{describe_model(settings, parameter_bytes)}, {describe_network(settings)}.\n"
        f"ms per step: the median of {counted} steps on rank 0, from {settings.rounds} rounds of all in turns.\n"
        "exposed: what communication adds to the step of alone, which sends nothing. blocks: operations of a step;\n"
        "DDP's are buckets. predicted: before these steps, from the profile and the link that gradcast measured then.\n"
        "replayed: by the same model, with the compute and the network time of these steps. cores busy: share of this\n"
        "machine, which runs all hosts. out of a host: in a step, by the counter of its interface, headers included.\n"
        "difference: largest relative difference of a parameter on any rank.\n"
        f"bound: no schedule can take less than {best.best_ns / 1e6:.1f} ms on this link ("
        f"{best.plain_ns / 1e6:.1f} ms if only one\noperation paid its start-up cost); without overlap with "
        f"the next forward pass, as in DDP, none less than {hook.best_ns / 1e6:.1f} ms."
    )
    if settings.scale_size != 1:
        factor = f"{settings.scale_size:g}"
        notes += f"\nDDP's bucket sizes are scaled by {factor} like the tensors: ddp:25 has as many as at full size."
    return f"\n{text}\n\n{notes}\n\n{_verdict(table, settings)}"


def _cells(row: VariantResult, parameter_bytes: int) -> list[str]:
    alone = row.name == COMPUTE
    sent = max(row.sent_bytes)
    return [
        row.name,
        f"{row.step_ms:.1f}",
        f"{row.low_ms:.0f} to {row.high_ms:.0f}",
        "-" if alone else f"{row.ratio_to_best_ddp:.2f} x",
        "-" if alone else f"{row.ratio_to_bound:.3f}",
        "-" if row.exposed_ms is None else f"{row.exposed_ms:.1f}",
        "-" if row.blocks is None else str(row.blocks),
        _with_error(row.predicted_ms, row.prediction_error),
        _with_error(row.replayed_ms, row.replay_error),
        "-" if row.cores_busy is None else format_percent(row.cores_busy),
        "-" if alone else f"{sent / 1e6:.2f} ({sent / parameter_bytes:.2f} x)",
        "-" if row.difference is None else f"{row.difference:.1g}",
    ]


def _with_error(ms: float | None, error: float | None) -> str:
    return "-" if ms is None or error is None else f"{ms:.1f} ({error:+.1%})"


def _verdict(table: Table, settings: Settings) -> str:
    sentences = []
    by_gradcast = [
        row for row in table.rows if row.mode in ("hook", "overlap") and ":" not in row.name and not row.lossy
    ]
    if by_gradcast:
        best, ddp = min(by_gradcast, key=lambda row: row.step_ms), table.best_ddp
        above = best.step_ms / table.bound_ms - 1
        away = f"{above:.1%} above the bound" if above >= 0 else f"{-above:.1%} below the bound, within its accuracy"
        sentences.append(
            f"gradcast's {best.name} takes {best.step_ms:.1f} ms per step, {away}; the best DDP ({ddp.name}) takes "
            f"{ddp.step_ms:.1f} ms: {best.ratio_to_best_ddp:.2f} x."
        )
    sentences += [f"{row.name} runs as DDP: the DDP baseline is as fast here." for row in table.rows if row.fell_back]
    sentences.append(_equality(table))
    sentences += _crowded(table, settings)
    if settings.stand_in:
        sentences.append(
            "The stand-in waits where an accelerator would compute: this compares schedules, not accelerators."
        )
    return "\n".join(sentences)


def _crowded(table: Table, settings: Settings) -> list[str]:
    busy = {row.name: row.cores_busy for row in table.rows if row.cores_busy is not None}
    if max(busy.values(), default=0.0) <= _CORES_TOO_BUSY:
        return []
    if settings.stand_in and busy.get(COMPUTE, 0.0) > _CORES_TOO_BUSY:
        return [
            "The cores were busy even while nothing was sent, so something else runs here, and these times say little."
        ]
    name = max(busy, key=lambda name: busy[name])
    return [
        f"With {name} the cores were busy for {format_percent(busy[name])} of the time, so it did not only wait "
        "for the network; take fewer hosts, smaller tensors or longer passes."
    ]


def _equality(table: Table) -> str:
    compared = table.compared
    if table.wrong:
        return f"The parameters of {', '.join(row.name for row in table.wrong)} are NOT those of ddp."
    if not compared:
        return "Only ddp was trained, so there are no parameters to compare."
    lossy = [row.name for row in table.rows if row.lossy]
    names = f"all variants but {', '.join(lossy)}, which round gradients," if lossy else "all variants"
    if all(row.difference == 0 for row in compared):
        return f"The parameters of {names} equal ddp's bit for bit."
    return f"The parameters of {names} equal ddp's up to the rounding of sums."
