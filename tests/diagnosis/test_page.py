"""`gradcast report run/`: the page has everything in the run, needs no network, and looks right in a browser."""

import html
import json
import re
import shutil
import subprocess

import pytest

from diagnosis import doctor_runs
from diagnosis.pages import parsed, part_of, section, svg, words_of
from gradcast.diagnosis import runs
from gradcast.diagnosis.report import html as html_report
from gradcast.diagnosis.report.html import axes, heat_map, prediction, scaling, values
from gradcast.diagnosis.report.html.markup import Markup, element
from gradcast.diagnosis.runs import PARTS
from gradcast.diagnosis.trace import files as trace_files
from gradcast.diagnosis.trace import merged as merged_trace
from gradcast.errors import Error
from gradcast.units import format_size

SECTIONS = [
    "actions", "lint", "step-time", "timeline", "prediction", "ranks", "bandwidth", "plans", "scaling", "network",
]  # fmt: skip


@pytest.fixture(scope="module")
def run_fields():
    return doctor_runs.doctor()


@pytest.fixture(scope="module")
def document(run_fields):
    return parsed(run_fields)


# --- What stands on it ---


def test_every_section_is_there_in_order(document):
    assert [each.get("id") for each in document.iter("section")] == SECTIONS


def test_the_top_says_what_matters(document, run_fields):
    top = words_of(document.find("body/header"))
    assert "ResNet on 4 workers" in top
    assert run_fields["verdict"]["sentence"] in top
    assert values.ms(run_fields["step"]["ms"]) in top
    assert values.times(run_fields["actions"][0]["speedup"]) in top
    assert "rank 2 24.0 ms later, most of it in backward, in layer3.0.conv1" in top


def test_bars_are_as_long_as_the_parts(document, run_fields):
    rects = svg(part_of(document, "step-time"), "rect")
    for rank in run_fields["ranks"]:
        name = f"rank {rank['rank']}: "
        widths = {r.get("class"): float(r.get("width")) for r in rects if r[0].text.startswith(name)}
        shown = {f"p-{key}": ms for key, ms in rank["parts"].items() if ms > 0}
        assert widths.keys() == shown.keys()
        per_ms = sum(widths.values()) / sum(shown.values())
        for class_, ms in shown.items():
            assert widths[class_] == pytest.approx(ms * per_ms, abs=0.6)


def test_the_table_of_parts_has_every_part_and_the_step(document, run_fields):
    rows = [words_of(row) for row in part_of(document, "step-time").iter("tr")]
    for part in run_fields["parts"]:
        found = [row for row in rows if row.startswith(PARTS[part["key"]])]
        assert len(found) == (1 if part["ms"] else 0), part
        assert not found or values.ms(part["ms"]) in found[0]
    assert rows[-1].startswith(f"step {values.ms(run_fields['step']['ms'])}")


def test_blocks_of_every_rank_are_drawn_where_they_were(document, run_fields):
    blocks = [r for r in svg(part_of(document, "timeline"), "rect") if r.get("class") == "block"]
    assert len(blocks) == (4 + 1) * len(run_fields["timeline"][0]["blocks"])
    drawn = sorted(float(r.get("x")) for r in blocks if r[0].text.startswith("rank 2:"))
    launches = [block["launch_ms"] for block in run_fields["timeline"][2]["blocks"]]
    per_ms = (drawn[-1] - drawn[0]) / (launches[-1] - launches[0])
    assert drawn == pytest.approx([drawn[0] + (ms - launches[0]) * per_ms for ms in launches], abs=0.1)


def test_a_slow_rank_stands_out_in_the_heat_map(document):
    rects = svg(part_of(document, "ranks"), "rect")
    levels = {
        rank: [int(r.get("class")[1]) for r in rects if r[0].text.startswith(f"rank {rank},")] for rank in range(4)
    }
    assert {len(each) for each in levels.values()} == {20}
    assert min(levels[2]) > max(levels[0][1:])
    assert levels[1][11] >= 3  # the hiccup


