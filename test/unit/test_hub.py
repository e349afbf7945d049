"""Files named by their Hub names, from a hub on loopback."""

import argparse
import re
import shutil
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
from hub_server import GEMMA, LTX, TOKEN, released
from huggingface_hub import constants, utils
from jobs import make_job

from ltx_neuron import flags
from ltx_neuron.doctor.__main__ import main as doctor
from ltx_neuron.errors import UserError
from ltx_neuron.flags import verbs
from ltx_neuron.hub import RELEASE_FILES, absolute, download_again, hub_name, local_path, no_downloads
from ltx_neuron.job import Size
from ltx_neuron.pipeline import LTXPipeline
from ltx_neuron.weights.checkpoint import Checkpoint
from ltx_neuron.weights.model_files import located

LORA, LATER = "someone/lora", "Lightricks/LTX-2.5"
FILES = RELEASE_FILES[LTX]
CHECKPOINT = FILES["distilled"]
# huggingface_hub below 1, with transformers 4: sessions keep the mode in which they began, and what has come of a
# broken download stays.
restart_sessions = getattr(utils, "reset_sessions", lambda: None)
PARTS = {".incomplete"} if hasattr(utils, "reset_sessions") else set()


@pytest.fixture
def hub(tiny, tmp_path, monkeypatch):
    """The released repositories with tiny files, and an empty cache, from an empty folder."""
    with released(tiny, monkeypatch, tmp_path) as hub:
        hub.repos[GEMMA] |= dict.fromkeys(("README.md", "model.gguf", "tokenizer.model"), tiny.image)
        hub.repos[LORA] = {"README.md": tiny.image, "lora.safetensors": tiny.lora}
        yield hub
    restart_sessions()


def refused(name: str, kind: str = "distilled") -> str:
    with pytest.raises(UserError) as error:
        local_path(name, kind)
    return str(error.value)


def test_a_repository_alone_is_the_released_file_of_its_kind_or_gemmas_files_and_nothing_else(hub, capsys):
    for kind, name in FILES.items():
        path = local_path(LTX, kind)
        assert path.name == name and path.read_bytes() == hub.repos[LTX][name].read_bytes()
    assert {*hub.downloads, FILES["dev"]} == {*FILES.values()}  # that is the distilled one here, and not sent twice
    hub.requests.clear()
    folder = local_path(GEMMA, "gemma")
    expected = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in folder.iterdir()} == set(hub.downloads) == expected
    printed = capsys.readouterr().out
    assert f"downloading {LTX}/{CHECKPOINT} (" in printed and f"downloading {GEMMA}, 4 files (" in printed
    hub.requests.clear()
    assert local_path(GEMMA, "gemma") == folder and local_path(LTX, "distilled").name == CHECKPOINT
    assert not hub.requests and not capsys.readouterr().out


def test_a_repository_of_a_lora_is_its_file_of_weights_with_the_settings_of_peft(hub, tiny):
    hub.repos[LORA]["second.safetensors"] = tiny.lora
    error = refused(LORA, "lora")
    assert "has 2 files of weights" in error and "lora.safetensors, second.safetensors" in error
    names = {"adapter_config.json": tiny.gemma_root / "config.json", "adapter_model.safetensors": tiny.lora}
    hub.repos[LORA] = names | {"README.md": tiny.image}
    path = local_path(LORA, "lora")
    assert path.name == "adapter_model.safetensors" and {file.name for file in path.parent.iterdir()} == {*names}


def test_what_exists_or_can_only_be_a_path_is_not_looked_for_on_the_hub(hub, tiny):
    shutil.copytree(tiny.gemma_root, GEMMA)
    assert str(local_path(GEMMA, "gemma")) == GEMMA
    for path in ("absent.safetensors", "a/absent.safetensors", "/a/b/c", "./a/b"):
        assert str(local_path(path, "distilled")) == path.removeprefix("./")
    assert not hub.requests
    # Other processes get a path from the root, and a name of the Hub as it is.
    for path in (GEMMA, "absent.safetensors"):
        assert absolute(path) == str(Path.cwd() / path)
    assert absolute(LTX) == LTX


