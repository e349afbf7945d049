"""Sounds and videos that come with a request: what becomes of them, and which are refused, early
and in words."""

import http.client
import json
import socket
from base64 import b64encode
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
import torch
from helpers import picture_frames, tone, write_film, write_sound
from PIL import Image
from safetensors.torch import save_file

pytest.importorskip("fastapi", reason="the extra is not installed: pip install -e .[serve]")

from jobs import make_job, read_clip
from service_app import FORM, MOST_BODY, SIZE, SMALL, Got, Sent, Service, Workspace, form, get, listening, opened

from ltx_neuron.job import Size
from ltx_neuron.sampling.conditions import AttentionMask, ReferenceAudio, ReferenceVideo, Retake
from ltx_neuron.serve.__main__ import capability_jobs, reference_jobs
from ltx_neuron.service import media, sandbox
from ltx_neuron.service.jobs import job_of
from ltx_neuron.service.limits import MAX_JSON_BYTES
from ltx_neuron.service.settings import Limits
from ltx_neuron.weights.lora import Lora

FILM = Size(64, 96, 17)  # of what is made anew
LONGER = Size(64, 96, 33)  # of the window that makes it half a second longer
PAIR = Size(128, 256, 9, two_stage=True)  # of what is made with references
NONE = make_job()


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("files")
    write_sound(folder / "sound.wav", pcm(6.0), 8000, "pcm_s16le", "stereo", "s16")
    write_film(folder / "film.mp4", picture_frames(17, 64, 96, 1))
    write_film(folder / "odd.mp4", picture_frames(16, 66, 96, 1))
    write_film(folder / "heard.mkv", picture_frames(17, 64, 96, 1), sound=tone(48000, 17 / 24))
    Image.new("RGB", (64, 64)).save(folder / "picture.png")
    (folder / "text.txt").write_text("a text\n" * 100)
    (folder / "list.m3u8").write_text(f"#EXTM3U\n#EXTINF:1,\nfile://{folder}/sound.wav\n")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def service(tmp_path):
    """With graphs for a retake, and for references of an IC-LoRA."""
    style = tmp_path / "pose.safetensors"
    save_file({"x": torch.zeros(2)}, style, {"reference_downscale_factor": "2"})
    with opened(tmp_path) as made:
        sizes, reference = made.sizes, ReferenceVideo("x", 1.0, 9, 2)
        recorded = sizes.workspace.recorded
        recorded |= Workspace(FILM, LONGER, retake=Retake("x")).recorded
        for mask in (None, AttentionMask("x")):
            more = Workspace(PAIR, references=(reference,), attention_mask=mask).recorded
            recorded |= more
        sizes.upsamplers = {"spatial"}
        sizes.lora_sets = {"default": NONE, "pose": make_job(stage_1_loras=(Lora(style, 1.0),))}
        yield made


def post(service: Service, **fields) -> Got:
    body = form({"prompt": "waves"} | fields)
    return service.ask(Sent("POST", "/v1/videos", b"", service.headers(FORM), body))


def refused(service: Service, status: int = 400, **fields) -> dict:
    before = {*service.queue.folder.iterdir()}
    got = post(service, **fields)
    assert got.status == status, got.body
    assert {*service.queue.folder.iterdir()} == before  # nothing is left
    assert str(service.queue.folder) not in got.body.decode() and "--" not in got.error["message"]
    return got.error


def made(service: Service, **fields):
    """The job of a request, as a worker reads it, and the object that its client got."""
    got = post(service, **fields)
    assert got.status == 200, got.body
    video = json.loads(got.body)
    entry, folder = service.queue.get("ada", video["id"]), service.queue.folder_of(video["id"])
    assert entry.bytes == sum(path.stat().st_size for path in folder.iterdir())
    return job_of(entry.params, folder), video


# --- what they become -----------------------------------------------------------------------------


