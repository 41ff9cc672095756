"""A diagnosis for the terminal. Pure: doctor.json's fields in, text out."""

import textwrap
from typing import Any

from tabulate import tabulate

from gradcast.diagnosis.analyze.step_breakdown import STAGE_WORDS
from gradcast.diagnosis.runs import PARTS, actions_by_worth

_CELL_WIDTH = 76


def text(result: dict[str, Any]) -> str:
    """Verdict first, then what it rests on, then what to do."""
    paragraphs = [_verdict(result), _parts(result), *_slow_rank(result), *_network(result), *_mistakes(result)]
    paragraphs += [*_actions(result), *_overlap_left_out(result), *_not_tried(result), *_untold(result)]
    return "\n\n".join(paragraphs) + "\n"


def _verdict(result: dict[str, Any]) -> str:
    verdict, floor_ms = result["verdict"], result["floor_ms"]
    words = f"{verdict['kind'].upper()}. {verdict['sentence']}"
    if floor_ms is not None and floor_ms < result["step"]["ms"]:
        words += f" On this network no schedule of all-reduces gets a step below {floor_ms:.0f} ms."
    return words


def _parts(result: dict[str, Any]) -> str:
    step = result["step"]
    rows = [
        [
            PARTS[part["key"]],
            f"{part['ms']:.1f}",
            f"{part['low_ms']:.1f} to {part['high_ms']:.1f}",
            f"{part['ms'] / step['ms']:.0%}",
        ]
        for part in result["parts"]
    ]
    rows.append(["step", f"{step['ms']:.1f}", f"{step['low_ms']:.1f} to {step['high_ms']:.1f}", "100%"])
    headers = [f"rank {result['view_rank']} of {result['world_size']}", "ms", "95 % interval", "of the step"]
    return tabulate(rows, headers, tablefmt="simple", disable_numparse=True, colalign=["left", *["right"] * 3])


def _slow_rank(result: dict[str, Any]) -> list[str]:
    slow = result["straggler"]
    if slow is None:
        return []
    stage = STAGE_WORDS[slow["stage"]]
    layer = f", in {slow['layer']}" if slow["layer"] else ""
    host = result["hosts"][slow["rank"]]
    return [f"Rank {slow['rank']} on {host} takes {slow['ms']:.0f} ms longer, most of it for {stage}{layer}."]


def _network(result: dict[str, Any]) -> list[str]:
    network = result["network"]
    if network is None:
        return []
    fit = network["collective"]
    sentences = [finding["sentence"].rstrip(".") + "." for finding in network["findings"]]
    if fit is not None and fit["alpha_us"] is not None:
        sentences.insert(
            0,
            f"With nothing else under way an all-reduce takes {fit['alpha_us']:.0f} us and "
            f"{fit['beta_ns_per_byte']:.2f} ms per MB.",
        )
    return ["Network: " + " ".join(sentences)] if sentences else []


def _mistakes(result: dict[str, Any]) -> list[str]:
    rows = [
        [_told(each["title"], each["remedy"]), "" if each["cost_ms"] is None else f"{each['cost_ms']:.1f}"]
        for each in result["lint"]
    ]
    headers = ["found, and the remedy", "ms"]
    return (
        [tabulate(rows, headers, tablefmt="simple", disable_numparse=True, colalign=["left", "right"])] if rows else []
    )


def _not_tried(result: dict[str, Any]) -> list[str]:
    """What nothing is predicted of, and why."""
    why = result["not_tried"]
    return [] if why is None else [f"gradcast could not be tried here, so nothing is said about its modes: {why}"]


def _untold(result: dict[str, Any]) -> list[str]:
    why = result.get("launching_untold")  # no key in runs of before
    return [] if why is None else [f"Launching and the framework are in forward, backward and update here: {why}"]


def _overlap_left_out(result: dict[str, Any]) -> list[str]:
    why = result.get("overlap_left_out")  # no key in runs of before
    return [] if why is None else [why]


def _told(what: str, how: str) -> str:
    """A cell of a table that is no wider than a terminal: what it is, and below it how."""
    remedy = textwrap.wrap(how, _CELL_WIDTH, initial_indent="-> ", subsequent_indent="   ")
    return "\n".join([*textwrap.wrap(what, _CELL_WIDTH), *remedy])


def _actions(result: dict[str, Any]) -> list[str]:
    if result["hopeless"] is not None:
        return [result["hopeless"]]
    helpful, others = actions_by_worth(result)
    rows = [
        [
            _told(each["title"], each["how"]),
            f"{each['speedup']:.2f}x",
            f"{each['low']:.2f} to {each['high']:.2f}",
            f"{each['predicted_ms']:.0f}",
        ]
        for each in helpful
    ]
    table = tabulate(
        rows,
        ["what would help, and how", "speed-up", "range", "ms per step"],
        tablefmt="simple",
        disable_numparse=True,
        colalign=["left", "right", "right", "right"],
    )
    return [table, *([others] if others else [])]
