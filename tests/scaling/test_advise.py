"""What to rent: revocations against the exact mean, the price file, the frontier by hand, and the command."""

import dataclasses
import json
import math
import statistics
import sys

import pytest

import gradcast
from gradcast import _core
from gradcast.scaling import prices, spot
from gradcast.scaling.advise import ClusterOption, Request, Training, advise, machine_counts, pareto_rows
from gradcast.scaling.prices import Machine, Prices
from gradcast.scaling.spot import Spot

TERMS = Spot(
    price_per_hour=1, revocations_per_hour=0.2, checkpoint_interval_s=1800, checkpoint_cost_s=30, restart_s=300
)
HOUR = 3600


# --- Revocations ---


def test_checkpoints_alone_by_hand():
    assert spot.undisturbed_s(1800, TERMS) == 1800
    assert spot.undisturbed_s(1801, TERMS) == 1831
    assert spot.undisturbed_s(4 * 1800, TERMS) == 4 * 1800 + 3 * 30


def test_the_mean_of_one_part_by_hand():
    """One revocation in an hour, a part of an hour, restarts at once: e - 1 hours."""
    terms = Spot(1, revocations_per_hour=1, checkpoint_interval_s=HOUR, checkpoint_cost_s=0, restart_s=0)
    assert spot.expected_s(HOUR, 1, terms) == pytest.approx((math.e - 1) * HOUR)
    # Half the part on twice the machines is the same in half the time; a restart of an hour costs another factor e.
    assert spot.expected_s(HOUR / 2, 2, terms) == pytest.approx((math.e - 1) * HOUR / 2)
    slow = dataclasses.replace(terms, restart_s=HOUR)
    assert spot.expected_s(HOUR, 1, slow) == pytest.approx(math.e * (math.e - 1) * HOUR)


@pytest.mark.parametrize(
    ("work_h", "machine_count", "changes"),
    [
        (10, 8, {}),
        (3.3, 4, {"restart_s": 1800}),
        (5, 2, {"checkpoint_interval_s": 4 * HOUR}),
        (0.2, 16, {"checkpoint_cost_s": 0}),
        (5, 3, {"restart_s": 0}),
    ],
)
def test_simulated_trainings_agree_with_the_exact_mean(work_h, machine_count, changes):
    terms = dataclasses.replace(TERMS, **changes)
    times = spot.simulate_s(work_h * HOUR, machine_count, terms, run_count=4000, seed=7)
    error = statistics.stdev(times) / math.sqrt(len(times))
    assert statistics.mean(times) == pytest.approx(spot.expected_s(work_h * HOUR, machine_count, terms), abs=4 * error)
    # Without the restart time and what is lost, the means are further apart than that.
    assert statistics.mean(times) - spot.undisturbed_s(work_h * HOUR, terms) > 4 * error


def test_the_seed_decides():
    draws = [spot.simulate_s(5 * HOUR, 4, TERMS, run_count=50, seed=seed) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]
    assert draws[0] == sorted(draws[0])
    assert draws[0][0] >= spot.undisturbed_s(5 * HOUR, TERMS)


def test_machines_that_age_last_a_short_training():
    """Shape 5: a machine lives about as long as the mean, five hours, and a training of one hour sees no revocation."""
    aging = dataclasses.replace(TERMS, shape=5.0)
    times = spot.simulate_s(HOUR, 1, aging, run_count=500, seed=3)
    assert times.count(spot.undisturbed_s(HOUR, aging)) > 490
    exponential = spot.simulate_s(HOUR, 1, TERMS, run_count=500, seed=3)
    assert exponential.count(spot.undisturbed_s(HOUR, TERMS)) < 450


def test_lifetimes_have_the_mean_that_is_asked_for_whatever_their_shape():
    """A training without checkpoints to lose: revoked once per mean lifetime, and each time it stands still."""
    terms = Spot(1, 1.0, checkpoint_interval_s=1.0, checkpoint_cost_s=0, restart_s=36, shape=0.5)
    for shape in (0.5, 1.0, 3.0):
        times = spot.simulate_s(400 * HOUR, 1, dataclasses.replace(terms, shape=shape), run_count=50, seed=1)
        stops = (statistics.mean(times) / HOUR - 400) * HOUR / 36
        assert stops == pytest.approx(400, rel=0.1)


