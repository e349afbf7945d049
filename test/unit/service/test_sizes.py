"""The compiled sizes: that of a request, and how compiling records them."""

import json
import os

import pytest
from jobs import make_job, replace
from service_app import SMALL, Compiled

from ltx_neuron.backends.manifest import record_size, recorded_sizes
from ltx_neuron.files import MANIFEST, write_json
from ltx_neuron.job import Job, Size
from ltx_neuron.sampling.conditions import ImageCondition
from ltx_neuron.sampling.spec import LoraFile
from ltx_neuron.service.api_error import ApiError
from ltx_neuron.service.sizes import CompiledSize, RequestedSize, SizeRegistry

TALL, LARGE = Size(768, 512, 121), Size(1024, 1536, 121, two_stage=True)
DEFAULT = CompiledSize(SMALL, "distilled")


def registry(*sizes: Size, **more) -> SizeRegistry:
    return SizeRegistry(Compiled(*sizes, **more), DEFAULT, upsamplers={"spatial"})


def offered(sizes: SizeRegistry) -> set[Size]:
    return {compiled.size for compiled in sizes.compiled}


def refusal(sizes: SizeRegistry, requested: RequestedSize, job: Job | None = None) -> ApiError:
    with pytest.raises(ApiError) as caught:
        sizes.choose(requested, job or Job())
    assert (caught.value.status, caught.value.code) == (400, "profile_mismatch")
    return caught.value


def test_a_record_offers_its_size_in_both_orientations_and_those_of_its_stages_unless_it_is_damaged():
    sizes = registry(SMALL)
    sizes.workspace.recorded["damaged"] = [{}, {"recipe": "dev"}, {"recipe": "dev", "height": "a"}, "x"]
    for rate in (0, float("nan"), "24"):
        sizes.workspace.recorded["damaged"].append(vars(LARGE) | {"frame_rate": rate, "recipe": "dev"})
    assert offered(sizes) == {SMALL, TALL}
    assert {size.recipe for size in registry(SMALL, recipe="dev").compiled} == {"dev"}
    stages = {Size(*sides, 121) for sides in ((512, 768), (768, 512), (1024, 1536), (1536, 1024))}
    assert offered(registry(LARGE)) == stages | {LARGE, replace(LARGE, height=1536, width=1024)}
    assert offered(SizeRegistry(Compiled(LARGE), DEFAULT, upsamplers=())) == stages


def test_graphs_without_a_recorded_size_serve_who_requests_exactly_that():
    same, large = Size(256, 1536, 121), Size(512, 1024, 121)  # as many pixels: the graph has its tokens
    sizes = registry(SMALL, large)
    sizes.workspace.recorded[make_job("", large).buckets[0].name] = []  # an earlier version compiled them
    assert offered(sizes) == {SMALL, TALL}
    for size in (same, large):
        assert sizes.choose(RequestedSize(height=size.height, width=size.width)).size == size


def test_sizes_are_read_again_when_a_manifest_changes(tmp_path):
    sizes = registry(SMALL, artifacts=tmp_path)
    assert len(sizes.compiled) == 2
    folder = tmp_path / "graphs" / "dit-1"
    folder.mkdir(parents=True)
    sizes.workspace.recorded |= Compiled(LARGE).recorded
    assert len(sizes.compiled) == 2  # a folder is no graph before it has a manifest
    write_json(folder / MANIFEST, {})
    assert LARGE in offered(sizes)
    sizes.workspace.recorded |= Compiled(later := Size(256, 256, 49)).recorded  # for graphs that exist
    os.utime(folder / MANIFEST, (0, 0))
    assert later in offered(sizes)


def test_a_size_is_recorded_once_beside_others_and_changes_nothing_else(tmp_path):
    write_json(tmp_path / MANIFEST, content := {"identity": {"bucket": "a"}, "graphs": {}})  # of an earlier version
    sizes = [vars(size) | {"recipe": "dev"} for size in (SMALL, LARGE)]
    for size in (*sizes, sizes[0]):
        record_size(tmp_path, size)
    written = json.loads((tmp_path / MANIFEST).read_text())
    assert written.pop("checksum") and written == content | {"sizes": sizes} and recorded_sizes(tmp_path) == sizes