def test_shades():
    assert [heat_map.shade(each, 100) for each in (100, 101.9, 102.1, 106, 111, 121, 900)] == [0, 0, 1, 2, 3, 4, 5]


def test_blocks_are_compared_from_when_they_are_due_and_by_the_rank_that_did_not_wait():
    def block(number, ready_ms, launch_ms, finish_ms, size_bytes=8):
        times = {"ready_ms": ready_ms, "launch_ms": launch_ms, "finish_ms": finish_ms}
        return {"block": number, "bytes": size_bytes, **times}

    # Block 0 waits for the last rank's gradients, block 2 on all ranks for block 1, which is another one than was
    # planned; block 7 was never seen.
    measured = [
        {"blocks": [block(0, start_ms, start_ms, 15), block(1, 15, 15, 16), block(2, 5, 16.5, end_ms)]}
        for start_ms, end_ms in ((0, 20), (3, 21), (4, 25))
    ]
    planned = [block(0, 0, 0, 10), block(1, 10, 10, 11, size_bytes=16), block(2, 5, 11, 15), block(7, 0, 0, 1)]
    run = {"predicted_timeline": {"blocks": planned}, "timeline": measured}
    assert prediction.block_pairs(run) == [(0, 10, 11), (2, 4, 6)]


def test_the_band_is_the_steps_interval():
    point = {"efficiency": 0.8, "step_ms": 100.0, "low_ms": 80.0, "high_ms": 125.0}
    assert scaling.band(point) == pytest.approx((0.64, 1.0))


def test_figures_have_names_and_tooltips(document):
    for figure in svg(document, "svg"):
        assert figure[0].tag.endswith("title")
        assert len(figure.get("aria-label")) > 10
    for shape in (*svg(document, "rect"), *svg(document, "circle")):
        assert shape[0].tag.endswith("title"), shape.attrib
    for table in document.iter("table"):
        assert table.find("caption") is not None


def test_every_colour_that_is_used_has_a_rule(document):
    css = document.find("head/style").text
    used = {name for node in document.iter() for name in (node.get("class") or "").split()}
    ruled = set(re.findall(r"\.([a-z][\w-]*)", css))
    unstyled = {name for name in used if re.match(r"(p-|h\d|s\d|block|.*-bar|swatch)", name)} - ruled
    assert not unstyled


# --- What it does without, and what it does not let in ---


def test_nothing_is_fetched_and_nothing_runs(run_fields):
    text = html_report.build(run_fields)
    assert "default-src 'none'" in html.unescape(text)
    assert not re.search(r"<(script|link|img|iframe|object)|\b(src|href|onclick|onload)=|url\(|@import", text)
    assert set(re.findall(r"https?://[^\"<\s]+", text)) == {"http://www.w3.org/2000/svg"}
    assert len(text) < 300_000


def test_names_from_a_run_are_text():
    evil = '<script>alert("1")</script>&amp;'
    run = doctor_runs.doctor(script=evil, model={"name": evil, "tensors": 1, "bytes": 1}, hopeless=evil)
    run["timeline"][0]["blocks"][0]["first"] = evil
    run["straggler"]["layer"] = evil
    run["scaling"]["points"][0]["network"] = evil
    assert "<script" not in html_report.build(run)
    document = parsed(run)
    assert evil in words_of(document.find("body/header/h1"))
    assert evil in words_of(part_of(document, "timeline"))


def test_attributes_are_escaped():
    assert element("p", "a < b", title='"x" & y') == '<p title="&quot;x&quot; &amp; y">a &lt; b</p>'
    assert element("p", Markup("<b>"), None, ["1", 2], class_=None) == "<p><b>12</p>"


def test_a_run_without_anything_optional_says_so():
    document = parsed(doctor_runs.bare())
    names = {each.get("id"): words_of(each) for each in document.iter("section")}
    assert set(SECTIONS) - set(names) == {"lint"}
    for name, words in (
        ("timeline", "No step followed a plan"),
        ("prediction", "nothing to compare predictions with"),
        ("bandwidth", "bandwidth was not measured"),
        ("plans", "No plan was made"),
        ("scaling", "was not predicted"),
        ("network", "was not checked"),
    ):
        assert words in names[name]
        assert not svg(part_of(document, name), "svg")