def test_a_sound_is_stored_beside_its_job_and_goes_with_it(service, files):
    sound = {"size": SIZE, "audio_reference": files["sound.wav"]}
    job, video = made(service, **sound, audio_start_time=0.5, audio_bed="-50")
    assert (job.sound.start_time, job.sound.bed, job.size, video["notes"]) == (0.5, -50, SMALL, [])
    assert Path(job.sound.path).read_bytes() == files["sound.wav"]
    folder = service.queue.folder_of(video["id"])
    assert Path(job.sound.path).parent == folder
    service.ask(Sent("DELETE", f"/v1/videos/{video['id']}", b"", service.headers()))
    assert not folder.exists()


def test_a_video_is_made_anew_at_its_own_size_or_made_longer(service, files):
    job, video = made(service, video_reference=files["film.mp4"], start_time="0.2", end_time="0.5")
    assert (job.retake.start_time, job.retake.end_time, job.size) == (0.2, 0.5, FILM)
    assert (video["size"], video["num_frames"]) == ("96x64", 17)
    job, video = made(service, video_reference=files["heard.mkv"], extend="0.5")
    assert (job.retake.extend, job.retake.source_frames) == (0.5, 17)
    assert (video["size"], video["num_frames"]) == ("96x64", 17 + 12)


def test_references_and_their_mask_go_with_an_ic_lora(service, files):
    reference = {
        "lora_set": "pose",
        "video_conditioning[video_url]": files["film.mp4"],
        "video_conditioning[strength]": "0.5",
    }
    job, video = made(service, **reference)
    assert [(each.strength, each.space_scale) for each in job.references] == [(0.5, 2)]
    assert video["two_stage"] and job.size in (PAIR, replace(PAIR, height=256, width=128))
    job, _ = made(service, **reference, conditioning_attention_mask=files["film.mp4"])
    assert Path(job.attention_mask.path).read_bytes() == files["film.mp4"]
    recorded = service.sizes.workspace.recorded
    for name in [name for name in recorded if "bias" in name]:
        del recorded[name]  # graphs with a mask
    error = refused(service, **reference, conditioning_attention_mask=files["film.mp4"])
    assert (
        error["code"] == "profile_mismatch"
        and "with video_conditioning and conditioning_attention_mask" in error["message"]
    )
    error = refused(service, video_conditioning=files["film.mp4"])
    assert error["code"] == "feature_not_supported" and "'pose'" in error["message"]
    assert refused(service, lora_set="pose", size="256x128")["param"] == "lora_set"


def test_a_video_is_dubbed_where_graphs_for_its_length_and_its_sounds_are_compiled(service, files, tmp_path):
    sizes, size = service.sizes, Size(128, 256, 17, two_stage=True)
    clip, lora = tmp_path / "clip.mkv", tmp_path / "dub.safetensors"
    clip.write_bytes(files["heard.mkv"])
    save_file({"x": torch.zeros(2)}, lora)
    dub = {"lora_set": "dub", "reference_video": files["heard.mkv"]}
    error = refused(service, reference_video=files["heard.mkv"])
    assert error["code"] == "feature_not_supported" and "available: none" in error["message"]
    sizes.lora_sets |= {"dub": make_job(loras=(Lora(lora, 1.0),))}
    assert refused(service, **dub)["code"] == "profile_mismatch"
    dubbing = read_clip(clip, (Lora(lora),))
    graphs = Workspace(size, **dubbing).recorded
    sizes.workspace.recorded |= graphs
    sizes._manifests = None  # as when a manifest is added
    job, video = made(service, **dub, reference_strength="0.5", size="256x128")
    assert job.dubbing.strength == 0.5 and job.size == size
    assert Path(job.reference_sound.path).read_bytes() == files["heard.mkv"]
    assert (video["num_frames"], video["fps"], video["two_stage"]) == (17, 24, True)
    made(service, **dub)  # any size for which it is compiled
    (model,) = json.loads(get(service, "/v1/models").body)["data"]
    assert {each["size"] for each in model["inputs"]["reference_video"]} == {"256x128", "128x256"}
    more = tone(48000, 1.2)
    long = write_film(tmp_path / "long.mkv", picture_frames(17, 64, 96, 1), sound=more)
    for fields, param, words in (
        ({"reference_video": long.read_bytes()}, "reference_video", "of 1.20 s of sound is not"),
        ({"size": "512x512"}, "reference_video", "num_frames 17, frame_rate 24.0"),
        ({"num_frames": "9"}, "num_frames", "says how many (17 of its 17 frames, 24 fps)"),
        ({"seconds": "2"}, "seconds", "does not go with reference_video"),
        ({"reference_video": files["film.mp4"]}, "reference_video", "has no sound"),
        ({"two_stage": "false"}, "reference_video", "got no two_stage"),
        ({"recipe": "dev"}, "reference_video", "got no recipe distilled"),
        ({"nag_scale": "11"}, "reference_video", "is not compiled"),
        ({"input_reference": files["picture.png"]}, "reference_video", "is not compiled"),
    ):
        error = refused(service, **dub | fields)
        assert error["param"] == param and words in error["message"], error


