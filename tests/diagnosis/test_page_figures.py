"""The figures of the page, read back and compared with the run."""

import re

import pytest

from diagnosis import doctor_runs
from diagnosis.pages import parsed, section, svg, words_of
from gradcast.diagnosis.report import html as html_report
from gradcast.diagnosis.report import text as text_report
from gradcast.diagnosis.report.html import prediction


@pytest.fixture(scope="module")
def run_fields():
    return doctor_runs.doctor()


def shapes(node, tag, class_):
    return [each for each in svg(node, tag) if each.get("class") == class_]


def at(shape, *names):
    return tuple(float(shape.get(name)) for name in names)


def points(shape):
    return [tuple(float(value) for value in point.split(",")) for point in shape.get("points").split()]


def require_line(places, values):
    """Positions are proportional to values."""
    (low, start), (high, end) = (choose(zip(values, places, strict=True)) for choose in (min, max))
    assert places == pytest.approx([start + (value - low) / (high - low) * (end - start) for value in values], abs=0.1)


# --- What to do ---


def with_gains(run, *gains):
    """``gains`` are speedup, low and high of each action."""
    listed = [dict(zip(("speedup", "low", "high"), gain, strict=True), predicted_ms=500 / gain[0]) for gain in gains]
    texts = [{"key": f"a{place}", "title": f"action {place}", "how": "do()"} for place in range(len(gains))]
    return run | {"actions": [action | text for action, text in zip(listed, texts, strict=True)]}


def test_what_does_not_help_is_not_what_to_do(run_fields):
    run = with_gains(run_fields, (1.3, 1.2, 1.4), (1.01, 1.0, 1.02), (0.9, 0.8, 1.0))
    told = section(run, "actions")
    assert [words_of(row[0]) for row in told.find(".//tbody")] == ["action 0"]
    for text in (words_of(told), text_report.text(run)):
        assert "Would not help: action 1, action 2." in text


def test_where_nothing_helps_nothing_is_the_best(run_fields):
    run = with_gains(run_fields, (1.01, 1.0, 1.02)) | {"hopeless": "Nothing here will help, because of this."}
    told = section(run, "actions")
    assert words_of(told) == "What to do Nothing here will help, because of this. Would not help: action 0."
    assert "best action" not in html_report.build(run)
    assert "best action" in html_report.build(run_fields)


def test_no_gain_is_at_one_place_and_no_interval_leaves_its_figure(run_fields):
    gains = [(1.6, 0.1, 4e9), (1.3, 1.2, 1.4), (1.1, 0.93, 1.2)]
    figures = svg(section(with_gains(run_fields, *gains), "actions"), "svg")
    assert len({shapes(each, "line", "grid")[0].get("x1") for each in figures}) == 1
    ends = [at(shapes(each, "line", "interval")[0], "x1", "x2") for each in figures]
    assert ends[0] == (4, 146)
    dots = [at(shapes(each, "circle", "measured")[0], "cx")[0] for each in figures]
    none = at(shapes(figures[0], "line", "grid")[0], "x1")[0]
    require_line([none, *dots, *ends[1]], [1, 1.6, 1.3, 1.1, 1.2, 1.4])
    assert dots[0] - dots[2] > 30, "a wide interval does not make dots of the others"


def test_stages_are_named_for_people(run_fields):
    slow = {"rank": 2, "stage": "data_cpu", "layer": None, "ms": 24.0}
    text = words_of(parsed(run_fields | {"straggler": slow}).find("body"))
    assert "24.0 ms later, most of it in preparing data " in text
    assert "data_cpu" not in text


# --- Ranks ---