def test_machines_that_age_are_not_given_up_by_the_mean_of_those_that_do_not():
    """64 machines of shape 5, one revocation in five hours each: in the first hour almost none."""
    aging = dataclasses.replace(TERMS, shape=5.0)
    assert spot.expected_s(HOUR, 64, aging) > spot.ABANDONED_FACTOR * HOUR
    times = spot.simulate_s(HOUR, 64, aging, run_count=300, seed=1)
    assert spot.mean_s(times, HOUR, aging) / HOUR == pytest.approx(1.02, abs=0.02)
    # And those that settle are given up once it shows, which takes a few runs and not all of them.
    settling = dataclasses.replace(TERMS, shape=0.9)
    assert spot.simulate_s(2 * HOUR, 1000, settling, run_count=10**6, seed=1)[0] == math.inf


def test_a_few_trainings_that_are_given_up_do_not_make_the_mean_infinite():
    work_s = 4 * 1800  # with its checkpoints 7290 s; given up at 145,800 s
    limit_s = spot.ABANDONED_FACTOR * spot.undisturbed_s(work_s, TERMS)
    assert spot.mean_s([1000.0, 2000.0, math.inf], work_s, TERMS) == pytest.approx((3000 + limit_s) / 3)
    assert spot.mean_s([1000.0, math.inf, math.inf], work_s, TERMS) == math.inf


def test_nothing_is_revoked_and_nothing_gets_done():
    calm = dataclasses.replace(TERMS, revocations_per_hour=0.0)
    assert spot.simulate_s(5 * HOUR, 4, calm, run_count=3, seed=1) == [spot.undisturbed_s(5 * HOUR, calm)] * 3
    assert spot.expected_s(5 * HOUR, 4, calm) == spot.undisturbed_s(5 * HOUR, calm)
    # A thousand machines of which one goes every 18 seconds, and checkpoints every half an hour.
    assert spot.simulate_s(5 * HOUR, 1000, TERMS, run_count=3, seed=1) == [math.inf] * 3
    assert spot.expected_s(5 * HOUR, 10**6, TERMS) == math.inf


def test_quantiles():
    assert [spot.quantile([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], share) for share in (0.1, 0.5, 0.9, 1.0)] == [1, 5, 9, 10]


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
    with pytest.raises(gradcast.Error, match="date: None is not text"):
        prices.load_prices(str(path))


def test_the_bundled_sample():
    found = prices.load_prices(prices.sample_path())
    assert [machine.workers for machine in found.machines] == [1, 4, 8]
    assert all(machine.spot.price_per_hour < machine.price_per_hour for machine in found.machines)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("version = 1", "version = 2", "version: 2 is not a whole number from 1 to 1"),
        ("date = 2026-11-01", "", "date is missing"),
        ("price_per_hour = 2", "", "machine[0]: price_per_hour is missing"),
        ("price_per_hour = 2", "price_per_hour = -2", "machine[0]: price_per_hour: -2 is not a number"),
        ("price_per_hour = 2", "price_per_hour = '2'", "'2' is not a number"),
        ("price_per_hour = 2", "price_per_hour = inf", "inf is not a number"),
        ('"10gbit"', "10", "bandwidth: 10 is not text with a unit"),
        ('"10gbit"', '"10"', "'10' has no known unit of bandwidth"),
        ('bandwidth = "10gbit"', "", "machine[0]: bandwidth is missing"),
        ("workers = 1", "workers = 4", "machine[0]: intra_bandwidth is missing"),
        ("workers = 1", "workers = 1.5", "1.5 is not a whole number"),
        ("workers = 1", "workers = 1\ncolour = 'red'", "there is no field colour"),
        ('"30min"', '"30"', "machine[0]: spot: checkpoint_interval: '30' has no known unit of time"),
        ('"30min"', '"0s"', "checkpoint_interval is 0"),
        ("[[machine]]", "[machine]", "at least one [[machine]]"),
        ("[machine.spot]", "[[machine.spot]]", "spot: it must be a table"),
        ("[[machine]]", "[[machine", "is not valid TOML"),
        ("[machine.spot]", "[[machine]]\nname='small'\nworkers=1\nprice_per_hour=1\nmax_machines=1\n[machine.spot]",
         "two machines are called small"),
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


