"""What becomes of a request: a job with its files, or a refusal in words that leaves nothing."""

from base64 import b64encode
from io import BytesIO
from pathlib import Path

import pytest
import torch
from jobs import make_job, read_clip
from PIL import Image
from safetensors.torch import save_file
from service_app import FORM, SIZE, SMALL, VIDEOS, Compiled, Sent, form, opened

from ltx_neuron.job import Size
from ltx_neuron.sampling.conditions import AttentionMask, ImageCondition, ReferenceAudio, ReferenceVideo, Retake
from ltx_neuron.serve.__main__ import capability_jobs, reference_jobs
from ltx_neuron.service import media, picture, sandbox
from ltx_neuron.service.jobs import job_of
from ltx_neuron.service.limits import MAX_JSON_BYTES
from ltx_neuron.service.settings import Limits
from ltx_neuron.weights.lora import Lora

EXAMPLE_FILES = {"wav": "sound.wav", "mp4": "film.mp4", "mkv": "heard.mkv", "png": "picture.png"}
FILM = Size(64, 96, 57)  # of the videos that are sent: longer than the parts that examples name
WINDOW = Size(64, 96, 105)  # that makes it two seconds longer
PAIR, WIDE = Size(128, 192, 57, two_stage=True), Size(128, 256, 57, two_stage=True)  # made with references
WITH_TAIL = Size(*SMALL.sides, SMALL.num_frames + 8)
LONG = Size(*SMALL.sides, 121 + 96)  # in two windows
TILES = {"tile_height": 64, "tile_width": 96}  # six of PAIR's second stage
POSE = {"lora_set": "pose", "video_conditioning": "film.mp4", "size": "192x128", "two_stage": "true"}
PART = {"video_reference": "film.mp4", "start_time": "0.2", "end_time": "0.5"}
SOUND = {"size": SIZE, "audio_reference": "sound.wav"}
DUB = {"lora_set": "dub", "reference_video": "heard.mkv"}
VOICE = {"lora_set": "pose", "reference_audio": "sound.wav"}
SHORT_VOICE = VOICE | {"reference_audio_max_duration": 2}
TILED = POSE | {"stage_2_ic_lora": "true", "tile": "1"} | {name: str(side) for name, side in TILES.items()}


def with_files(fields: dict, files: dict[str, bytes]) -> dict:
    """Fields with the files that they name, and those of the kind that an example names."""
    kinds = {name: EXAMPLE_FILES.get(str(value).rpartition(".")[2], value) for name, value in fields.items()}
    return {name: files.get(fields[name], files.get(kind, fields[name])) for name, kind in kinds.items()}


@pytest.fixture(scope="module")
def opened_studio(tmp_path_factory, files):
    """A service with graphs for each kind of job."""
    folder = tmp_path_factory.mktemp("studio")
    loras = {name: (Lora(folder / f"{name}.safetensors"),) for name in ("pose", "half", "dub")}
    for name, (lora,) in loras.items():
        save_file({"x": torch.zeros(2)}, lora.path, {"reference_downscale_factor": "2"} if name == "half" else None)
    (folder / "heard.mkv").write_bytes(files["heard.mkv"])
    reference, half = (ReferenceVideo("x", 1.0, FILM.num_frames, scale) for scale in (1, 2))
    posed = {"references": (reference,)}
    with opened(folder) as service:
        sizes = service.sizes
        sizes.lora_sets = {name: make_job(stage_1_loras=loras[name]) for name in ("pose", "half")}
        # A LoRA of both stages is no voice's.
        sizes.lora_sets["both"] = make_job(stage_1_loras=loras["pose"], stage_2_loras=loras["pose"])
        sizes.lora_sets |= {"default": make_job(), "dub": make_job(loras=loras["dub"])}
        sizes.upsamplers = {"spatial"}
        for of, inputs in (
            ((SMALL, WITH_TAIL), {}),
            ((LONG,), {"chunked": True, "chunk_pixel_frames": 121}),
            ((SMALL,), {"images": (ImageCondition("x"),)}),
            ((SMALL,), {"images": (ImageCondition("x"), ImageCondition("x", 120, 0.8))}),
            ((SMALL,), {"recipe": "dev"}),
            ((FILM, WINDOW), {"retake": Retake("x")}),
            ((PAIR,), posed),
            ((PAIR,), posed | {"attention_mask": AttentionMask("x")}),
            ((PAIR,), posed | {"stage_2_ic_lora": True}),
            ((PAIR,), posed | TILES | {"tile": True, "stage_2_ic_lora": True}),
            ((WIDE,), {"references": (half,)}),
            *(((PAIR,), {"reference_sound": ReferenceAudio("x", latents)}) for latents in (51, 126)),  # 2 and 5 s
            ((PAIR,), read_clip(folder / "heard.mkv", loras["dub"])),
        ):
            sizes.workspace.recorded |= Compiled(*of, **inputs).recorded
        yield service