def test_a_request_gets_its_values_with_the_default_or_compiled_others_or_is_told_what_is_compiled():
    wide, large = Size(704, 1280, 97), replace(LARGE, num_frames=97)
    for requested, expected in (
        (RequestedSize(), SMALL),
        (RequestedSize(width=704, height=1280), replace(wide, height=1280, width=704)),
        (RequestedSize(num_frames=97), large.first),
        (RequestedSize(seconds=4.0, two_stage=True), large),
        # The sound of its frames has as many tokens as at 24.
        (RequestedSize(frame_rate=23.976), replace(SMALL, frame_rate=23.976)),
    ):
        assert registry(SMALL, TALL, wide, large).choose(requested).size == expected
    longer = registry(replace(wide, num_frames=193), wide)
    assert longer.choose(RequestedSize()).size == wide  # whose length is nearer to the default's
    assert longer.served_default.size == wide and registry().served_default is None
    others = {"width": 800, "num_frames": 120, "seconds": 8.0, "frame_rate": 30.0, "two_stage": True, "recipe": "dev"}
    for name, value in others.items():
        error = refusal(registry(SMALL), RequestedSize(**{name: value}))
        assert "768x512, 121 frames at 24 fps (5 s)" in error.message
        assert {"768x512", "512x768"} == {size["size"] for size in error.content["error"]["compiled"]}


def test_an_image_needs_a_graph_that_holds_images():
    image = (ImageCondition("x"),)
    message = refusal(registry(SMALL), RequestedSize(), make_job(images=image)).message
    assert "the default size with images is not compiled" in message
    assert registry(SMALL, images=image).choose(RequestedSize(), make_job(images=image)).size == SMALL
    # An image at frame 0 needs the graphs of text to video; another one has its own.
    for frame, field in ((0, "input_reference"), (8, "images")):
        assert {*registry(SMALL, images=(ImageCondition("x", frame),)).inputs} - {"audio_reference"} == {field}


@pytest.mark.parametrize("distilled", [(), (LoraFile("/lora", 1.0),)])
def test_refinement_is_offered_with_the_distilled_lora_alone(distilled):
    sets = {"default": Job(distilled_lora=distilled)}
    sizes = SizeRegistry(Compiled(LARGE, recipe="dev"), CompiledSize(SMALL, "dev"), {"spatial"}, sets)
    assert {size.refines for size in sizes.compiled} == {False} | {bool(distilled)}
    for size in sizes.compiled:
        assert sizes.loras(None, size)["distilled_lora"] == (distilled if size.refines else ())


def test_with_neuron_vae_a_size_is_offered_if_its_decoder_is_compiled():
    machine = Compiled(TALL)  # its decoder is not compiled for the transpose
    machine.decoder_graphs, machine.encoder_graphs = lambda latent: [latent], lambda job: []
    machine.is_made = lambda latent: latent == (16, 24, 16)
    assert offered(SizeRegistry(machine, CompiledSize(TALL, "distilled"), (), neuron_vae=True)) == {TALL}


def test_a_long_clip_needs_the_graphs_of_its_windows_and_a_refusal_says_which_lengths_have_no_others():
    sizes = registry(Size(512, 768, 97 + 2 * 72), chunked=True)
    longer, odd = (RequestedSize(num_frames=count, width=768, height=512) for count in (745, 753))
    assert sizes.choose(longer, Job(chunked=True)).size.num_frames == 97 + 9 * 72 == 745
    message = refusal(sizes, odd, Job(chunked=True)).message
    assert "with chunked in windows (97 + n x 72 frames need no shorter last one)" in message
    assert "768x512, 97 frames" in message
    refusal(sizes, longer)  # in one window