def profile(world_size=2, link=None):
    tensor = gradcast.Tensor(name="a", bytes=1000, ready_ns=6e6, need_ns=0)
    return gradcast.Profile(
        name="small", forward_ns=3e6, backward_ns=6e6, tensors=[tensor], world_size=world_size, link=link
    )


ONE_MS = _core.LinkModel(all_reduce=[_core.LinkPiece(alpha_ns=1e6, beta_ns_per_byte=0)])
# 2 steps of 0.5 ms between two machines; 1000 bytes are nothing on this wire.
PLAIN = Machine("plain", 1, 2.0, bandwidth_bits_per_s=1e15, latency_ns=0.5e6, max_machines=2)
TRAINING = Training.of_samples(800_000 * HOUR / 9, 8)  # 100 h of one worker


def advice(machine, *profiles, training=TRAINING, **request):
    """What the price file of these machines says; by default of the small profile."""
    machines = machine if isinstance(machine, tuple) else (machine,)
    return advise(profiles or [profile()], Prices("file", "today", "EUR", machines), Request(training, **request))


def spot_row(found, workers=1):
    return next(row for row in found.rows if row.spot and row.workers == workers)


def test_rows_by_hand():
    fast = dataclasses.replace(PLAIN, name="fast", speed=3.0, price_per_hour=9.0, max_machines=1)
    found = advice((PLAIN, fast), spread=0.2)
    rows = {(row.machine, row.machines): row for row in found.rows}
    assert rows["plain", 1].hours == pytest.approx(100 * 1e5 / 1e5, rel=1e-3)
    assert rows["plain", 1].cost == pytest.approx(200, rel=1e-3)
    # Two workers: 10 ms instead of 9, half the steps.
    assert rows["plain", 2].hours == pytest.approx(50 * 10 / 9, rel=1e-3)
    assert rows["plain", 2].cost == pytest.approx(4 * 50 * 10 / 9, rel=1e-3)
    assert rows["plain", 2].low_hours == pytest.approx(50 * 9.8 / 9, rel=1e-3)
    assert rows["plain", 2].high_hours == pytest.approx(50 * 10.2 / 9, rel=1e-3)
    assert rows["fast", 1].hours == pytest.approx(100 / 3, rel=1e-3)
    assert {row.basis for row in found.rows} == {"predicted"}
    assert [(row.machine, row.machines) for row in found.frontier] == [("fast", 1), ("plain", 2), ("plain", 1)]
    assert found.cheapest_within(101) is rows["plain", 1]
    assert found.cheapest_within(99) is rows["plain", 2]
    assert found.cheapest_within(30) is None
    assert found.fastest_within(250) is rows["plain", 2]
    assert found.fastest_within(199) is None


def test_what_was_measured_is_used_and_marked():
    """The price file's network costs 1 ms, what was measured 4 ms."""
    measured = profile(2, ONE_MS.scaled(4, 1))
    rows = {row.machines: row for row in advice(PLAIN, measured, measured_on="plain", spread=0.0).rows}
    assert rows[2].basis == "predicted on measured costs"
    assert rows[2].step_ns == pytest.approx(13e6)
    assert rows[1].basis == "predicted"
    assert {row.basis for row in advice(PLAIN, measured).rows} == {"predicted"}