@pytest.fixture
def studio(opened_studio, monkeypatch):
    """Sounds and videos are not decoded to be checked."""
    monkeypatch.setattr(media, "check", lambda *_: None)
    return opened_studio


def job_sent(service, **fields) -> tuple:
    """The job of a form, as a worker reads it, the object that its client got, and the job's folder."""
    got = service.post_form(**fields)
    assert got.status == 200, got.body
    folder, entry = service.queue.folder_of(got.json["id"]), service.queue.get("ada", got.json["id"])
    assert entry.bytes == sum(path.stat().st_size for path in folder.iterdir())
    return job_of(entry.params, folder), got.json, folder


def refusal_of(service, status: int = 400, **fields) -> dict:
    """The error of a form; nothing of it is left, and its words name fields and no flag or folder."""
    before = {*service.queue.folder.iterdir()}
    got = service.post_form(**fields)
    assert got.status == status, got.body
    assert {*service.queue.folder.iterdir()} == before
    assert str(service.queue.folder) not in got.body.decode() and "--" not in got.error["message"]
    return got.error


def value_of(job, path: str):
    for part in path.split("."):
        job = job[int(part)] if part.isdigit() else getattr(job, part)
    return job


HALF = {"lora_set": "half", "video_conditioning[video_url]": "film.mp4", "video_conditioning[strength]": "0.5"}
WINDOWS = {"size": SIZE, "num_frames": "217", "chunk_pixel_frames": "121", "next_prompts": '["night falls"]'}
IN_WINDOWS = {"windows.1.chunk.start": 96, "windows.1.prompts.1": "night falls", "size": LONG}
NO_VOICE = "no LoRA has layers of the sound, so the voice may not be taken over"
IN_FILM, IN_WINDOW = ({"size": "96x64", "num_frames": size.num_frames} for size in (FILM, WINDOW))
DUBBED = DUB | {"reference_strength": "0.5", "size": "192x128"}
# Fields, values of the job, and of the object that the client gets
JOBS = {
    "a sound": (SOUND | {"audio_start_time": "1", "audio_bed": "-50"}, {"sound.start_time": 1, "sound.bed": -50}, {}),
    "a part of a film": (PART, {"retake.start_time": 0.2, "retake.end_time": 0.5, "size": FILM}, IN_FILM),
    "a longer film": ({"video_reference": "heard.mkv", "extend": "2"}, {"retake.extend": 2}, IN_WINDOW),
    "a reference": (HALF, {"references.0.strength": 0.5, "references.0.space_scale": 2, "size": WIDE}, {}),
    "a mask": (POSE | {"conditioning_attention_mask": "film.mp4"}, {"attention_mask.strength": 1.0}, {}),
    "tiles of a size": (TILED, TILES | {"tile": True, "stage_2_ic_lora": True, "size": PAIR}, {}),
    "a voice of 2 s": (SHORT_VOICE, {"reference_sound.latents": 51, "size": PAIR}, {"notes": [NO_VOICE]}),
    "another language": (DUBBED, {"dubbing.strength": 0.5, "size": PAIR}, {"num_frames": 57, "two_stage": True}),
    "a tail": ({"size": SIZE, "tail_frames": "8"}, {"size": WITH_TAIL}, {"seconds": "5", "notes": []}),
    "a long clip": (WINDOWS, IN_WINDOWS, {"seconds": "9", "prompt": "waves"}),
}


