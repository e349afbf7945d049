"""benchmarks/on_device.py: sections that survive failures and restarts, the three-way rule, and the
report."""

from argparse import Namespace

import on_device
import pytest
from helpers import one_thread, randn  # noqa: F401
from lib.sections import Failed, NotRun, Section, markdown, restored, run_all, three_way

from ltx_neuron.config import transformer_config
from ltx_neuron.errors import UserError
from ltx_neuron.files import write_json
from ltx_neuron.profiles import resolve
from ltx_neuron.tiny.config import TinySizes, released_config, tiny_config

FACTS = {"profile": "cpu"}


def section(
    name: str, *needs: str, raises: Exception | None = None, ran: list | None = None
) -> Section:
    """A section that appends its name to `ran`, then reports a line or fails with `raises`."""

    def run(bench) -> list[str]:
        if ran is not None:
            ran.append(name)
        if raises:
            raise raises
        return [f"{name} found something"]

    return Section(name, run, needs)


def test_a_failed_section_is_recorded_and_what_does_not_need_it_goes_on():
    broken = Failed("it broke", ["a row"])
    sections = (
        section("a", raises=broken),
        section("b", "a"),
        section("c"),
        section("d", "b"),
        section("e", "c"),
    )
    kept = []
    done = run_all(sections, None, {}, lambda now: kept.append(dict(now)))
    assert {name: result["status"] for name, result in done.items()} == {
        "a": "failed",
        "b": "not run",
        "c": "done",
        "d": "not run",
        "e": "done",
    }
    assert (
        done["a"]["why"] == "it broke"
        and done["a"]["lines"] == ["a row"]
        and done["b"]["why"] == "needs a"
    )
    assert [len(now) for now in kept] == [1, 2, 3, 4, 5]


def test_any_error_is_a_failed_section_and_no_section_that_cannot_run_is_one():
    sections = (
        section("a", raises=ZeroDivisionError("x")),
        section("b", raises=UserError("typed wrongly")),
        section("c", raises=NotRun("no Neuron device")),
    )
    done = run_all(sections, None, {}, lambda now: None)
    assert (
        done["a"]["status"] == done["b"]["status"] == "failed" and done["c"]["status"] == "not run"
    )
    assert (
        "Traceback" in done["a"]["why"]
        and done["b"]["why"] == "typed wrongly"
        and done["c"]["why"] == "no Neuron device"
    )


def test_typed_again_only_what_is_not_finished_runs(tmp_path):
    ran, path = [], tmp_path / "state.json"

    def sections(**raises):
        return tuple(section(name, ran=ran, raises=raises.get(name)) for name in ("a", "b", "c"))

    keep = lambda now: write_json(path, {"identity": {"code": "1"}, "sections": now})  # noqa: E731
    run_all(
        sections(b=Failed("broke"), c=NotRun("no file")),
        None,
        restored(path, {"code": "1"}, False),
        keep,
    )
    again = run_all(sections(), None, restored(path, {"code": "1"}, False), keep)
    assert ran == ["a", "b", "c", "b", "c"] and {result["status"] for result in again.values()} == {
        "done"
    }
    assert restored(path, {"code": "1"}, anew=True) == {}
    with pytest.raises(UserError, match="of another run: code differ. Type --anew"):
        restored(path, {"code": "2"}, False)


def test_the_report_names_every_section_and_shows_what_each_found():
    sections = (
        section("a"),
        section("b", raises=Failed("it | broke\nhere", ["half of it"])),
        section("c"),
        section("d"),
    )
    done = run_all(sections[:3], None, {}, lambda now: None)
    text = markdown(sections, done, FACTS)
    assert (
        "- profile: cpu" in text
        and "| a | done |" in text
        and "| b | failed: it \\| broke |" in text
    )
    assert "| d | not run: not reached |" in text and "## a\n\na found something" in text
    assert "half of it\n\n```\nit | broke\nhere\n```" in text


def test_the_rule_compares_with_twice_the_cpu_s_own_rounding():
    exact = {"video": randn(1, 8, 16), "audio": randn(1, 4, 16, seed=1)}

    def off(share: float, seed: int) -> dict:
        """The tensors with an error of that share of their norm."""
        tensors = {}
        for name, value in exact.items():
            error = randn(*value.shape, seed=seed)
            tensors[name] = value + share * value.norm() * error / error.norm()
        return tensors

    assert "| video | 2.3" in three_way(off(0.023, 2), off(0.01, 3), exact, ("video", "audio"))[2]
    with pytest.raises(
        Failed, match="further from fp32 than the rule allows: video, audio"
    ) as failed:
        three_way(off(0.027, 2), off(0.01, 3), exact, ("video", "audio"))
    assert len(failed.value.lines) == 4
    nan = {name: value * float("nan") for name, value in exact.items()}
    with pytest.raises(Failed):
        three_way(nan, off(0.01, 3), exact, ("video",))
    with pytest.raises(Failed):
        three_way(exact, nan, exact, ("video",))


def test_the_wide_model_has_the_release_s_width_and_two_blocks():
    wide, released = (
        transformer_config(config) for config in (tiny_config(on_device.WIDE), released_config())
    )
    assert wide.num_layers == 2 and released.num_layers == 48
    for size in ("video", "audio", "video_connector", "audio_connector"):
        assert getattr(wide, size) == getattr(released, size)


def test_the_tiny_model_s_heads_are_too_small_for_the_kernel_and_the_wide_one_s_are_not():
    def settings(profile: str, name: str) -> tuple[str, ...]:
        bench = on_device.Bench(Namespace(dtype="bfloat16"), resolve(profile, ("lnc=2",)))
        model = on_device.Model(name, None, None, None, on_device.TINY_SIZE, None)
        return bench.device(model).settings

    # nki-library tests attention_cte with heads of 64 channels and more.
    assert min(TinySizes().head_dim, TinySizes().audio_head_dim) < 64
    assert min(on_device.WIDE.head_dim, on_device.WIDE.audio_head_dim) >= 64
    assert settings("trn2.3xlarge", "tiny") == ("lnc=2", "attention=matmul")
    for profile, name in (("trn2.3xlarge", "wide"), ("trn2.3xlarge", "full"), ("cpu", "tiny")):
        assert settings(profile, name) == ("lnc=2",)


def test_sections_need_only_sections_that_come_before_them():
    names = [section.name for section in on_device.SECTIONS]
    assert len(names) == len(set(names))
    for index, section in enumerate(on_device.SECTIONS):
        assert set(section.needs) <= set(names[:index])
