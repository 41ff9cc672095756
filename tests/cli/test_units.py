"""Quantities as people write them: every spelling means what it says, and what has no unit or no sense is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradcast import Error, units


@pytest.mark.parametrize(
    ("parse", "texts"),
    [
        (
            units.parse_time_ns,
            {
                "50us": 50e3, "3.2 ms": 3.2e6, "1s": 1e9, "7ns": 7, "0us": 0, "5 µs": 5e3, "1e3us": 1e6, ".5ms": 5e5,
                "2min": 120e9,
            },
        ),
        (
            units.parse_positive_duration_s,
            {"4h": 14400, "90min": 5400, ".5 d": 43200, "30S": 30, "365d": 365 * 86400},
        ),
        (
            units.parse_bandwidth_bits_per_s,
            {
                "10gbit": 10e9, "10Gbit/s": 10e9, "10 Gb/s": 10e9, "10gbps": 10e9, "500mbit": 500e6, "1.25GB/s": 10e9,
                "1GiB/s": 8 * 2**30, "64kbit": 64e3,
            },
        ),
        (units.parse_size_bytes, {"25MiB": 25 * 2**20, "4MB": 4_000_000, "512B": 512, "1 kib": 1024}),
        (units.parse_fraction, {"10%": 0.1, "0.1": 0.1, "0": 0, "2.5 %": 0.025}),
        (
            units.parse_parameter,
            {
                "cap_bytes=25MiB": ("cap_bytes", 25.0 * 2**20), "gap_ns=2ms": ("gap_ns", 2e6),
                "slice_elements=40000": ("slice_elements", 40000.0), "uncertainty = 10%": ("uncertainty", 0.1),
            },
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_every_spelling_means_what_it_says(parse, texts):
    for text, expected in texts.items():
        assert parse(text) == (expected if isinstance(expected, tuple) else pytest.approx(expected)), text


@pytest.mark.parametrize(
    ("parse", "texts"),
    [
        (
            units.parse_time_ns,
            ["", "50", "us", "-5us", "nan", "inf", "nanus", "5 parsecs", "5 us us", "1e300s", "٣us"],
        ),
        (units.parse_positive_duration_s, ["4", "h", "-4h", "4 hours", "", "1e300d", "0s"]),
        (
            units.parse_bandwidth_bits_per_s,
            ["", "10", "0gbit", "0.0gbit", "-1gbit", "10GB", "10xbit", "gbit", "1e400gbit", "10g"],
        ),
        (units.parse_size_bytes, ["", "-1", "512", "5us", "1e300", "MiB", "1.5.2MB"]),
        (units.parse_fraction, ["100%", "1", "-10%", "10 percent", "nan"]),
        (units.parse_parameter, ["", "x", "x=", "=1", "slice_elements=4MB", "cap_bytes=fast"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_has_no_unit_or_no_sense_is_refused(parse, texts):
    for text in texts:
        with pytest.raises(Error):
            parse(text)


def test_quantities_are_printed_for_people():
    times = {0: "0 ns", 999: "999 ns", 999_700: "1 ms", 50e3: "50 us", 3.2e6: "3.2 ms", 515e6: "515 ms", 2e9: "2 s"}
    assert {time_ns: units.format_time(time_ns) for time_ns in times} == times
    assert [units.format_size(size) for size in (102_228_128, 626)] == ["102 MB", "626 B"]
    assert [units.format_percent(share) for share in (0.237, 0.0142)] == ["24 %", "1.4 %"]
    assert units.format_bandwidth(2.5e9) == "2.5 Gbit/s"
    assert units.format_ms(1_234_567_890) == "1235 ms"


@given(st.floats(min_value=1, max_value=9e15))
def test_a_printed_time_reads_back_as_nearly_itself(time_ns):
    assert units.parse_time_ns(units.format_time(time_ns)) == pytest.approx(time_ns, rel=0.006)


@given(st.text(max_size=20))
def test_no_text_does_worse_than_being_refused(text):
    parsers = [
        units.parse_time_ns,
        units.parse_bandwidth_bits_per_s,
        units.parse_size_bytes,
        units.parse_fraction,
        units.parse_positive,
        units.parse_parameter,
    ]
    for parse in parsers:
        try:
            value = parse(text)
        except Error as error:
            assert str(error)  # noqa: PT017
        else:
            number = value[1] if isinstance(value, tuple) else value
            assert 0 <= number <= 2**53