@pytest.mark.parametrize(("fields", "values", "answer"), JOBS.values(), ids=JOBS)
def test_a_request_becomes_a_job_with_its_files_beside_it(studio, files, fields, values, answer):
    job, video, folder = job_sent(studio, **(fields := with_files(fields, files)))
    assert {path: value_of(job, path) for path in values} == values
    assert {name: video[name] for name in answer} == answer
    sent = {value for value in fields.values() if isinstance(value, bytes)}
    assert {path.read_bytes() for path in folder.iterdir()} == sent
    assert studio.send("DELETE", f"{VIDEOS}/{video['id']}").status == 200 and not folder.exists()


def test_a_form_with_a_sound_is_the_same_job_when_it_is_sent_again_with_its_key(service, files):
    service.submitter.limits = Limits(max_queue_gb=1.5 * len(files["sound.wav"]) / 1e9)
    headers = service.headers(FORM, idempotency_key=b"k")
    contents = (files["sound.wav"], files["sound.wav"], files["heard.mkv"])
    bodies = [form({"prompt": "waves", "size": SIZE, "audio_reference": content}) for content in contents]
    first, again, other = (service.ask(Sent("POST", VIDEOS, b"", headers, body)) for body in bodies)
    assert (first.status, again.status, other.status) == (200, 200, 409), again.body
    assert first.json["id"] == again.json["id"]
    # Another job has no room: the files of waiting jobs are counted.
    assert refusal_of(service, 429, **with_files(SOUND, files))["code"] == "queue_full"


def test_every_example_of_a_body_is_accepted_and_fits_its_schema(studio, files):
    jsonschema = pytest.importorskip("jsonschema")
    described, videos = studio.get("/openapi.json").json, {}
    schema = described["components"]["schemas"]["VideoRequest"]
    validator = jsonschema.Draft202012Validator({**schema, "components": described["components"]})
    kinds = described["paths"][VIDEOS]["post"]["requestBody"]["content"]
    for kind, content in kinds.items():
        for name, example in content["examples"].items():
            fields, is_json = example["value"], kind == "application/json"
            if is_json:
                validator.validate(fields)
            got = studio.post(**fields) if is_json else studio.post_form(**with_files(fields, files))
            assert got.status == 200, (kind, name, got.body)
            videos[name] = got.json
            studio.send("DELETE", f"{VIDEOS}/{got.json['id']}")
    assert (videos["dev recipe"]["recipe"], videos["keyframes"]["size"]) == ("dev", SIZE)
    assert described["paths"]["/v1/videos/sync"]["post"]["requestBody"]["content"] == kinds


def test_a_picture_is_a_reference_that_all_frames_show(studio, files):
    sheet, url = files["picture.png"], "data:image/png;base64," + b64encode(files["picture.png"]).decode()
    for field in ("video_conditioning[image_url]", "video_conditioning"):
        job, _, folder = job_sent(studio, lora_set="pose", **{field: sheet})
        (reference,) = job.references
        assert reference.still and reference.pixels(job.size.first)[0] == job.size.num_frames
        assert [path.name for path in folder.iterdir()] == [Path(reference.path).name]
        with Image.open(reference.path) as shown, Image.open(BytesIO(sheet)) as sent:
            assert shown.format == "PNG" and shown.tobytes() == sent.tobytes()
    for key in ("image_url", "video_url"):
        got = studio.post(size=None, lora_set="pose", video_conditioning=[{key: url}])
        assert got.status == 200, got.body