def test_a_measurement_inside_a_machine_leaves_the_network_between_them_to_the_file():
    machine = dataclasses.replace(PLAIN, workers=2, intra_bandwidth_bits_per_s=1e15, intra_latency_ns=0.0)
    found = advice(machine, profile(2, ONE_MS), measured_on="plain", spread=0.0)
    rows = {row.machines: row for row in found.rows}
    assert (rows[1].basis, rows[1].step_ns) == ("predicted on measured costs", pytest.approx(10e6))
    # A ring of four workers: six steps of 0.5 ms.
    assert (rows[2].basis, rows[2].step_ns) == ("predicted", pytest.approx(12e6))


def test_speeds_are_relative_to_the_machine_that_was_measured():
    slow, fast = (
        dataclasses.replace(PLAIN, name=name, speed=speed, max_machines=1) for name, speed in (("a", 2.0), ("b", 4.0))
    )
    steps = {row.machine: row.step_ns for row in advice((slow, fast), profile(1), measured_on="a").rows}
    assert steps == {"a": pytest.approx(9e6), "b": pytest.approx(4.5e6)}


def test_spot_rows_are_the_mean_and_what_is_sure():
    machine = dataclasses.replace(PLAIN, max_machines=1, spot=dataclasses.replace(TERMS, price_per_hour=0.5))
    found = advice(machine, run_count=2000)
    row = spot_row(found)
    assert row.hours == pytest.approx(spot.expected_s(100 * HOUR, 1, machine.spot) / HOUR, rel=0.01)
    assert row.low_hours < row.hours < row.sure_hours <= row.high_hours
    assert row.basis == "predicted"
    assert row.cost == pytest.approx(0.5 * row.hours)
    # Its mean would do, but not nine times out of ten.
    assert found.cheapest_within((row.hours + row.sure_hours) / 2).spot is False
    assert found.cheapest_within(row.sure_hours) is row


def test_spot_machines_that_never_end_are_left_out():
    machine = dataclasses.replace(PLAIN, max_machines=1, spot=dataclasses.replace(TERMS, revocations_per_hour=60.0))
    found = advice(machine)
    assert [row.spot for row in found.rows] == [False]
    assert found.skipped == {"1 x plain (spot)": "revocations make the training 20 times as long or more"}


def test_in_hook_mode_nothing_travels_under_the_forward_pass():
    """The gradient is needed at the end of forward, 3 ms after the network of 1 ms began to send it."""
    late = gradcast.Tensor(name="a", bytes=1000, ready_ns=6e6, need_ns=3e6)
    own = gradcast.Profile(name="late", forward_ns=3e6, backward_ns=6e6, tensors=[late])
    steps = {}
    for mode in ("overlap", "hook"):
        steps[mode] = next(row.step_ns for row in advice(PLAIN, own, mode=mode).rows if row.machines == 2)
    assert steps == {"overlap": pytest.approx(9e6), "hook": pytest.approx(10e6)}


def test_a_spot_row_has_the_range_of_its_steps():
    """Two workers: 9 ms and a network of 1 ms, which may cost 0.5 to 1.5 ms."""
    machine = dataclasses.replace(PLAIN, spot=dataclasses.replace(TERMS, revocations_per_hour=0.01))
    row = spot_row(advice(machine, spread=0.5), 2)
    work_s = [HOUR * 50 * step / 9 for step in (9.5, 10.0, 10.5)]
    low, usual, high = (spot.simulate_s(each, 2, machine.spot, run_count=300, seed=1) for each in work_s)
    assert row.low_hours == pytest.approx(spot.quantile(low, 0.1) / HOUR, rel=1e-3)
    assert row.hours == pytest.approx(statistics.mean(usual) / HOUR, rel=1e-3)
    assert row.sure_hours == pytest.approx(spot.quantile(usual, 0.9) / HOUR, rel=1e-3)
    assert row.high_hours == pytest.approx(spot.quantile(high, 0.9) / HOUR, rel=1e-3)
    assert row.hours != spot_row(advice(machine, spread=0.5, seed=2), 2).hours