def test_after_an_interrupted_download_only_the_rest_is_downloaded(hub, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("huggingface_hub.file_download.http_get", Mock(side_effect=KeyboardInterrupt))
        local_path(GEMMA, "gemma")
    folder = local_path(GEMMA, "gemma")
    assert len(list(folder.iterdir())) == 4
    (folder / "tokenizer.json").resolve().unlink()
    hub.requests.clear()
    local_path(GEMMA, "gemma")
    assert hub.downloads == ["tokenizer.json"]


def test_a_file_that_does_not_fit_the_disk_is_refused_and_a_disk_that_fills_up_is_told(hub, monkeypatch, small_disk):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(small_disk))
    for free, message in ((10, "do not fit"), (10**12, f"the disk of {small_disk} is full\nFree some space")):
        monkeypatch.setattr("shutil.disk_usage", lambda _, free=free: argparse.Namespace(free=free))
        error = refused(LTX)
        assert message in error and "HF_HOME" in error
        assert bool(hub.downloads) == (free > 10)
    large = [path for path in small_disk.rglob("*") if path.stat().st_size > 1000]
    assert {path.suffix for path in large if path.is_file()} <= PARTS


def test_a_gated_repository_is_read_with_the_token_of_who_accepted_its_licence(hub, monkeypatch):
    hub.gated.add(GEMMA)
    for token in ("", "hf_of_nobody"):
        monkeypatch.setenv("HF_TOKEN", token)
        error = refused(GEMMA, "gemma")
        assert f"gated: you must accept its licence once\nAccept it on {hub.url}/{GEMMA}, then type hf auth" in error
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert (local_path(GEMMA, "gemma") / "config.json").is_file()


def test_what_is_absent_or_cannot_be_stored_is_refused_with_what_to_type(hub, tiny, monkeypatch, tmp_path):
    folder = "transformer/diffusion_pytorch_model-0000{}-of-00002.safetensors"
    files = {folder.format(n): tiny.checkpoint for n in (1, 2)}
    hub.repos[f"{LATER}-Diffusers"] = files | {"model_index.json": tiny.image}
    shutil.copytree(tiny.gemma_root, "models/gemma-3-12b")
    for name, kind, message in (
        (f"{LATER}-Diffusers", "distilled", f"in diffusers' layout.*\nType {LTX} or {LATER}"),
        (f"{LTX}/ltx-2.3-22b-distiled.safetensors", "distilled", f"has no file ltx-2.3-22b-distiled.*\n.*{CHECKPOINT}"),
        (f"{LTX}@v9", "distilled", f"{LTX} has no revision v9"),
        (LTX, "gemma", "not Gemma: it has no config.json"),
        ("models/gemma-3-12", "gemma", r"no such file here \(nearest: models/gemma-3-12b\).*/models/gemma"),
    ):
        assert re.search(message, refused(name, kind)), name
    (tmp_path / "file").touch()
    with monkeypatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file"))
        assert f"{tmp_path}/file" in refused(LTX)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "no download from http://127.0.0.1:9/Lightricks/LTX-2.3 (Connect" in refused(LTX)


def test_a_folder_of_the_cache_is_its_latest_snapshot_and_a_lost_blob_is_downloaded_again(hub):
    path, gemma = local_path(LTX, "distilled"), local_path(GEMMA, "gemma")
    (path.parents[1] / "older").mkdir()
    for typed in (path, path.parent, path.parents[2]):
        assert located(typed, "distilled") == path
    assert located(gemma.parents[1], "gemma") == gemma
    path.resolve().unlink()
    with pytest.raises(UserError, match=f"hf download {LTX} {path.name} --force-download") as error:
        Checkpoint(path)
    assert "nearest" not in str(error.value)


def test_offline_a_filled_cache_is_enough_and_an_empty_or_damaged_one_says_what_to_type(hub, monkeypatch):
    cached = local_path(LTX, "distilled")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    restart_sessions()
    assert local_path(LTX, "distilled") == cached
    error = refused(LTX, "dev")
    assert "HF_HUB_OFFLINE" in error and error.endswith(f"hf download {LTX} {FILES['dev']}")
    cached.write_bytes(b"")
    command = f"hf download {LTX} {CHECKPOINT} --force-download"
    with pytest.raises(UserError, match=command):
        flags.workspace(parsed("--checkpoint-path", LTX, "--gemma-root", "."))
    assert download_again(cached) == command