def test_a_decoded_picture_has_the_pixels_of_the_file(tmp_path):
    for mode, kind in (("P", "PNG"), ("RGB", "JPEG"), ("CMYK", "JPEG"), ("L", "WEBP")):
        Image.effect_noise((8, 6), 50).convert(mode).save(tmp_path / "a", format=kind)
        picture.decode(tmp_path / "a", tmp_path / "b.png")
        with Image.open(tmp_path / "a") as before, Image.open(tmp_path / "b.png") as after:
            assert after.format == "PNG" and before.convert("RGB").tobytes() == after.convert("RGB").tobytes()


def test_the_model_lists_the_inputs_that_it_takes_with_their_sizes(studio):
    (model,) = studio.get("/v1/models").json["data"]
    listed = {name: {size["size"] for size in sizes} for name, sizes in model["inputs"].items()}
    turned, stages = {SIZE, "512x768"}, {"192x128", "128x192", "256x128", "128x256"}
    assert listed["input_reference"] == turned and listed["audio_reference"] >= turned | stages
    assert listed["video_reference"] == {"96x64", "64x96"} and listed["video_conditioning"] == stages
    for name in ("conditioning_attention_mask", "tile", "reference_audio", "reference_video"):
        assert listed[name] == {"192x128", "128x192"}
    assert model["reference_audio_seconds"] == [2.0, 5.0]
    assert model["default"]["size"] == SIZE and model["default"] in model["sizes"]
    assert [job.all_loras for job in capability_jobs(studio.sizes)][:1] == [()]  # a worker must have no LoRA for it
    assert reference_jobs(studio.sizes)[0].stages[0].loras == studio.sizes.lora_sets["pose"].stage_1_loras


def test_a_request_chooses_among_the_commands_sets_of_loras(studio):
    (model,) = studio.get("/v1/models").json["data"]
    assert model["lora_sets"]["dub"] == [{"name": "dub.safetensors", "strength": 1}]
    ids = [studio.accepted(lora_set=name) for name in ("dub", "default", None)]
    dub, default, none = (studio.queue.get("ada", id) for id in ids)
    assert dub.batch_key != default.batch_key == none.batch_key  # one set's jobs are made together
    loras = [job_of(entry.params, studio.queue.folder).loras for entry in (dub, default, none)]
    assert loras == [studio.sizes.lora_sets["dub"].loras, (), ()] and len(loras[0]) == 1
    assert [studio.send("DELETE", f"{VIDEOS}/{id}").status for id in ids] == [200] * 3


MISMATCH, NOT_SUPPORTED = "profile_mismatch", "feature_not_supported"
# Fields -> the code, the field that is named, and words of the message
REFUSED = [
    (SOUND | {"audio_start_time": "3", "size": ""}, "", "audio_reference", "num_frames"),
    (PART | {"end_time": "9"}, "", "start_time", "reaches beyond"),
    (PART | {"seconds": "1"}, "", "seconds", "does not go with video_reference"),
    (PART | {"video_reference": "other.mp4", "end_time": "0.3"}, MISMATCH, "video_reference", "is not compiled"),
    ({"video_reference": "film.mp4", "extend": "61"}, "", "extend", "at most 60 s"),
    ({"video_conditioning": "film.mp4"}, NOT_SUPPORTED, "video_conditioning", "'pose'"),
    ({"lora_set": "pose", "size": "192x128"}, "", "lora_set", ""),
    (POSE | {"lora_set": "half", "conditioning_attention_mask": "film.mp4"}, MISMATCH, "size", "with video_condition"),
    ({"reference_video": "heard.mkv"}, NOT_SUPPORTED, "reference_video", "available: 'dub'"),
    (DUB | {"reference_video": "long.mkv"}, MISMATCH, "reference_video", "of 3.00 s of sound is not"),
    (DUB | {"num_frames": "9"}, "", "num_frames", "says how many (57 of its 57 frames, 24 fps)"),
    (DUB | {"seconds": "2"}, "", "seconds", "does not go with reference_video"),
    (DUB | {"two_stage": "false"}, "", "reference_video", "got no two_stage"),
    (VOICE, MISMATCH, "reference_audio", "of 6.00 s of sound (compiled: 2.00, 5.00) is not compiled"),
    (VOICE | {"lora_set": "both"}, NOT_SUPPORTED, "reference_audio", "'pose'"),
    ({"num_frames": "121", "tail_frames": "16"}, MISMATCH, "size", "tail_frames 16"),
    ({"size": SIZE, "guidance_scale": "3"}, "", "video_cfg_guidance_scale", "takes no video_cfg_guidance_scale"),
    ({"size": SIZE, "upscale": "temporal"}, NOT_SUPPORTED, "upscale", "no temporal upsampler"),
    ({"size": SIZE, "lora_set": "noir"}, "", "lora_set", "unknown lora_set 'noir'; known: 'pose', 'half'"),
]