def test_a_voice_of_the_compiled_seconds_is_taken_and_another_is_refused_with_them(service, files, tmp_path):
    sizes, voice = service.sizes, {"lora_set": "pose", "reference_audio": files["sound.wav"]}
    assert refused(service, **voice)["code"] == "profile_mismatch"
    error = refused(service, **voice | {"lora_set": ""})
    assert error["code"] == "feature_not_supported" and "'pose'" in error["message"]
    both = sizes.lora_sets["pose"].stage_1_loras  # a LoRA of both stages is no voice's
    sizes.lora_sets |= {"hq": make_job(stage_1_loras=both, stage_2_loras=both)}
    assert refused(service, **voice | {"lora_set": "hq"})["code"] == "feature_not_supported"
    del sizes.lora_sets["hq"]
    compiled = [ReferenceAudio("x", latents) for latents in (51, 126)]  # of 2 and of 5 s
    for one in compiled:
        sizes.workspace.recorded |= Workspace(PAIR, reference_sound=one).recorded
    sizes._manifests = None  # as when a manifest is added
    error = refused(service, **voice)
    assert (error["code"], error["param"]) == ("profile_mismatch", "reference_audio")
    assert "of 6.00 s of sound (compiled: 2.00, 5.00) is not compiled" in error["message"]
    assert {each["size"] for each in error["compiled"]} == {"256x128", "128x256"}
    for seconds, latents in ((5, 126), (2, 51)):
        job, video = made(service, **voice, size="256x128", reference_audio_max_duration=seconds)
        assert (job.reference_sound.latents, job.size) == (latents, PAIR)
        assert video["notes"] == ["no LoRA has layers of the sound, so the voice may not be taken over"]
    voice["reference_audio_max_duration"] = 5
    (model,) = json.loads(get(service, "/v1/models").body)["data"]
    sides = {"256x128", "128x256"}
    assert {each["size"] for each in model["inputs"]["reference_audio"]} == sides
    assert model["reference_audio_seconds"] == [2.0, 5.0]
    for fields, param, words in (
        ({"identity_guidance_scale": "2"}, "identity_guidance_scale", "is of the dev recipe"),
        ({"audio_reference": files["sound.wav"]}, "reference_audio", "that sound is what is heard"),
    ):
        error = refused(service, **voice | fields)
        assert error["param"] == param and words in error["message"], error
    error = refused(service, identity_guidance_scale="2", size=SIZE)
    assert "needs reference_audio" in error["message"]


def pcm(seconds: float):
    return (tone(8000, seconds) * 2**15).short().T.reshape(1, -1).contiguous().numpy()


def test_a_worker_must_have_an_ic_loras_weights_and_no_reference_for_it(service):
    sizes = service.sizes
    assert [job.all_loras for job in capability_jobs(sizes)] == [(), ()]
    (job,) = reference_jobs(sizes)
    assert job.stages[0].loras == sizes.lora_sets["pose"].stage_1_loras