def test_a_mean_beyond_nine_of_ten_is_in_the_range_and_counts_for_the_budget():
    """An hour without checkpoints: one training in twelve is revoked, and then loses much."""
    terms = Spot(0.5, 0.08, checkpoint_interval_s=2 * HOUR, checkpoint_cost_s=0, restart_s=4 * HOUR)
    machine = dataclasses.replace(PLAIN, max_machines=1, price_per_hour=10.0, spot=terms)
    training = Training.of_samples(8000 * HOUR / 9, 8)
    found = advice(machine, training=training)
    row = spot_row(found)
    assert row.hours > 1.1
    assert row.low_hours <= row.hours <= row.sure_hours <= row.high_hours
    assert found.cheapest_within(1.05).spot is False
    assert found.cheapest_within(row.hours) is row
    assert found.fastest_within(0.51) is None


def test_a_measured_tree_grows_as_one():
    measured = profile(4, ONE_MS)
    machine = dataclasses.replace(PLAIN, max_machines=8)
    steps = {}
    for algorithm in ("ring", "tree"):
        asked = {"measured_on": "plain", "measured_algorithm": algorithm, "algorithm": algorithm, "spread": 0.0}
        found = advice(machine, measured, **asked)
        steps[algorithm] = {row.machines: row.step_ns for row in found.rows}
    # Blocks of one size, and 9 ms of compute: their bytes decide whatever the algorithm is.
    assert steps["ring"] == steps["tree"]
    measured = profile(4, _core.LinkModel(all_reduce=[_core.LinkPiece(alpha_ns=1e6, beta_ns_per_byte=1e-6)]))
    found = advice(machine, measured, **asked)
    # Four steps of 0.25 ms are six for eight workers.
    assert next(row.step_ns for row in found.rows if row.machines == 8) == pytest.approx(10.5e6, rel=1e-3)


def test_steps_are_those_of_the_profiled_workers():
    assert Training.of_steps(1000, 4) == Training.of_samples(1000 * 4 * 32, 32) == Training(4000)


@pytest.mark.parametrize(
    ("per_machine", "most", "measured", "counts"),
    [(1, 8, (), [1, 2, 4, 8]), (4, 12, (), [1, 2, 4, 8, 12]), (4, 8, (12, 6, 400), [1, 2, 3, 4, 8]), (1, 1, (), [1])],
)
def test_how_many_machines_are_tried(per_machine, most, measured, counts):
    machine = dataclasses.replace(PLAIN, workers=per_machine, max_machines=most)
    assert machine_counts(machine, measured) == counts


def test_the_rows_worth_their_price_by_hand():
    def row(hours, cost):
        return ClusterOption("m", 1, 1, False, 1e6, hours, hours, hours, hours, cost / hours, "predicted")

    rows = [row(1, 100), row(2, 120), row(3, 80), row(4, 80), row(5, 20)]
    assert pareto_rows(rows) == (rows[0], rows[2], rows[4])


# --- The command ---

TRAIN = ["--samples", "1281167", "--epochs", "90", "--batch", "128"]


def test_the_command_answers_both_questions(run, price_path):
    result = run(
        "advise", "resnet50", *TRAIN, "--prices", price_path, "--time-limit", "48h", "--budget", "500", "--all"
    )
    assert result.code == 0
    assert "Prices of 2026-11-01 in EUR." in result.out
    assert "The cheapest within 48 h: 4 x small (spot), 4 workers" in result.out
    assert "The fastest within 500 EUR: 8 x small" in result.out
    assert "predicted" in result.out


def test_the_command_in_json_is_the_table(run, price_path):
    limits = ["--time-limit", "1min", "--budget", "500"]
    arguments = ["advise", "resnet50", *TRAIN, "--prices", price_path, *limits, "--json"]
    fields = json.loads(run(*arguments).out)
    assert fields["cheapest_within_time_limit"] is None
    assert fields["fastest_within_budget"] in fields["rows"]
    assert sum(row["frontier"] for row in fields["rows"]) >= 2
    assert fields["prices"] == {"date": "2026-11-01", "currency": "EUR", "sample": False}
    assert "No cluster of these trains within 0.0167 h. The fastest: 8 x small" in fields["summary"]
    assert json.loads(run(*arguments).out) == fields


