"""Quantities as people write them: every spelling means what it says, and what has no unit or no sense is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradcast import Error, units


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("50us", 50e3),
        ("3.2 ms", 3.2e6),
        ("1s", 1e9),
        ("7ns", 7),
        ("0us", 0),
        ("5 µs", 5e3),
        ("1e3us", 1e6),
        (".5ms", 5e5),
        ("2min", 120e9),
    ],
)
def test_times(text, expected):
    assert units.parse_time_ns(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "seconds"), [("4h", 14400), ("90min", 5400), (".5 d", 43200), ("30S", 30), ("365d", 365 * 86400)]
)
def test_durations(text, seconds):
    assert units.parse_duration_s(text) == units.parse_positive_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["4", "h", "-4h", "4 hours", "", "1e300d", "0s"])
def test_wrong_durations(text):
    with pytest.raises(Error):
        units.parse_positive_duration_s(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10gbit", 10e9),
        ("10Gbit/s", 10e9),
        ("10 Gb/s", 10e9),
        ("10gbps", 10e9),
        ("500mbit", 500e6),
        ("1.25GB/s", 10e9),
        ("1GiB/s", 8 * 2**30),
        ("64kbit", 64e3),
    ],
)
def test_bandwidths(text, expected):
    assert units.parse_bandwidth_bits_per_s(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "expected"), [("25MiB", 25 * 2**20), ("4MB", 4_000_000), ("512B", 512), ("1 kib", 1024)]
)
def test_sizes(text, expected):
    assert units.parse_size_bytes(text) == expected


@pytest.mark.parametrize(("text", "expected"), [("10%", 0.1), ("0.1", 0.1), ("0", 0), ("2.5 %", 0.025)])
def test_fractions(text, expected):
    assert units.parse_fraction(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cap_bytes=25MiB", ("cap_bytes", 25.0 * 2**20)),
        ("gap_ns=2ms", ("gap_ns", 2e6)),
        ("slice_elements=40000", ("slice_elements", 40000.0)),
        ("uncertainty = 10%", ("uncertainty", 0.1)),
    ],
)
def test_parameters(text, expected):
    assert units.parse_parameter(text) == expected


@pytest.mark.parametrize(
    "text", ["", "50", "us", "-5us", "nan", "inf", "nanus", "5 parsecs", "5 us us", "1e300s", "٣us"]
)
def test_wrong_times(text):
    with pytest.raises(Error):
        units.parse_time_ns(text)


@pytest.mark.parametrize("text", ["", "10", "0gbit", "0.0gbit", "-1gbit", "10GB", "10xbit", "gbit", "1e400gbit", "10g"])
def test_wrong_bandwidths(text):
    with pytest.raises(Error):
        units.parse_bandwidth_bits_per_s(text)


@pytest.mark.parametrize("text", ["", "-1", "512", "5us", "1e300", "MiB", "1.5.2MB"])
def test_wrong_sizes(text):
    with pytest.raises(Error):
        units.parse_size_bytes(text)


@pytest.mark.parametrize("text", ["100%", "1", "-10%", "10 percent", "nan"])
def test_wrong_fractions(text):
    with pytest.raises(Error):
        units.parse_fraction(text)


@pytest.mark.parametrize("text", ["", "x", "x=", "=1", "slice_elements=4MB", "cap_bytes=fast"])
def test_wrong_parameters(text):
    with pytest.raises(Error):
        units.parse_parameter(text)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (999_700, "1 ms"),
        (50e3, "50 us"),
        (3.2e6, "3.2 ms"),
        (515e6, "515 ms"),
        (2e9, "2 s"),
    ],
)
def test_times_are_printed_for_people(value, expected):
    assert units.format_time(value) == expected


def test_other_quantities_are_printed_for_people():
    assert units.format_size(102_228_128) == "102 MB"
    assert units.format_size(626) == "626 B"
    assert units.format_bandwidth(2.5e9) == "2.5 Gbit/s"
    assert units.format_percent(0.237) == "24 %"
    assert units.format_percent(0.0142) == "1.4 %"
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
