"""The whole page: head, sections in reading order, and foot."""

from typing import Any

from gradcast.diagnosis.report.html import (
    bandwidth,
    headline,
    heat_map,
    network,
    plans,
    prediction,
    scaling,
    step_time,
    timeline,
)
from gradcast.diagnosis.report.html.markup import Markup, element
from gradcast.diagnosis.report.html.stylesheet import CSS
from gradcast.diagnosis.runs import RESULT

# Nothing may be fetched, whatever a run calls its tensors: the page must not depend on a network.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def build(run: dict[str, Any]) -> str:
    """Returns the page for the fields of a doctor.json."""
    sections = [
        headline.actions(run),
        headline.lint(run),
        step_time.draw(run),
        timeline.draw(run),
        prediction.draw(run),
        heat_map.draw(run),
        bandwidth.draw(run),
        plans.draw(run),
        scaling.draw(run),
        network.draw(run),
    ]
    body = element("body", headline.top(run), element("main", sections), _foot(run))
    return "<!DOCTYPE html>\n" + element("html", _head(run), body, lang="en") + "\n"


def _head(run: dict[str, Any]) -> Markup:
    model = (run.get("model") or {}).get("name") or "training"
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{model} on {run['world_size']} workers: gradcast doctor"),
        element("style", Markup(CSS)),
    )


def _foot(run: dict[str, Any]) -> Markup:
    facts = [f"gradcast {run.get('gradcast') or ''}".strip()]
    if steps := run.get("steps"):
        kinds = {"left_out": "warm-up", "normal": "ordinary", "probe": "probe"}
        facts.append(", ".join(f"{steps.get(key, 0)} {kind} steps" for key, kind in kinds.items()))
    trace = "; open the trace beside it in ui.perfetto.dev" if run.get("timeline") else ""
    facts.append(f"all numbers are in {RESULT}{trace}")
    return element("footer", element("p", " · ".join(facts)))