def test_parts_that_add_up_to_more_than_the_step_are_said():
    run = doctor_runs.doctor()
    assert "more than the step" not in html_report.build(run)
    run["ranks"][1]["parts"] |= {"network": 300.0, "rest": -19.0}
    told = section(run, "step-time")
    assert "as much as 19.0 ms more than the step" in words_of(told)
    assert [line.get("class") for line in svg(told, "line")].count("end") == 1


def test_why_nothing_was_tried_is_said():
    text = words_of(parsed(doctor_runs.bare(not_tried="the model has one tensor")))
    assert text.count("No step followed a plan: the model has one tensor") == 3


@pytest.mark.parametrize("created", ["2026-03-04T05:06:07Z", "2026-03-04T05:06:07.25+00:00"])
def test_the_day_is_written_for_people(created):
    top = words_of(parsed(doctor_runs.doctor(created=created, script="/a/b/train.py")).find("body/header"))
    assert "train.py · 2 hosts" in top
    assert "/a/b" not in top
    assert "2026-03-04 05:06 UTC" in top


@pytest.mark.parametrize("key", ["straggler", "network", "prediction", "predicted_timeline", "scaling", "floor_ms"])
def test_any_part_may_be_missing(key):
    parsed(doctor_runs.doctor(**{key: None}))


def test_intervals_may_be_unknown():
    run = doctor_runs.doctor()
    for each in (run["step"], *run["parts"]):
        each |= {"low_ms": None, "high_ms": None}
    run["network"]["collective"] |= {"alpha_us": None, "beta_ns_per_byte": None, "bus_gbit_per_s": None}
    assert "None" not in words_of(parsed(run))


def test_ticks_are_round():
    assert axes.ticks(0, 435) == [0, 100, 200, 300, 400]
    assert axes.ticks(-0.3, 0.3) == pytest.approx([-0.3, -0.2, -0.1, 0, 0.1, 0.2, 0.3])


@pytest.mark.parametrize(
    ("form", "given", "words"),
    [
        # Times have three digits, and both ends of a range as many.
        (values.ms, [412.34], "412 ms"), (values.ms, [41.23], "41.2 ms"), (values.ms, [4.123], "4.12 ms"),
        (values.ms, [-0.001], "0 ms"), (values.ms, [None], values.UNKNOWN),
        (values.ms_range, [-0.001, 3.4], "0 to 3.40"), (values.ms_range, [-250.0, 3.4], "-250 to 3"),
        (values.ms_range, [9.5, 10.2], "9.5 to 10.2"), (values.ms_range, [None, 1.0], values.UNKNOWN),
        # Shares may be negative.
        (values.percent, [0.5], "50 %"), (values.percent, [0.045], "4.5 %"), (values.percent, [-0.112], "-11 %"),
        (values.percent, [-0.0001], "0.0 %"), (values.percent, [None], values.UNKNOWN),
    ],
)  # fmt: skip
def test_how_values_are_written(form, given, words):
    assert form(*given) == words


# --- The command ---


@pytest.fixture
def run_folder(tmp_path, run_fields):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "doctor.json").write_text(json.dumps(run_fields))
    trace_files.save(merged_trace.merge(doctor_runs.rank_traces(2, 3)), folder / "trace.json.gz")
    return folder


@pytest.mark.parametrize("form", ["folder", "file"])
def test_report_of_a_run(run, run_folder, run_fields, form):
    result = run("report", run_folder if form == "folder" else run_folder / "doctor.json")
    assert result.code == 0
    assert run_fields["verdict"]["sentence"] in result.out
    assert (run_folder / "report.html").read_text() == html_report.build(run_fields)