def test_the_model_lists_the_inputs_that_it_takes_with_their_sizes(service):
    (model,) = json.loads(get(service, "/v1/models").body)["data"]
    listed = {name: {each["size"] for each in sizes} for name, sizes in model["inputs"].items()}
    turned, second = {SIZE, "512x768"}, {"256x128", "128x256"}  # of the pair's second stage
    assert listed == {
        "input_reference": turned,
        "audio_reference": turned | second,
        "video_reference": {"96x64", "64x96"},
        "video_conditioning": {"256x128", "128x256"},
        "conditioning_attention_mask": {"256x128", "128x256"},
    }
    service.sizes.lora_sets = {"default": NONE}  # no LoRA for references
    assert {*service.sizes.inputs} == {"input_reference", "audio_reference", "video_reference"}


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["picture.png", "text.txt", "list.m3u8", "film.mp4", "sound.wav"])
@pytest.mark.parametrize(("kind", "valid"), [("audio", "sound.wav"), ("video", "film.mp4")])
def test_a_file_of_another_kind_is_refused_by_its_content(service, files, name, kind, valid):
    if name != valid:
        error = refused(service, **{f"{kind}_reference": files[name], "size": ""})
        assert (error["code"], error["param"]) == (f"invalid_{kind}", f"{kind}_reference")
        assert error["message"].startswith(f"{kind}_reference: it ")


def test_inputs_that_do_not_fit_are_refused_by_the_requests_fields(service, files):
    sound, film = files["sound.wav"], {"video_reference": files["film.mp4"]}
    part = {"start_time": "0", "end_time": "0.5"}
    for fields, param, message in (
        ({"audio_reference": sound, "audio_start_time": "3"}, "audio_reference", "num_frames"),
        ({"audio_reference": sound, "size": SIZE, "audio_bed": "5"}, "audio_bed", "less than 0"),
        ({"audio_start_time": "3"}, "audio_start_time", "audio_reference"),
        (film, "video_reference", "needs start_time"),
        (film | {"start_time": "0", "end_time": "9"}, "start_time", "reaches beyond"),
        (film | part | {"size": "96x64"}, "height", "video_reference"),
        (film | part | {"seconds": "1"}, "seconds", "does not go with video_reference"),
        ({"video_reference": files["odd.mp4"]} | part, "video_reference", "multiples of 32"),
        (film | part | {"audio_reference": sound}, "video_reference", "audio_reference"),
        (film | {"extend": "0.5", "num_frames": "17"}, "num_frames", "25 to 33 frames here"),
        (film | {"extend": "61"}, "extend", "at most 60 s"),
    ):
        error = refused(service, **fields)
        assert error["param"] == param and message in error["message"], error
    service.sizes.workspace.recorded = Workspace(SMALL, retake=Retake("x")).recorded
    service.sizes._manifests = None  # as when a manifest is added
    error = refused(service, **film, start_time="0.1", end_time="0.2")
    assert (error["code"], error["param"]) == ("profile_mismatch", "video_reference")
    assert {size["size"] for size in error["compiled"]} == {SIZE, "512x768"}


def test_a_file_beyond_its_kinds_limit_is_refused_while_it_arrives(service, files):
    sizes = {"image": 100, "audio": 2000, "video": 1000}
    service.submitter.limits = Limits(**{f"max_{kind}_mb": size / 2**20 for kind, size in sizes.items()})
    for field, most in (("input_reference", 100), ("audio_reference", 2000), ("video_conditioning[video_url]", 1000)):
        error = refused(service, 413, **{field: files["sound.wav"]})
        assert (error["code"], error["param"]) == ("file_too_large", field)
        assert f"{most} bytes" in error["message"]
    headers = service.headers(content_length=b"%d" % (MAX_JSON_BYTES + 1))  # held in memory
    got = service.ask(Sent("POST", "/v1/videos", b"", headers, b"{}"))
    assert (got.status, got.error["code"]) == (413, "body_too_large")


def test_files_of_waiting_jobs_are_counted(service, files):
    service.submitter.limits = Limits(max_queue_gb=1.5 * len(files["sound.wav"]) / 1e9)
    fields = {"size": SIZE, "audio_reference": files["sound.wav"]}
    assert post(service, **fields).status == 200
    assert refused(service, 429, **fields)["code"] == "queue_full"


def test_a_file_beyond_the_limits_of_what_it_shows_is_refused(tmp_path, files):
    for name, kind, limits, words in (
        ("sound.wav", "audio", Limits(max_media_seconds=5), "longer than 5 s"),
        ("film.mp4", "video", Limits(max_media_seconds=0.5), "longer than 0.5 s"),
        ("film.mp4", "video", Limits(max_video_pixels=6000), "96x64 pixels, wanted at most 6000"),
    ):
        (tmp_path / name).write_bytes(files[name])
        with pytest.raises(sandbox.BadFile, match=words):
            media.check(tmp_path / name, kind, limits)
        media.check(tmp_path / name, kind, Limits())