def parsed(*words: str) -> argparse.Namespace:
    return verbs.generate().parse_args(["--profile", "cpu", "--prompt", "rain", "--output-path", "a.mp4", *words])


def test_names_of_the_hub_stand_for_their_files_in_flags_and_messages(hub, tiny, tmp_path):
    local = parsed("--checkpoint-path", str(tiny.checkpoint), "--gemma-root", str(tiny.gemma_root))
    words = "--checkpoint-path", LTX, "--gemma-root", GEMMA, "--lora", LTX, "0.5", "--spatial-upsampler-path", LTX
    named = parsed(*words, "--temporal-upsampler-path", LTX, "--artifacts-dir", str(tmp_path / "artifacts"))
    local, workspace, options = flags.workspace(local), flags.workspace(named), flags.run_options(named)
    for model in ("dit", "gemma3"):
        assert workspace.weight_set(model).identity == local.weight_set(model).identity
    (lora,) = flags.spec(named).loras
    assert lora.path.name == FILES["lora"] and lora.strength == 0.5
    assert options.spatial_upsampler_path.name == FILES["spatial"]
    assert options.temporal_upsampler_path.name == FILES["temporal"]
    dev = flags.local(argparse.Namespace(checkpoint_path=Path(LTX), recipe="dev"), "checkpoint_path")
    assert dev.name == FILES["dev"] and flags.recipe(argparse.Namespace(checkpoint_path=dev, recipe=None)) == "dev"
    with pytest.raises(UserError, match=f"--checkpoint-path {LTX}/{CHECKPOINT} "):
        workspace.dit_weights()


def test_a_pipeline_opens_by_names_and_finds_all_parts_of_ltx_2_5_by_its_repository(hub, split, capsys):
    files = RELEASE_FILES[LATER]
    hub.repos[LATER] = {file: split.folder / file for file in files.values()}
    names = dict(checkpoint_path=LATER, loras=[(LORA, 1.0)], spatial_upsampler_path=LATER)
    with LTXPipeline.from_pretrained(**names, profile="cpu", dtype="float32", artifacts_dir="artifacts") as pipeline:
        job = make_job("a fox", Size(64, 64, 9, two_stage=True))
        with suppress(UserError):  # there are no graphs
            pipeline.engine.preflight.check([pipeline.engine.workspace.resolved(job)])
    assert "video decoder: convolutional, from " in capsys.readouterr().out
    kinds = "distilled", "gemma", "video_vae", "audio_vae", "spatial"
    assert set(hub.downloads) == {"lora.safetensors", *(Path(files[kind]).name for kind in kinds)}


def test_a_name_may_have_a_file_and_a_revision(hub, capsys):
    path = local_path(f"{LTX}@v1/{FILES['dev']}", "distilled")
    assert path.name == FILES["dev"] and path.parent.name == hub.revisions["v1"]
    local_path(LTX, "distilled"), capsys.readouterr(), hub.requests.clear()
    same = local_path(f"{LTX}@v1", "distilled")  # both revisions have this file
    assert not hub.downloads and not capsys.readouterr().out
    assert hub_name(same) == f"{LTX}@{hub.revisions['v1']}/{CHECKPOINT}"
    assert str(local_path(hub_name(same), "distilled")) == str(same)


def test_the_doctor_downloads_nothing_and_says_what_is_not_downloaded_yet(hub, capsys):
    with suppress(SystemExit):
        doctor(["--profile", "cpu", "--checkpoint-path", LTX, "--gemma-root", GEMMA])
    printed = capsys.readouterr().out
    assert f"{LTX}/{CHECKPOINT} is not downloaded yet" in printed and f"> hf download {GEMMA}" in printed
    assert not hub.requests
    with no_downloads(), pytest.raises(UserError, match="not downloaded yet"):
        local_path(LTX, "distilled")