def test_report_with_everything_else(run, run_folder, tmp_path):
    others = ["-o", tmp_path / "x.html", "--prometheus", tmp_path / "x.prom", "--hta", tmp_path / "hta", "--json"]
    result = run("report", run_folder, *others)
    assert result.code == 0
    assert json.loads(result.out)["gradcast/world_size"] == 4
    assert (tmp_path / "x.html").exists()
    assert (tmp_path / "x.prom").read_text().startswith("#")
    assert sorted(path.name for path in (tmp_path / "hta").iterdir()) == ["rank0.json.gz", "rank1.json.gz"]
    assert not (run_folder / "report.html").exists()


def test_report_says_what_is_wrong(run, run_folder, tmp_path, run_fields):
    assert "doctor.json is missing" in run("report", tmp_path).err
    assert "does not exist" in run("report", tmp_path / "nowhere").err
    (run_folder / "trace.json.gz").unlink()
    assert "has no trace" in run("report", run_folder, "--hta", tmp_path / "hta").err
    for fields, words in (
        (run_fields | {"version": 2}, "this gradcast reads version 1"),
        (run_fields | {"parts": []}, "parts is []; a list of at least 1"),
    ):
        (run_folder / "doctor.json").write_text(json.dumps(fields))
        assert words in run("report", run_folder).err
    (run_folder / "doctor.json").write_text("[")
    for path in (run_folder, run_folder / "doctor.json"):
        assert "is not valid JSON: it ends too early" in run("report", path).err
    (run_folder / "doctor.json").write_text(json.dumps(run_fields))
    assert "does not exist; make it first" in run("report", run_folder, "-o", tmp_path / "none" / "x.html").err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"view_rank": None}, "view_rank is null; a whole number"),
        ({"world_size": None, "ranks": 3}, "world_size is null; a whole number"),
        ({"step": {"ms": 0.0}}, "step.ms is 0.0; a number from 1e-06"),
        ({"ranks": [{"rank": 0, "parts": {}, "own_ms": 1.0}, {"parts": {}}]}, "ranks[1].rank is missing"),
        ({"parts": [{"key": "forward"}]}, "parts[0].ms is missing"),
    ],
)
def test_what_a_run_lacks_is_named(run_fields, changes, words):
    with pytest.raises(Error, match=re.escape(f"doctor.json: {words}")):
        runs.check_run(run_fields | changes, "doctor.json")
    assert runs.check_run(run_fields | {"view_rank": 0}, "doctor.json")["view_rank"] == 0


def test_a_picture_needs_a_name(run, tmp_path):
    row = {"op": "all_gather", "errors": 0} | dict.fromkeys(("size_bytes", "time_ns", "low_ns", "high_ns"), 8)
    results = {"kind": "gradcast-bench", "version": 1, "transport": "mpi", "world_size": 2, "sweep": [row]}
    (tmp_path / "bench.json").write_text(json.dumps(results))
    assert "give it, for instance with -o" in run("report", tmp_path / "bench.json").err
    result = run("report", tmp_path / "bench.json", "-o", "x.png", "--json")
    assert "only work with runs of gradcast doctor" in result.err


# --- In a browser ---

WIDTH, HEIGHT = 1280, 4600
DARK = "--blink-settings=preferredColorScheme=0"


@pytest.fixture(scope="module")
def browser(tmp_path_factory, run_fields):
    """Runs Chromium on the page of a run: browser(option, ...) returns what it printed."""
    names = ("chromium", "chromium-browser", "google-chrome")
    program = next((path for name in names if (path := shutil.which(name))), None)
    if program is None:
        pytest.skip("this looks at the page in a browser, and there is none: apt-get install chromium")
    folder = tmp_path_factory.mktemp("browser")
    (folder / "report.html").write_text(html_report.build(run_fields))

    def look(*options, name="report.html"):
        # No name resolves: what would be fetched is missing here, as on a plane.
        usual = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}"]
        usual += [f"--user-data-dir={folder}/profile", "--host-resolver-rules=MAP * ~NOTFOUND"]
        command = [program, *usual, *options, f"file://{folder}/{name}"]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)

    look.folder = folder
    return look


