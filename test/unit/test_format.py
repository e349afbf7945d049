"""Tables and numbers of messages and reports."""

import pytest

from ltx_neuron.format import columns, format_bytes, format_flops


def test_columns_align_text_at_its_start_and_numbers_at_their_end():
    rows = [("name", "seconds", "note"), ("a", "10.00", "long"), ("longer", "1.00", "")]
    assert columns(rows, left=(0, -1)) == ["name    seconds  note", "a         10.00  long", "longer     1.00"]


BYTES = {None: "-", 0: "0 B", 1500: "1.5 kB", 25e6: "25.0 MB", 37.17e9: "37.17 GB"}


@pytest.mark.parametrize("count, text", BYTES.items())
def test_bytes_are_decimal(count, text):
    assert format_bytes(count) == text


def test_flops_are_tera():
    assert (format_flops(199e12), format_flops(None)) == ("199.0 TFLOP", "-")
