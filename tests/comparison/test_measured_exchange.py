"""A profile says on which hosts its link was measured, and predictions start from there."""

import json

import pytest

import gradcast
from conftest import link_of
from gradcast.comparison.measured_exchange import MeasuredExchange, exchange_of, in_a_ring, with_exchange
from gradcast.host_traffic import FLAT, RING, TWO_LEVEL, Hosts

TWO_BY_FOUR = MeasuredExchange(Hosts.even(2, 4), TWO_LEVEL, "fp32")
TENSOR = gradcast.Tensor(name="a", bytes=4_000_000, ready_ns=0, need_ns=0)


def profile(exchange=None):
    ranks = 8 if exchange is None else len(exchange.hosts.host_of)
    made = gradcast.Profile(
        name="p", forward_ns=1e6, backward_ns=1e6, tensors=[TENSOR], world_size=ranks, link=link_of(1e5, 1.0)
    )
    return made if exchange is None else with_exchange(made, exchange)


@pytest.fixture
def saved(tmp_path):
    def save(exchange):
        path = tmp_path / "p.json"
        path.write_text(profile(exchange).to_json())
        return path

    return save


def test_it_is_kept_in_the_file():
    over_nccl = MeasuredExchange(Hosts.even(4, 1), FLAT, "bf16", "nccl")
    for each in (TWO_BY_FOUR, over_nccl):
        assert exchange_of(profile(each)) == each
    assert exchange_of(in_a_ring(profile(over_nccl))).backend == "nccl"
    assert over_nccl.describe() == "4 hosts of 1 rank, bf16 on the wire, over nccl"
    assert exchange_of(profile()) is None


@pytest.mark.parametrize(
    ("exchange", "beta"),
    [
        (None, 1.0),
        (TWO_BY_FOUR, 1.75),
        (MeasuredExchange(Hosts.even(4, 1), RING, "fp32"), 1.0),
        (MeasuredExchange(Hosts.even(4, 1), FLAT, "bf16"), 2.0),
        (MeasuredExchange(Hosts.even(1, 4), RING, "fp32"), 1.0),
    ],
)
def test_costs_as_a_ring_of_all_ranks_would_have_them(exchange, beta):
    ring = in_a_ring(profile(exchange))
    assert ring.link.all_reduce.pieces[0].beta_ns_per_byte == pytest.approx(beta)
    assert in_a_ring(ring) == ring


@pytest.mark.parametrize(
    ("exchange", "options", "words"),
    [
        (TWO_BY_FOUR, [], "own link, measured on 2 hosts of 4 ranks, in two levels: an all-reduce takes 100 us + 1 ms"),
        (TWO_BY_FOUR, ["--wire", "bf16"], "(for gradients in host memory 0.50 times fp32's cost per byte)"),
        (TWO_BY_FOUR, ["--bandwidth", "8gbit"], "hierarchical, 2 hosts of 4 ranks, 8 Gbit/s"),
        (TWO_BY_FOUR, ["--bandwidth", "8gbit", "--workers", "16"], "ring of 16 workers, 8 Gbit/s"),
        (
            MeasuredExchange(Hosts.even(2, 4), RING, "fp32"),
            ["--bandwidth", "8gbit"],
            "ring of 8 workers on 2 hosts of 4 ranks",
        ),
        # On devices, and on hosts with differently many ranks: 2 * 3 * (1/4) / 2 against 2 * 3/4.
        (MeasuredExchange(Hosts.even(2, 4), RING, "fp32"), ["--wire", "bf16"], "(1.14 times fp32's cost per byte)"),
        (MeasuredExchange(Hosts((0, 0, 0, 1)), RING, "fp32"), ["--wire", "bf16"], "(0.50 times fp32's cost per byte)"),
        (MeasuredExchange(Hosts.even(1, 4), RING, "fp32"), ["--wire", "int8"], "1.00 times fp32's cost per byte)"),
        (MeasuredExchange(Hosts.even(4, 1), FLAT, "int8"), [], "measured on 4 hosts of 1 rank, int8 on the wire:"),
    ],
)
def test_simulate_takes_the_hosts_from_the_profile(run, saved, exchange, options, words):
    result = run("simulate", saved(exchange), *options, "--policy", "fifo")
    assert words in result.out, result.out + result.err


def test_a_link_with_a_wire_format_takes_no_other(refused, saved):
    path = saved(MeasuredExchange(Hosts.even(4, 1), FLAT, "int8"))
    refused(["simulate", path, "--wire", "bf16"], "measured with int8 on the wire", "omit --wire")


def test_powersgd_is_predicted_beside_ddp(run, saved, tmp_path):
    fields = json.loads(profile().to_json())
    fields["tensors"][0]["shape"] = [1000, 1000]
    path = tmp_path / "shaped.json"
    path.write_text(json.dumps(fields))
    result = run("simulate", path, "--policy", "ddp", "--powersgd", "4")
    # Three all-reduces of 4, 16000 and 16000 bytes after 2 ms of compute.
    assert "DDP with PowerSGD of rank 4, lossy: 2.3 ms" in result.out
    told = json.loads(run("simulate", path, "--policy", "ddp", "--powersgd", "4", "--json").out)["networks"][0]
    assert told["powersgd"] == {"rank": 4, "step_ms": pytest.approx(2.332004), "sent_bytes": 32_004}
