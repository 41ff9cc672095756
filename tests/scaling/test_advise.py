"""What to rent: the price file, the frontier by hand, and the command."""

import dataclasses
import json
import math
import statistics
import sys

import pytest

import gradcast
from conftest import link_of
from gradcast.comparison.measured_exchange import MeasuredExchange, with_exchange
from gradcast.host_traffic import RING, Hosts
from gradcast.scaling import prices, spot
from gradcast.scaling.advise import ClusterOption, Request, _shares, advise, machine_counts, pareto_rows
from gradcast.scaling.prices import Machine, Prices, Spot
from scaling.test_spot import HOUR, terms

# --- The price file ---

GOOD = """
version = 1
date = 2026-11-01
currency = "EUR"
[[machine]]
name = "small"
workers = 1
price_per_hour = 2
bandwidth = "10gbit"
max_machines = 8
[machine.spot]
price_per_hour = 0.5
revocations_per_hour = 0.1
checkpoint_interval = "30min"
checkpoint_cost = "30s"
restart_time = "5min"
"""


@pytest.fixture
def price_path(tmp_path):
    path = tmp_path / "prices.toml"
    path.write_text(GOOD)
    return path


def test_a_price_file(price_path):
    found = prices.load_prices(str(price_path))
    assert (found.date, found.currency) == ("2026-11-01", "EUR")
    (machine,) = found.machines
    assert (machine.price_per_hour, machine.bandwidth_bits_per_s, machine.latency_ns) == (2, 10e9, 50e3)
    assert machine.spot == Spot(0.5, 0.1, 1800, 30, 300)


def test_the_same_in_json_which_has_its_own_dates_and_may_be_named_in_capitals(tmp_path):
    path = tmp_path / "PRICES.JSON"
    machine = {"name": "one", "workers": 1, "price_per_hour": 1.5, "max_machines": 1}
    fields = {"version": 1, "date": "today", "currency": "EUR", "machine": [machine]}
    path.write_text(json.dumps(fields))
    assert prices.load_prices(str(path)).machines[0].price_per_hour == 1.5
    path.write_text(json.dumps({**fields, "date": None}))
    with pytest.raises(gradcast.Error, match="date is null; a text that is not empty is expected"):
        prices.load_prices(str(path))


def test_the_bundled_sample():
    found = prices.load_prices(prices.sample_path())
    assert [machine.workers for machine in found.machines] == [1, 4, 8]
    assert all(machine.spot.price_per_hour < machine.price_per_hour for machine in found.machines)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("version = 1", "version = 2", "version is 2; this gradcast reads version 1"),
        ("date = 2026-11-01", "", "date is missing"),
        ("price_per_hour = 2", "", "machine[0].price_per_hour is missing"),
        ("price_per_hour = 2", "price_per_hour = -2", "machine[0].price_per_hour is -2; a number from 0 to 1e+09"),
        ("price_per_hour = 2", "price_per_hour = '2'", 'price_per_hour is "2"; a number'),
        ("price_per_hour = 2", "price_per_hour = inf", "price_per_hour is Infinity; a number"),
        ('"10gbit"', "10", "machine[0].bandwidth is 10; a text with a unit"),
        ('"10gbit"', '"10"', "'10' has no known unit of bandwidth"),
        ('bandwidth = "10gbit"', "", "machine[0].bandwidth is missing"),
        ("workers = 1", "workers = 4", "machine[0].intra_bandwidth is missing"),
        ("workers = 1", "workers = 1.5", "machine[0].workers is 1.5; a whole number"),
        ("workers = 1", "workers = 1\ncolour = 'red'", "machine[0].colour is not known; the fields are name, "),
        ('"30min"', '"30"', "machine[0].spot.checkpoint_interval is wrong: '30' has no known unit of time"),
        ('"30min"', '"0s"', "machine[0].spot.checkpoint_interval is shorter than a second"),
        ("[[machine]]", "[machine]", "machine is {"),
        ("revocations_per_hour = 0.1", "elastic = true", "machine[0].spot.revocations_per_hour is missing"),
        ("revocations_per_hour = 0.1", "revocations_per_hour = 0\nelastic = true", "spot.elastic needs a lifetime"),
        ("[machine.spot]", "[machine.spot]\nelastic = 'yes'", 'spot.elastic is "yes"; true or false'),
        ("[machine.spot]", "[[machine.spot]]", "machine[0].spot is [{"),
        ("[[machine]]", "[[machine", "is not valid TOML"),
        ("price_per_hour = 2", f"price_per_hour = {'9' * 400}", "a number from 0 to 1e+09 is expected"),
        ("price_per_hour = 2", f"price_per_hour = {'9' * 5000}", "is not valid TOML"),
        ("date = 2026-11-01", f"date = {'[' * 3000}", "is not valid TOML: it nests too deeply"),
        ("workers = 1", "workers = 2026-11-01", 'workers is "2026-11-01"'),
        ("revocations_per_hour = 0.1", "revocations_per_hour = 1e12", "revocations_per_hour is 1000000000000.0; 0, or"),
        ("[machine.spot]", "[[machine]]\nname='small'\nworkers=1\nprice_per_hour=1\nmax_machines=1\n[machine.spot]",
         'machine[1].name is "small", as that of machine[0]'),
    ],
)  # fmt: skip
def test_wrong_price_files_get_one_sentence(old, new, words, price_path):
    assert old in GOOD
    price_path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(gradcast.Error) as caught:
        prices.load_prices(str(price_path))
    assert words in str(caught.value)
    assert str(caught.value).startswith(str(price_path))