@pytest.mark.parametrize("head", [b"Content-Length: 1073741824", b"Transfer-Encoding: chunked"])
def test_a_gigabyte_is_refused_before_it_is_read_and_in_chunks_at_the_limit(service, head):
    """On a real server, which closes the connection."""
    with listening(service) as address, socket.create_connection(address, timeout=20) as connection:
        lines = [b"POST /v1/videos HTTP/1.1", b"Host: 127.0.0.1:8000", head, b"Content-Type: " + FORM]
        connection.sendall(b"\r\n".join([*lines, b"Authorization: Bearer " + service.token, b"", b""]))
        sent, piece = 0, b'--b\r\nContent-Disposition: form-data; name="audio_reference"; filename="a"\r\n\r\n'
        with suppress(OSError):  # it has answered, and reads no more
            while b"chunked" in head and sent < 64 * MOST_BODY:
                connection.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
                sent, piece = sent + len(piece), bytes(2**16)
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (413, "body_too_large")
        assert sent < 64 * MOST_BODY


def test_an_image_is_a_reference_that_all_frames_show(service, files):
    """As a file or a data URL."""
    sheet = {"lora_set": "pose", "video_conditioning[image_url]": files["picture.png"]}
    for sent in (sheet, {"lora_set": "pose", "video_conditioning": files["picture.png"]}):
        job, video = made(service, **sent)
        (reference,) = job.references
        assert reference.still and reference.pixels(job.size.first)[0] == job.size.num_frames == 9
        assert video["two_stage"]
        folder = service.queue.folder_of(video["id"])
        assert [path.name for path in folder.iterdir()] == [Path(reference.path).name]
        with Image.open(reference.path) as shown, Image.open(BytesIO(files["picture.png"])) as sent:
            assert shown.format == "PNG" and shown.tobytes() == sent.tobytes()
    url = "data:image/png;base64," + b64encode(files["picture.png"]).decode()
    for key in ("image_url", "video_url"):
        body = {"prompt": "waves", "lora_set": "pose", "video_conditioning": [{key: url}]}
        headers = service.headers()
        got = service.ask(Sent("POST", "/v1/videos", b"", headers, json.dumps(body).encode()))
        assert got.status == 200, got.body
    cut = files["picture.png"][:60]
    error = refused(service, **sheet | {"video_conditioning[image_url]": cut})
    assert (error["code"], error["param"]) == ("invalid_image", "video_conditioning[0]")
    service.submitter.limits = Limits(max_image_mb=50 / 2**20)
    error = refused(service, 413, **sheet)
    assert (error["code"], error["param"]) == ("file_too_large", "video_conditioning[0]")


def test_a_tail_takes_the_graphs_of_the_sum_and_the_video_is_as_long_as_asked(service, files):
    longer = replace(SMALL, num_frames=SMALL.num_frames + 8)
    for asked in ({"num_frames": "121"}, {"seconds": "5"}, {}):
        error = refused(service, tail_frames="8", size=SIZE, **asked)
        assert error["code"] == "profile_mismatch"
        recorded = dict(service.sizes.workspace.recorded)
        service.sizes.workspace.recorded |= Workspace(longer).recorded
        job, video = made(service, tail_frames="8", size=SIZE, **asked)
        service.sizes.workspace.recorded = recorded
        assert (job.size, job.tail_frames) == (longer, 8)
        assert (video["num_frames"], video["seconds"], video["notes"]) == (121, "5", [])
    job, video = made(service, tail_frames="8", num_frames="113", size=SIZE)
    assert (job.size, video["num_frames"]) == (SMALL, 113)
    error = refused(service, tail_frames="12", size=SIZE)
    assert error["param"] == "tail_frames" and "multiple of 8" in error["message"]
    film = {"video_reference": files["film.mp4"], "start_time": "0.1", "end_time": "0.2"}
    assert refused(service, tail_frames="8", **film)["param"] == "video_reference"