@pytest.mark.parametrize("name", ["step-time", "timeline"])
def test_of_many_ranks_the_telling_ones_are_shown(name):
    run = doctor_runs.doctor(world_size=40, view_rank=39)
    run["ranks"][37]["own_ms"] += 50
    run["straggler"] |= {"rank": 37}
    labels = [each.text for each in svg(section(run, name), "text") if (each.text or "").startswith("rank")]
    assert len(labels) == 16
    assert labels == sorted(labels, key=lambda label: int(label[5:]))
    assert "rank 37" in labels  # the slow one
    slowest = sorted(run["ranks"], key=lambda rank: -rank["own_ms"])[:15]
    if name == "step-time":
        assert set(labels) == {"rank 39"} | {f"rank {rank['rank']}" for rank in slowest}
    else:
        assert "24 more ranks" in words_of(section(run, name))


def test_a_slow_part_is_shaded_however_short_the_step(run_fields):
    def rank(number, backward, update):
        parts = {"forward": 1.0, "backward": backward, "update": update, "network": 5.0 * number}
        return {"rank": number, "host": "h", "node": 0, "step_ms": 9.0, "own_ms": 1 + backward + update, "parts": parts}

    run = run_fields | {"ranks": [rank(0, 2.0, 0.01), rank(1, 2.0, 0.02), rank(2, 2.9, 0.01)]}
    rows = [[cell.get("class") for cell in row] for row in section(run, "ranks").findall(".//tbody/tr")]
    # rank, host, own work, forward, backward, update (twice as long, but a 300th of the step), network
    usual = [None, None, "r", "r", "r", "r", "r"]
    assert rows == [usual, usual, [None, None, "r h4", "r", "r h5", "r", "r"]]


def test_steps_that_were_not_recorded_leave_the_table(run_fields):
    told = section(run_fields | {"normal_steps": []}, "ranks")
    assert "no times of single steps" in words_of(told)
    assert len(told.findall(".//tbody/tr")) == 4


# --- One step ---


def test_a_predicted_block_has_no_names(run_fields):
    tooltip = next(each[0].text for each in section(run_fields, "timeline").iter() if each.get("class") == "block")
    assert re.match(r"plan: block 0, [\d.]+ MB; ready", tooltip)


def test_the_trace_is_named_where_there_is_one(run_fields):
    assert "open the trace beside it in ui.perfetto.dev" in html_report.build(run_fields)
    assert "trace" not in html_report.build(run_fields | {"timeline": []}).split("<footer>")[1]


# --- Predicted and measured ---


def test_dots_have_predicted_across_and_measured_upwards():
    run = doctor_runs.doctor()
    for rank in run["timeline"]:
        for block in rank["blocks"]:
            block["finish_ms"] += 0.5 * (block["finish_ms"] - block["launch_ms"])
    told, blocks = section(run, "prediction"), prediction.block_pairs(run)
    x0, y0, x1, y1 = at(shapes(told, "line", "diagonal")[0], "x1", "y1", "x2", "y2")
    dots = [at(dot, "cx", "cy") for dot in shapes(told, "circle", "measured")]
    assert len(dots) == len(run["predicted_timeline"]["blocks"])
    # The band reaches 5 % above the diagonal and 5 % below.
    _, above, _, below = points(shapes(told, "polygon", "band")[0])
    slopes = [(y - y0) / (y1 - y0) / ((x - x0) / (x1 - x0)) for x, y in (above, below)]
    assert slopes == pytest.approx([1.05, 0.95], abs=1e-3)
    for (x, y), (_, predicted, measured) in zip(dots, blocks, strict=True):
        assert measured > 1.4 * predicted
        upwards, across = (y - y0) / (y1 - y0), (x - x0) / (x1 - x0)
        assert upwards / across == pytest.approx(measured / predicted, rel=0.01)


@pytest.mark.parametrize(("measured", "words"), [(412.0, "3.0 % longer"), (388.0, "3.0 % less")])
def test_the_sign_of_the_error_is_said(run_fields, measured, words):
    run = run_fields | {"prediction": {"mode": "overlap", "predicted_ms": 400.0, "measured_ms": measured}}
    assert f"The step took {words} than predicted." in words_of(section(run, "prediction"))


