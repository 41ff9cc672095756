"""A diagnosis as text for the terminal. Pure: the fields of doctor.json in, text out."""

import textwrap
from typing import Any

from tabulate import tabulate

from gradcast.diagnosis.runs import PARTS, STAGE_WORDS, early_wait_sentences, helpful_actions

_CELL_WIDTH = 76


def text(result: dict[str, Any]) -> str:
    """Returns the verdict, then the measurements behind it, then the actions."""
    paragraphs = [_verdict(result), _parts(result), *_slow_rank(result), *_network(result), *_mistakes(result)]
    paragraphs += [*_actions(result), *_left_out(result)]
    return "\n\n".join(paragraphs) + "\n"


def _verdict(result: dict[str, Any]) -> str:
    verdict, floor_ms = result["verdict"], result["floor_ms"]
    words = f"{verdict['kind'].upper()}. {verdict['sentence']}"
    if floor_ms is not None and floor_ms < result["step"]["ms"]:
        words += f" On this network no schedule of all-reduces makes a step shorter than {floor_ms:.0f} ms."
    return words


def _table(rows: list[list[str]], headers: list[str]) -> str:
    """Returns a table whose first column is text and whose others are numbers."""
    align = ["left", *["right"] * (len(headers) - 1)]
    return tabulate(rows, headers, tablefmt="simple", disable_numparse=True, colalign=align)


def _parts(result: dict[str, Any]) -> str:
    step = result["step"]
    named = [(PARTS[part["key"]], part) for part in result["parts"]] + [("step", step)]
    rows = [
        [name, f"{each['ms']:.1f}", f"{each['low_ms']:.1f} to {each['high_ms']:.1f}", f"{each['ms'] / step['ms']:.0%}"]
        for name, each in named
    ]
    return _table(rows, [f"rank {result['view_rank']} of {result['world_size']}", "ms", "95 % interval", "of the step"])


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
        cost = f"{fit['alpha_us']:.0f} us + {fit['beta_ns_per_byte']:.2f} ms per MB"
        sentences.insert(0, f"On an idle network an all-reduce takes {cost}.")
    return ["Network: " + " ".join(sentences)] if sentences else []


def _mistakes(result: dict[str, Any]) -> list[str]:
    rows = [
        [_cell(each["title"], each["remedy"]), "" if each["cost_ms"] is None else f"{each['cost_ms']:.1f}"]
        for each in result["lint"]
    ]
    return [_table(rows, ["misconfiguration, and the fix", "cost, ms per step"])] if rows else []


def _actions(result: dict[str, Any]) -> list[str]:
    if result["hopeless"] is not None:
        return [result["hopeless"]]
    helpful, others = helpful_actions(result)
    rows = [
        [
            _cell(each["title"], each["how"]),
            f"{each['speedup']:.2f}x",
            f"{each['low']:.2f} to {each['high']:.2f}",
            f"{each['predicted_ms']:.0f}",
        ]
        for each in helpful
    ]
    table = _table(rows, ["what would help, and how", "speedup", "range", "ms per step"])
    return [table, *([others] if others else [])]


def _left_out(result: dict[str, Any]) -> list[str]:
    sentences = [
        (result.get("overlap_left_out"), "{}"),
        (result["not_tried"], "gradcast could not be tried here, so its modes are not predicted: {}"),
        (result.get("launching_untold"), "Launch overhead is included in forward, backward and update: {}"),
    ]  # some keys are missing in older runs
    left_out = [sentence.format(why) for why, sentence in sentences if why is not None]
    return left_out + early_wait_sentences(result)


def _cell(what: str, how: str) -> str:
    """Returns a table cell no wider than a terminal: a title, and how to do it below."""
    remedy = textwrap.wrap(how, _CELL_WIDTH, initial_indent="-> ", subsequent_indent="   ")
    return "\n".join([*textwrap.wrap(what, _CELL_WIDTH), *remedy])