def test_clusters_that_are_left_out_are_named(run, price_path):
    arguments = ["advise", "resnet50", *TRAIN, "--prices", price_path, "--algorithm", "hierarchical"]
    reason = "a hierarchical all-reduce needs nodes of several workers"
    assert f"Left out, because {reason}: 2 x small, 4 x small, 8 x small." in run(*arguments, "--all").out
    fields = json.loads(run(*arguments, "--json").out)
    assert fields["skipped"] == {f"{count} x small": reason for count in (2, 4, 8)}


@pytest.mark.parametrize(
    ("options", "mode", "measured"),
    [([], "overlap", "ring"), (["--policy", "ddp", "--measured-algorithm", "tree"], "hook", "tree")],
)
def test_options_reach_the_request(options, mode, measured, run, price_path, monkeypatch):
    seen = []
    monkeypatch.setattr("gradcast.cli.advise.advise", lambda *given: seen.append(given[2]) or advise(*given))
    assert run("advise", "resnet50", "--steps", "10", "--prices", price_path, "--runs", "10", *options).code == 0
    assert [(request.mode, request.measured_algorithm) for request in seen] == [(mode, measured)]


def test_samples_may_be_written_short(run, price_path):
    outs = [
        run("advise", "resnet50", "--samples", samples, "--batch", "128", "--prices", price_path).out
        for samples in ("1280000", "1.28M", "1280k")
    ]
    assert outs[0] == outs[1] == outs[2]


def test_the_bundled_prices_say_that_they_are_a_sample(run):
    out = run("advise", "resnet50", "--steps", "1000").out
    assert "Prices of 2021-12-27 in USD, from the bundled sample" in out
    assert prices.sample_path() in "".join(run("advise", "--help").out.split())


def test_ddp_is_never_faster(run, price_path):
    arguments = ["advise", "vgg16", *TRAIN, "--prices", price_path, "--json", "--runs", "10"]
    rows = {}
    for policy in ("forecast", "ddp"):
        fields = json.loads(run(*arguments, "--policy", policy).out)
        rows[policy] = {(row["machines"], row["spot"]): row["step_ms"] for row in fields["rows"]}
    assert all(rows["ddp"][key] >= rows["forecast"][key] for key in rows["forecast"])
    assert rows["ddp"][8, False] > rows["forecast"][8, False]
    link = _core.ring_link(_core.Hop(latency_ns=50e3, bandwidth_bytes_per_s=1.25e9), 8)
    plan = gradcast.make_plan(gradcast.load_profile("vgg16"), link, policy="ddp", mode="hook")
    assert rows["ddp"][8, False] == pytest.approx(plan.predicted_ns / 1e6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "the length of the training is missing; give --samples"),
        (["--samples", "1000"], "--batch is missing"),
        (["--steps", "5", "--batch", "5"], "leave out --batch"),
        (["--samples", "many", "--batch", "1"], "'many' is not a number"),
        (["--steps", "5", "--time-limit", "4"], "'4' has no known unit of time; write ns, us, ms, s, min, h or d"),
        (["--steps", "5", "--time-limit", "0h"], "the time is 0"),
        (["--steps", "5", "--budget", "4h"], "'4h' is not an amount of money; write for instance 500"),
        (["--steps", "5", "--cost", "500"], "`gradcast advise` has no --cost any more; write --budget"),
        (["--steps", "5", "--prices", "nowhere.toml"], "the price file nowhere.toml does not exist"),
        (["--steps", "5", "--measured-on", "p9"], "has no machine p9; it has p3.2xlarge"),
    ],
)
def test_wrong_options_get_one_sentence(options, words, run):
    result = run("advise", "resnet50", *options)
    assert result.code == 2
    assert words in result.err
    assert len(result.err.splitlines()) == 1
