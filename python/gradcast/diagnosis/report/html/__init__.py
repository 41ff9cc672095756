"""The report of ``gradcast doctor`` as one self-contained HTML page: no network, no scripts, no fonts.

``build`` is pure: the fields of doctor.json in, text out. ``headline``, ``step_time``, ``timeline``, ``prediction``,
``heat_map``, ``bandwidth``, ``plans``, ``scaling`` and ``network`` each draw the parts of a section. ``components`` are
shared parts of sections, ``axes`` of figures, ``values`` formats numbers, and ``markup`` makes escaped HTML and SVG.
"""

from collections.abc import Callable
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

__all__ = ["build"]

# Nothing may be fetched, whatever a run calls its tensors: the page must not depend on a network.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_UNTRIED = "No step followed a plan"
# In reading order: id, heading, what draws the section, and the field of doctor.json that it needs.
_SECTIONS = (
    ("actions", "What to do", headline.actions, "verdict"),
    ("lint", "What to fix", headline.lint, "lint"),
    ("step-time", "Where the time of a step goes", step_time.draw, "parts"),
    ("timeline", "One step on every rank", timeline.draw, "timeline"),
    ("prediction", "Predicted and measured", prediction.draw, "prediction"),
    ("ranks", "Comparison of ranks", heat_map.draw, "ranks"),
    ("bandwidth", "Bandwidth over time", bandwidth.draw, "bandwidth"),
    ("plans", "Plans", plans.draw, "plan_versions"),
    ("scaling", "Scaling", scaling.draw, "scaling"),
    ("network", "Network", network.draw, "network"),
)
# Text of a section if the run lacks its field. Other sections are omitted then.
_WITHOUT = {
    "timeline": f"{_UNTRIED} in this run, so there is no timeline.",
    "prediction": f"{_UNTRIED} in this run, so there is nothing to compare predictions with.",
    "bandwidth": f"{_UNTRIED} in this run, so its bandwidth was not measured.",
    "plans": "No plan was made in this run.",
    "scaling": "Scaling was not predicted in this run.",
    "network": "The network was not checked in this run.",
}


def build(run: dict[str, Any]) -> str:
    main = element("main", [_section(run, *each) for each in _SECTIONS])
    body = element("body", headline.top(run), main, _foot(run))
    return "<!DOCTYPE html>\n" + element("html", _head(run), body, lang="en") + "\n"


def _section(
    run: dict[str, Any], name: str, heading: str, draw: Callable[[dict[str, Any]], list[Markup]], needs: str
) -> Markup | None:
    without = _WITHOUT.get(name)
    if not run.get(needs) and without is None:
        return None
    if run.get(needs):
        inside = draw(run)
    else:
        if without.startswith(_UNTRIED) and run.get("not_tried"):
            without = f"{_UNTRIED}: {run['not_tried']}"
        inside = [element("p", without, class_="missing")]
    title = element("h2", heading, id=f"{name}-heading")
    return element("section", title, inside, id=name, aria_labelledby=f"{name}-heading")


def _head(run: dict[str, Any]) -> Markup:
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{headline.model_of(run)} on {run['world_size']} workers: gradcast doctor"),
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
