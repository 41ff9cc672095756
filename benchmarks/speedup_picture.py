"""Draws docs/images/speedup.png: measured speed-up over communication / compute, from benchmarks/results/lab.jsonl.

python -m benchmarks.speedup_picture docs/images/speedup.png
"""

import argparse
import json
from typing import Any

from matplotlib.lines import Line2D

from benchmarks.lab_grid import row_of
from benchmarks.pages import RESULTS, read_record
from gradcast import LinkModel
from gradcast.palette import CURVES, FAINT
from gradcast.plots.canvas import plt, save

_LARGE_EMBEDDING = ("bert_base", "gpt2")  # ready last, used first: less to hide


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output")
    output = parser.parse_args().output
    figure, axes = plt.subplots(figsize=(8, 4.4), layout="constrained")
    for cell in read_record(RESULTS / "lab.jsonl"):
        ratio = communication_ms(cell) / cell["compute_ms"]
        for mode, (colour, _) in _MODES.items():
            speed_up = row_of(cell, mode)["ratio_to_best_ddp"]
            axes.plot(ratio, speed_up, _marker(cell), color=colour, alpha=0.75, markersize=6)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xticks([0.5, 1, 2, 3], ["0.5", "1", "2", "3"])
    axes.minorticks_off()
    axes.set_xlabel("communication / compute: all gradients in one all-reduce, over forward and backward")
    axes.set_ylabel("speed-up over best-tuned DDP")
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(handles=_legend(), frameon=False, fontsize=9, loc="upper right")
    save(figure, output)


_MODES = {"hook": (CURVES[1], "hook mode"), "overlap": (CURVES[0], "overlap mode")}


def communication_ms(cell: dict[str, Any]) -> float:
    link = LinkModel.from_json(json.dumps(cell["link"]))
    return link.all_reduce.cost_ns(cell["parameter_bytes"]) / 1e6


def _marker(cell: dict[str, Any]) -> str:
    if not cell["stand_in"]:
        return "D"
    return "v" if cell["model"] in _LARGE_EMBEDDING else "o"


def _legend() -> list[Line2D]:
    def entry(marker: str, colour: str, label: str) -> Line2D:
        return Line2D([], [], marker=marker, color=colour, linestyle="", label=label)

    shapes = {"o": "6 models as stand-ins", "v": "BERT, GPT-2 as stand-ins", "D": "real models on busy cores"}
    colours = [entry("s", colour, label) for colour, label in reversed(_MODES.values())]
    return [*colours, *(entry(marker, FAINT, label) for marker, label in shapes.items())]


if __name__ == "__main__":
    main()