@pytest.mark.parametrize(("fields", "code", "param", "words"), REFUSED)
def test_what_cannot_be_made_is_refused_by_its_field_and_leaves_nothing(studio, files, fields, code, param, words):
    error = refusal_of(studio, **with_files(fields, files))
    assert (error["code"], error["param"]) == (code or "invalid_value", param) and words in error["message"]
    assert ("compiled" in error) == (code == MISMATCH)


@pytest.mark.parametrize(("kind", "valid"), [("audio", "sound.wav"), ("video", "film.mp4")])
def test_a_file_of_another_kind_is_refused_by_its_content(service, files, kind, valid):
    for name in {"picture.png", "text.txt", "list.m3u8", "film.mp4", "sound.wav"} - {valid}:
        error = refusal_of(service, **{f"{kind}_reference": files[name]})
        assert (error["code"], error["param"]) == (f"invalid_{kind}", f"{kind}_reference")
        assert error["message"].startswith(f"{kind}_reference: it ")


def png(side: int) -> bytes:
    file = BytesIO()
    Image.new("1", (side, side)).save(file, format="PNG")
    return file.getvalue()


def test_what_is_called_png_and_is_none_is_refused(service):
    for content, words in (
        (b"\0\0\0\x18ftypmp42" + bytes(1000), "not a readable picture"),
        (png(64)[:-30], "not a readable picture"),
        (png(12_000), "12000x12000 pixels"),
        (png(1), "a video cannot have its size; wanted 2 to"),
    ):
        error = refusal_of(service, size=SIZE, input_reference=content)
        assert (error["code"], error["param"]) == ("invalid_image", "input_reference") and words in error["message"]


def test_a_file_beyond_its_kinds_limit_is_refused_while_it_arrives(studio, files, monkeypatch):
    sizes = {"image": 50, "audio": 2000, "video": 1000}
    limits = Limits(**{f"max_{kind}_mb": size / 2**20 for kind, size in sizes.items()})
    monkeypatch.setattr(studio.submitter, "limits", limits)
    for field, most in (("input_reference", 50), ("audio_reference", 2000), ("video_conditioning[video_url]", 1000)):
        error = refusal_of(studio, 413, **{field: files["sound.wav"]})
        assert (error["code"], error["param"]) == ("file_too_large", field) and f"{most} bytes" in error["message"]
    error = refusal_of(studio, 413, lora_set="pose", video_conditioning=files["picture.png"])  # once it is known
    assert (error["code"], error["param"]) == ("file_too_large", "video_conditioning[0]")
    headers = studio.headers(content_length=b"%d" % (MAX_JSON_BYTES + 1))  # held in memory
    assert studio.ask(Sent("POST", VIDEOS, b"", headers, b"{}")).refused == (413, "body_too_large")


def test_a_file_beyond_the_limits_of_what_it_shows_is_refused(tmp_path, files):
    for name, kind, limits, words in (
        ("sound.wav", "audio", Limits(max_media_seconds=5), "longer than 5 s"),
        ("film.mp4", "video", Limits(max_video_pixels=6000), "96x64 pixels, wanted at most 6000"),
    ):
        (tmp_path / name).write_bytes(files[name])
        with pytest.raises(sandbox.BadFile, match=words):
            media.check(tmp_path / name, kind, limits)
        media.check(tmp_path / name, kind, Limits())