def test_a_ring_is_the_promise_and_a_dot_what_it_took(run_fields):
    told, versions = section(run_fields, "plans"), run_fields["plan_versions"]
    rings, dots = (shapes(told, "circle", class_) for class_ in ("promised", "measured"))
    values = [each[key] for key in ("predicted_ms", "measured_ms") for each in versions]
    require_line([at(each, "cx")[0] for each in (*rings, *dots)], values)
    assert at(dots[0], "cx") > at(rings[0], "cx"), "it took longer than promised"


# --- Network ---


def test_bandwidth_is_held_against_the_check():
    run = doctor_runs.doctor()
    run["network"]["collective"]["beta_ns_per_byte"] = 4.0  # a byte in 4 ns: 2 Gbit/s
    for number, point in enumerate(run["bandwidth"]):
        point["gbit_per_s"] = 0.05 if number == 0 else 1.2 if number == 1 else 1.0
    told = section(run, "bandwidth")
    assert "large all-reduces in the network check: 2 Gbit/s" in words_of(told)
    assert "1 Gbit/s in the median, from 50 Mbit/s to 1.2 Gbit/s. That is 50 % of what large" in words_of(told)
    heights = [y for _, y in points(shapes(told, "polyline", "curve")[0])]
    line = at(shapes(told, "line", "reference")[0], "y1", "y2")
    require_line([*heights, line[0]], [point["gbit_per_s"] for point in run["bandwidth"]] + [2.0])


def test_the_fitted_cost_runs_through_what_was_measured(run_fields):
    """Samples are within 5 % of the fit, which is less than a tenth of the height."""
    told = section(run_fields, "network")
    curve = points(shapes(told, "polyline", "curve")[0])
    dots = [at(each, "cx", "cy") for each in shapes(told, "circle", "measured")]
    assert [x for x, _ in curve] == pytest.approx([x for x, _ in dots], abs=0.1)
    assert [y for _, y in curve] == pytest.approx([y for _, y in dots], abs=5)


def test_what_a_pair_costs_is_told_where_it_is_known(run_fields):
    known, unknown = ({"a": 0, "b": b, "alpha_us": 120.4, "beta_ns_per_byte": 4.8 if b == 1 else None} for b in (1, 2))
    told = section(run_fields | {"network": run_fields["network"] | {"pairs": [known, unknown]}}, "network")
    rows = [[words_of(cell) for cell in row] for row in told.iter() if row.tag.endswith("tr")]
    costs = {row[0]: row[-1] for row in rows}
    assert costs["0 and 1"] == "120 us + 4.8 ms per MB"
    assert costs["0 and 2"] == "–"  # noqa: RUF001, as shown


# --- Scaling ---


@pytest.mark.parametrize(
    ("knee", "words"), [(16, "Beyond 16 workers"), (1, "Even a second worker gains little."), (None, "")]
)
def test_the_knee_stands_where_it_is(run_fields, knee, words):
    told = section(run_fields | {"scaling": run_fields["scaling"] | {"knee_workers": knee}}, "scaling")
    assert words in words_of(told)
    assert "Omitted: the costs of the network inside a node are not known." in words_of(told)
    tick = next(each for each in svg(told, "text") if each.text == "16")
    lines = [at(each, "x1", "x2") for each in shapes(told, "line", "reference")]
    assert lines == ([at(tick, "x") * 2] if knee == 16 else [])
    assert ("knee: 16" in words_of(told)) == (knee == 16)


def test_names_of_curves_that_end_together_lie_apart(run_fields):
    points = [point | {"efficiency": 0.5} for point in run_fields["scaling"]["points"]]
    told = section(run_fields | {"scaling": run_fields["scaling"] | {"points": points}}, "scaling")
    first, second = (at(each, "y")[0] for each in svg(told, "text") if each.text and each.text.startswith("measured, "))
    assert abs(first - second) == 16