def picture(browser, name, *options):
    image = pytest.importorskip("PIL.Image", reason="this reads pictures with Pillow, which matplotlib brings")
    path = browser.folder / f"{name}.png"
    browser(f"--screenshot={path}", *options)
    return image.open(path).convert("RGB")


@pytest.mark.slow
def test_a_browser_reads_it_as_it_is_meant(browser):
    """A browser's tolerant parser finds the same sections, figures and texts."""
    shown = browser("--dump-dom").stdout
    assert re.findall(r'<section id="([\w-]+)"', shown) == SECTIONS
    assert shown.count("<svg") == (browser.folder / "report.html").read_text().count("<svg")
    assert "every parameter was used" in shown


@pytest.mark.slow
def test_light_and_dark_and_nothing_sticks_out_at_the_sides(browser):
    light, dark = picture(browser, "light"), picture(browser, "dark", DARK)
    assert light.size == dark.size == (WIDTH, HEIGHT)
    assert min(light.getpixel((5, 5))) > 240
    assert max(dark.getpixel((5, 5))) < 40
    # Letters and figures: many shades, in both.
    for image in (light, dark):
        assert len(image.getcolors(1 << 24)) > 500
    for left in (0, WIDTH - 60):
        assert len(light.crop((left, 0, left + 60, HEIGHT)).getcolors()) == 1


# What the browser makes of the colours: the ratio of WCAG 2.1 between a label and what lies behind it.
CONTRAST = """<script>
const light = c => { const v = c.match(/[0-9.]+/g).slice(0, 3).map(x => x / 255)
  .map(x => x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4); return .2126 * v[0] + .7152 * v[1] + .0722 * v[2] };
const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
  if (!/, 0\\)$/.test(c)) return c } };
const found = %s.map(s => { const e = document.querySelector(s), style = getComputedStyle(e);
  const [a, b] = [e.ownerSVGElement ? style.fill : style.color, behind(e)].map(light);
  return s + "=" + (Math.max(a, b) + .05) / (Math.min(a, b) + .05) });
document.title = "contrast: " + found.join(" ");
</script>"""
LABELS = ["h2", ".sentence", ".note", "figcaption", "svg .tick", "svg .name", "svg text.s1", "td.h5", "td.h4"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], [DARK]], ids=["light", "dark"])
def test_labels_can_be_read(browser, options):
    text = (browser.folder / "report.html").read_text()
    named = [label for label in LABELS if not label.startswith("td") or f'"r {label[3:]}"' in text]
    asked = re.sub(r"<meta http-equiv[^>]*>", "", text).replace("</body>", CONTRAST % json.dumps(named) + "</body>")
    (browser.folder / "contrast.html").write_text(asked)
    told = re.search(r"<title>contrast: ([^<]*)<", browser("--dump-dom", *options, name="contrast.html").stdout)[1]
    ratios = dict(re.findall(r"(\S[^=]*)=([\d.]+)", told))
    assert list(ratios) == named
    assert {label: ratio for label, ratio in ratios.items() if float(ratio) < 4.5} == {}


@pytest.mark.slow
def test_it_prints_on_a_few_pages_with_nothing_cut_and_tables_unfolded(browser, run_fields):
    """Tables that are folded on the screen are printed, except for those with one line per step."""
    path = browser.folder / "report.pdf"
    browser(f"--print-to-pdf={path}", "--no-pdf-header-footer")
    assert 3 <= len(re.findall(rb"/Type\s*/Page\b", path.read_bytes())) <= 9
    if shutil.which("pdftotext") is None:
        pytest.skip("this reads what was printed, with pdftotext, which is missing: apt-get install poppler-utils")
    printed = subprocess.run(["pdftotext", "-layout", path, "-"], capture_output=True, text=True, check=True).stdout
    samples = run_fields["network"]["collective"]["samples"]
    assert 12 <= len(samples) <= 20
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    for sample in samples:
        assert f"{format_size(sample['bytes'])} {values.ms(sample['ms'])}" in lines
    assert "Bandwidth per step" not in printed