def test_toml_without_a_reader_for_it(price_path, monkeypatch):
    for name in ("tomllib", "tomli"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(gradcast.Error, match=r"pip install tomli.*as \.json"):
        prices.load_prices(str(price_path))


# --- Advice by hand: 9 ms of compute, and machines of one worker on a network that costs 1 ms a step ---


def profile(world_size=2, link=None, need_ns=0):
    tensor = gradcast.Tensor(name="a", bytes=1000, ready_ns=6e6, need_ns=need_ns)
    return gradcast.Profile(
        name="small", forward_ns=3e6, backward_ns=6e6, tensors=[tensor], world_size=world_size, link=link
    )


def plain(**changes):
    """2 steps of 0.5 ms between two machines; 1000 bytes are nothing on this wire."""
    usual = {"bandwidth_bits_per_s": 1e15, "latency_ns": 0.5e6, "max_machines": 2}
    return Machine(**{"name": "plain", "workers": 1, "price_per_hour": 2.0, **usual, **changes})


HUNDRED_HOURS = 100_000 * HOUR / 9  # batches of 9 ms, of one worker


def advice(*machines, own=None, worker_steps=HUNDRED_HOURS, **request):
    """What the price file of these machines says; by default of the small profile."""
    return advise([own or profile()], Prices("file", "today", "EUR", machines), Request(worker_steps, **request))


def by_count(found):
    return {row.machines: row for row in found.rows if not row.spot}


def spot_row(found, workers=1):
    return next(row for row in found.rows if row.spot and row.workers == workers)


def test_rows_by_hand():
    found = advice(plain(), plain(name="fast", speed=3.0, price_per_hour=9.0, max_machines=1), spread=0.2)
    rows = {(row.machine, row.machines): row for row in found.rows}
    # Two workers: 10 ms instead of 9, half the steps.
    hours = {("plain", 1): 100, ("plain", 2): 50 * 10 / 9, ("fast", 1): 100 / 3}
    assert {key: row.hours for key, row in rows.items()} == pytest.approx(hours, rel=1e-3)
    assert rows["plain", 1].cost == pytest.approx(200, rel=1e-3)
    two = rows["plain", 2]
    assert (two.cost, two.low_hours, two.high_hours) == pytest.approx(
        (4 * 50 * 10 / 9, 50 * 9.8 / 9, 50 * 10.2 / 9), rel=1e-3
    )
    assert {row.basis for row in found.rows} == {"predicted"}
    assert [(row.machine, row.machines) for row in found.frontier] == [("fast", 1), ("plain", 2), ("plain", 1)]
    within = [found.cheapest_within(hours) for hours in (101, 99, 30)]
    assert within == [rows["plain", 1], two, None]
    assert [found.fastest_within(cost) for cost in (250, 199)] == [two, None]


def test_what_was_measured_is_used_and_marked():
    """The price file's network costs 1 ms, what was measured 4 ms."""
    measured = profile(2, link_of(4e6, 0))
    rows = by_count(advice(plain(), own=measured, measured_on="plain", spread=0.0))
    assert (rows[2].basis, rows[2].step_ns) == ("predicted on measured costs", pytest.approx(13e6))
    assert rows[1].basis == "predicted"
    assert {row.basis for row in advice(plain(), own=measured).rows} == {"predicted"}


def test_a_measurement_inside_a_machine_leaves_the_network_between_them_to_the_file():
    machine = plain(workers=2, intra_bandwidth_bits_per_s=1e15, intra_latency_ns=0.0)
    rows = by_count(advice(machine, own=profile(2, link_of(1e6, 0)), measured_on="plain", spread=0.0))
    assert (rows[1].basis, rows[1].step_ns) == ("predicted on measured costs", pytest.approx(10e6))
    # A ring of four workers: six steps of 0.5 ms.
    assert (rows[2].basis, rows[2].step_ns) == ("predicted", pytest.approx(12e6))
    # Measured between two hosts, it says nothing of what is inside one, nor of four workers in pairs.
    apart = with_exchange(profile(2, link_of(1e6, 0)), MeasuredExchange(Hosts.even(2, 1), RING, "fp32"))
    rows = by_count(advice(machine, own=apart, measured_on="plain", spread=0.0))
    assert (rows[1].basis, rows[1].step_ns) == ("predicted", pytest.approx(9e6))
    assert (rows[2].basis, rows[2].step_ns) == ("predicted", pytest.approx(12e6))


def test_speeds_are_relative_to_the_machine_that_was_measured():
    slow, fast = (plain(name=name, speed=speed, max_machines=1) for name, speed in (("a", 2.0), ("b", 4.0)))
    steps = {row.machine: row.step_ns for row in advice(slow, fast, own=profile(1), measured_on="a").rows}
    assert steps == {"a": pytest.approx(9e6), "b": pytest.approx(4.5e6)}


def test_spot_machines_that_never_end_are_left_out():
    found = advice(plain(max_machines=1, spot=terms(revocations_per_hour=60.0)))
    assert [row.spot for row in found.rows] == [False]
    assert found.skipped == {"1 x plain (spot)": "revocations make the training 20 times as long or more"}


def test_an_elastic_row_pays_machines_until_they_leave():
    """A step of two takes 10 ms, of one 9 ms; machines live for 20 hours."""
    often = terms(revocations_per_hour=0.05, checkpoint_cost_s=0, elastic=True)
    row = spot_row(advice(plain(spot=often)), 2)
    runs = spot.simulate_elastic(500 / 9 * HOUR, [10 / 18, 1.0], often, run_count=300, seed=1)
    assert row.hours == pytest.approx(statistics.mean(run.time_s for run in runs) / HOUR, rel=1e-3)
    assert row.cost == pytest.approx(statistics.mean(run.machine_s for run in runs) / HOUR, rel=1e-3)
    assert row.hours < row.cost < 2 * row.hours


def test_between_known_numbers_of_machines_one_workers_speed_is_interpolated():
    point = dataclasses.make_dataclass("Point", ["step_ns"])
    assert _shares({1: point(1.0), 2: point(1.25), 4: point(2.0)}, 4) == pytest.approx(
        [0.5, 0.8, 3 * ((1 - math.log2(1.5)) / 1.25 + math.log2(1.5) / 2) / 2, 1.0]
    )


def test_with_ddp_nothing_travels_under_the_forward_pass():
    """The gradient is needed at the end of forward, 3 ms after the network of 1 ms began to send it."""
    late = profile(need_ns=3e6)
    steps = [by_count(advice(plain(), own=late, policy=policy))[2].step_ns for policy in ("forecast", "ddp")]
    assert steps == pytest.approx([9e6, 10e6])


def test_a_spot_row_has_the_range_of_its_steps():
    """Two workers: 9 ms and a network of 1 ms, which may cost 0.5 to 1.5 ms."""
    machine = plain(spot=terms(revocations_per_hour=0.01))
    row = spot_row(advice(machine, spread=0.5), 2)
    work_s = [HOUR * 50 * step / 9 for step in (9.5, 10.0, 10.5)]
    low, usual, high = (spot.simulate_s(each, 2, machine.spot, run_count=300, seed=1) for each in work_s)
    expected_s = [spot.quantile(low, 0.1), statistics.mean(usual), spot.quantile(usual, 0.9), spot.quantile(high, 0.9)]
    found_h = [row.low_hours, row.hours, row.sure_hours, row.high_hours]
    assert found_h == pytest.approx([each / HOUR for each in expected_s], rel=1e-3)
    assert (row.cost, row.basis) == (pytest.approx(2 * 1 * row.hours), "predicted")
    assert row.hours != spot_row(advice(machine, spread=0.5, seed=2), 2).hours


def test_a_mean_beyond_nine_of_ten_is_in_the_range_and_counts_for_the_budget():
    """An hour without checkpoints: one training in twelve is revoked, and then loses much."""
    rare = terms(
        price_per_hour=0.5, revocations_per_hour=0.08, checkpoint_interval_s=2 * HOUR, checkpoint_cost_s=0,
        restart_s=4 * HOUR,
    )  # fmt: skip
    found = advice(plain(max_machines=1, price_per_hour=10.0, spot=rare), worker_steps=HUNDRED_HOURS / 100)
    row = spot_row(found)
    assert row.hours > 1.1
    assert row.low_hours <= row.hours <= row.sure_hours <= row.high_hours
    assert found.cheapest_within(1.05).spot is False
    assert found.cheapest_within(row.hours) is row
    assert found.fastest_within(0.51) is None


def test_a_measured_tree_grows_as_one():
    def steps(link, algorithm):
        asked = {"measured_on": "plain", "measured_algorithm": algorithm, "algorithm": algorithm, "spread": 0.0}
        return {
            n: row.step_ns for n, row in by_count(advice(plain(max_machines=8), own=profile(4, link), **asked)).items()
        }

    # Blocks of one size, and 9 ms of compute: their bytes decide whatever the algorithm is.
    assert steps(link_of(1e6, 0), "ring") == steps(link_of(1e6, 0), "tree")
    # Four steps of 0.25 ms are six for eight workers.
    assert steps(link_of(1e6, 1e-6), "tree")[8] == pytest.approx(10.5e6, rel=1e-3)


@pytest.mark.parametrize(
    ("per_machine", "most", "measured", "counts"),
    [(1, 8, (), [1, 2, 4, 8]), (4, 12, (), [1, 2, 4, 8, 12]), (4, 8, (12, 6, 400), [1, 2, 3, 4, 8]), (1, 1, (), [1])],
)
def test_how_many_machines_are_tried(per_machine, most, measured, counts):
    assert machine_counts(plain(workers=per_machine, max_machines=most), measured) == counts


def test_the_rows_worth_their_price_by_hand():
    def row(hours, cost):
        return ClusterOption("m", 1, 1, False, 1e6, hours, hours, hours, hours, cost / hours, "predicted")

    rows = [row(1, 100), row(2, 120), row(3, 80), row(4, 80), row(5, 20)]
    assert pareto_rows(rows) == (rows[0], rows[2], rows[4])


# --- The command ---


@pytest.fixture
def resnet50(run, price_path):
    """Runs `gradcast advise` for 90 epochs of ImageNet with ResNet-50."""
    length = ["--samples", "1281167", "--epochs", "90", "--batch", "128"]
    return lambda *options: run("advise", "resnet50", *length, "--prices", price_path, *options)


def test_the_command_answers_both_questions(resnet50):
    result = resnet50("--time-limit", "48h", "--budget", "500", "--all")
    assert result.code == 0
    assert "Prices of 2026-11-01 in EUR." in result.out
    assert "The cheapest within 48 h: 4 x small (spot), 4 workers" in result.out
    assert "The fastest within 500 EUR: 8 x small" in result.out
    assert "predicted" in result.out


def test_the_command_in_json_is_the_table(resnet50):
    arguments = ["--time-limit", "1min", "--budget", "500", "--json"]
    fields = json.loads(resnet50(*arguments).out)
    assert fields["cheapest_within_time_limit"] is None
    assert fields["fastest_within_budget"] in fields["rows"]
    assert sum(row["frontier"] for row in fields["rows"]) >= 2
    assert fields["prices"] == {"date": "2026-11-01", "currency": "EUR", "sample": False}
    assert "No cluster of these trains within 0.0167 h. The fastest: 8 x small" in fields["summary"]
    assert json.loads(resnet50(*arguments).out) == fields


def test_clusters_that_are_left_out_are_named(resnet50):
    reason = "a hierarchical all-reduce needs nodes of several workers"
    out = resnet50("--algorithm", "hierarchical", "--all").out
    assert f"Omitted, because {reason}: 2 x small, 4 x small, 8 x small." in out
    fields = json.loads(resnet50("--algorithm", "hierarchical", "--json").out)
    assert fields["skipped"] == {f"{count} x small": reason for count in (2, 4, 8)}


def test_options_reach_the_request(resnet50, monkeypatch):
    seen = []
    monkeypatch.setattr("gradcast.cli.advise.advise", lambda *given: seen.append(given[2]) or advise(*given))
    for options in ([], ["--policy", "ddp", "--measured-algorithm", "tree"]):
        assert resnet50("--runs", "10", *options).code == 0
    assert [(each.policy, each.measured_algorithm, each.run_count) for each in seen] == [
        ("forecast", "ring", 10), ("ddp", "tree", 10),
    ]  # fmt: skip


def test_the_length_may_be_written_in_several_ways(run, price_path):
    lengths = [["--samples", text, "--batch", "128"] for text in ("1280000", "1.28M", "1280k")]
    lengths.append(["--steps", "10000"])  # of the one worker of the profile
    outs = {run("advise", "resnet50", *length, "--prices", price_path).out for length in lengths}
    assert len(outs) == 1


def test_the_bundled_prices_say_that_they_are_a_sample(run):
    out = run("advise", "resnet50", "--steps", "1000").out
    assert "Prices of 2021-12-27 in USD, from the bundled sample" in out
    assert prices.sample_path() in "".join(run("advise", "--help").out.split())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "the length of the training is missing; give --samples"),
        (["--samples", "1000"], "--batch is missing"),
        (["--steps", "5", "--batch", "5"], "omit --batch"),
        (["--samples", "many", "--batch", "1"], "'many' is not a number"),
        (["--steps", "5", "--time-limit", "4"], "'4' has no known unit of time; write ns, us, ms, s, min, h or d"),
        (["--steps", "5", "--time-limit", "0h"], "the time is 0"),
        (["--steps", "5", "--budget", "4h"], "'4h' is not an amount of money; write for instance 500"),
        (["--steps", "5", "--prices", "nowhere.toml"], "the price file nowhere.toml does not exist"),
        (["--steps", "5", "--measured-on", "p9"], "has no machine p9; it has p3.2xlarge"),
    ],
)
def test_wrong_options_get_one_sentence(options, words, refused):
    refused(["advise", "resnet50", *options], words)
