"""Tables and numbers of messages and reports."""

from ltx_neuron.format import columns, format_bytes, format_flops, format_seconds


def test_columns_align_text_at_its_start_and_numbers_at_their_end():
    rows = [("name", "seconds", "note"), ("a", "10.00", "long"), ("longer", "1.00", "")]
    assert columns(rows, left=(0, -1)) == ["name    seconds  note", "a         10.00  long", "longer     1.00"]


def test_numbers_are_in_the_unit_that_a_person_reads():
    sizes = {None: "-", 0: "0 B", 1500: "1.5 kB", 25e6: "25.0 MB", 37.17e9: "37.17 GB"}
    assert {count: format_bytes(count) for count in sizes} == sizes
    assert (format_flops(199e12), format_flops(None)) == ("199.0 TFLOP", "-")
    assert [*map(format_seconds, (9.6, 720, 20160))] == ["10 s", "12 min", "5.6 h"]
