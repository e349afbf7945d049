"""Weight sets are written in one pass, are whole or absent however a run ends, and hold each tensor's parts exactly."""

import errno
import os
import re
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from math import prod
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import helpers
import pytest
import torch
from blake3 import blake3
from helpers import Together, exit_code, forked, one_thread, randn, rel, save_weights  # noqa: F401
from ltx_core.model.transformer import LTXModelConfigurator
from ltx_core.text_encoders.gemma import embeddings_connector as upstream
from safetensors.torch import load_file, save_file
from tiny import TinySizes, make_tiny
from tiny.config import released_config
from tiny.gemma import gemma_config as tiny_gemma_config
from tiny.gemma import write_gemma4_file
from torch.func import functional_call
from xxhash import xxh3_128

from ltx_neuron.config.gemma import GemmaConfig, gemma_config, read_config
from ltx_neuron.config.transformer import transformer_config
from ltx_neuron.errors import UserError
from ltx_neuron.files import MANIFEST, read_json, write_checked
from ltx_neuron.models.gemma3 import Gemma3Encoder, layers_first
from ltx_neuron.plan.cost import text_weights
from ltx_neuron.text.inputs import encoder_inputs
from ltx_neuron.weights import rankfiles, sharder
from ltx_neuron.weights.checkpoint import Checkpoint, Source, gemma_files
from ltx_neuron.weights.model_files import TextEncoderFile
from ltx_neuron.weights.rankfiles import HOST_FILE, SHARED_FILE, file_names, is_finished, rank_file, rank_path, verify
from ltx_neuron.weights.sharder import TensorLayout, compare, shard_specs, shard_weights
from ltx_neuron.weights.sharding import ALL, COL, HOST, ROW, SHARDED_MODELS, local_shape, rule
from ltx_neuron.weights.tensorfile import TensorFile

TP = 4
IDENTITY = {"kind": "weights", "model": "dit", "tp": TP, "dtype": "float32"}
MIDDLE, LATE = "transformer_blocks.0.ff.net.2.weight", "transformer_blocks.1.scale_shift_table"
PIECES = Source.pieces


@pytest.fixture(scope="module")
def source(tiny):
    return Source(SHARDED_MODELS["dit"], [Checkpoint(tiny.checkpoint)])


def write(source, folder: Path, dtype: torch.dtype = torch.float32, tp: int = TP, **identity) -> bool:
    return shard_weights(source, folder, IDENTITY | {"tp": tp} | identity, tp, dtype, shard_specs(source, tp, {}))


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory) -> Path:
    """The folder of an undisturbed run; tests must not change it."""
    folder = tmp_path_factory.mktemp("whole") / "weights"
    write(source, folder)
    return folder


@pytest.fixture
def interrupted(monkeypatch):
    """interrupted(name, action): runs call action() when they come to a tensor; interrupted() ends that."""

    def patch(name: str = "", action=None) -> None:
        def pieces(self, tensor, bounds):
            if tensor == name:
                action()
            return PIECES(self, tensor, bounds)

        monkeypatch.setattr(Source, "pieces", pieces)

    return patch


def test_a_set_is_the_same_bytes_in_one_pass_over_bounded_pieces(source, whole, tmp_path, monkeypatch):
    sizes, read, fsync, synced, folder = [], TensorFile.read, os.fsync, [], tmp_path / "weights"

    def counted(self, *args):
        sizes.append((tensor := read(self, *args)).nbytes)
        return tensor

    def noted(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        if synced[-1] == folder:  # the files' names are on the disk before the manifest is
            assert content(folder).keys() == {*file_names(TP)}
        fsync(descriptor)

    monkeypatch.setattr(sharder, "_PIECE_BYTES", 500)  # smaller than most tensors
    monkeypatch.setattr(TensorFile, "read", counted)
    monkeypatch.setattr(os, "fsync", noted)
    assert write(source, folder) and folder in synced
    assert content(folder) == content(whole)
    assert content(whole).keys() == {MANIFEST, *file_names(TP)}
    assert sum(sizes) == sum(source.nbytes(name) for name in source.names)
    row = max(source.nbytes(name) // source.shape(name)[0] for name in source.names)
    assert max(sizes) <= max(500, row) < source.nbytes("transformer_blocks.0.attn1.to_q.weight")


def test_a_file_is_cast_and_aligned_and_the_manifest_accounts_for_every_tensor_of_the_source(source, tiny, tmp_path):
    write(source, tmp_path / "weights", torch.bfloat16, tp=2)
    stored = TensorFile(tmp_path / "weights" / rank_file(0), "")
    assert torch.equal(stored.read(LATE), source.tensor(LATE).bfloat16()) and {*stored.dtypes.values()} == {"BF16"}
    assert (8 + len(stored.header)) % 64 == 0
    # Small ones, which begin anywhere, are last.
    assert list(stored.shapes) == sorted(stored.shapes, key=lambda name: (prod(stored.shapes[name]) % 64 != 0, name))
    described, file = read_json(tmp_path / "weights" / MANIFEST)["source"], TensorFile(tiny.checkpoint, "")
    assert described["tensors_xxh3_128"].keys() == set(source.names)
    assert len(described["tensors_xxh3_128"]) + sum(described["elsewhere"].values()) == len(file.shapes)
    digest = xxh3_128(source.tensor(MIDDLE).view(torch.uint8).numpy()).hexdigest()
    assert described["tensors_xxh3_128"][MIDDLE] == digest
    header = blake3(file.header).hexdigest()
    assert described["files"] == [{"name": tiny.checkpoint.name, "bytes": file.size, "header_blake3": header}]


def test_weights_that_all_ranks_have_are_one_file_and_sets_of_equal_files_are_still_read(tiny, tmp_path):
    source = Source(SHARDED_MODELS["vae"], [Checkpoint(tiny.checkpoint)])
    specs, folder, old = shard_specs(source, TP, {}), tmp_path / "weights", tmp_path / "old"
    assert write(source, folder, model="vae")
    assert content(folder).keys() == {SHARED_FILE, HOST_FILE, MANIFEST}
    assert {rank_path(folder, rank) for rank in range(TP)} == {folder / SHARED_FILE}
    shapes = {name: source.shape(name) for name in source.names}
    loaded = rankfiles.load_rank_file(rank_path(folder, TP - 1), shapes, torch.float32)
    assert all(torch.equal(loaded[name], source.tensor(name).float()) for name in shapes)
    # As an earlier version wrote it: a file a rank.
    save_weights(old, *[loaded] * TP)
    write_checked(old, read_json(folder / MANIFEST) | {"files": rankfiles.file_entries(old)})
    assert [*rankfiles.file_entries(old)] == file_names(TP)
    assert write(source, old, model="vae") is False
    assert rank_path(old, 2) == old / rank_file(2)
    (folder / SHARED_FILE).write_bytes((folder / SHARED_FILE).read_bytes()[:-1] + b"x")
    assert verify(folder) == [f"{SHARED_FILE}: content differs from its blake3"]
    (problem,) = compare(source, folder, torch.float32, specs)
    assert re.fullmatch(f"{SHARED_FILE}: .* differs from the source", problem)


# --- runs that end early --------------------------------------------------------------------------


def test_a_run_that_ends_early_leaves_no_set_and_no_earlier_one(source, whole, tmp_path, interrupted, monkeypatch):
    new, copy = tmp_path / "new", shutil.copytree(whole, tmp_path / "weights")
    interrupted(LATE, Mock(side_effect=KeyboardInterrupt))
    for folder in (new, copy):
        with pytest.raises(KeyboardInterrupt):
            write(source, folder, changed=True)
    assert not new.exists() and not is_finished(copy, IDENTITY) and not [*copy.iterdir()]

    def short(self, name, bounds):
        return (piece[:-1] if name == "proj_out.bias" else piece for piece in PIECES(self, name, bounds))

    # A file has its full length from the beginning: only what was written tells.
    monkeypatch.setattr(Source, "pieces", short)
    with pytest.raises(RuntimeError, match=r"wrote \d+ bytes, the header says"):
        write(source, new)
    assert not (new / MANIFEST).exists()


def test_after_a_kill_the_next_run_removes_what_was_left(source, whole, tmp_path, interrupted):
    folder = tmp_path / "weights"

    def killed() -> None:
        interrupted(LATE, lambda: os.kill(os.getpid(), signal.SIGKILL))
        write(source, folder)

    assert exit_code(forked(killed)) == -signal.SIGKILL
    assert [*folder.iterdir()] and not is_finished(folder, IDENTITY)
    write(source, folder)
    assert content(folder) == content(whole)


@pytest.mark.parametrize("fails", [False, True])
def test_a_second_run_waits_and_writes_the_set_if_the_first_failed(source, whole, tmp_path, interrupted, capsys, fails):
    folder, second = tmp_path / "weights", []

    def meanwhile() -> None:
        interrupted()
        second.append(pool.submit(write, source, folder))
        assert not wait(second, timeout=0.3).done
        if fails:
            raise KeyboardInterrupt

    with ThreadPoolExecutor(1) as pool:
        interrupted(MIDDLE, meanwhile)
        with pytest.raises(KeyboardInterrupt) if fails else nullcontext():
            assert write(source, folder)
        assert second[0].result() == fails
    waiting = f"another process ({os.getpid()}) is writing {folder}; waiting for it"
    assert capsys.readouterr().out.count(waiting) == 1
    assert content(folder) == content(whole) and [*tmp_path.iterdir()] == [folder]


def test_a_disk_without_room_is_refused_before_the_first_byte(source, whole, tmp_path, monkeypatch):
    total = sum(entry["bytes"] for entry in rankfiles.file_entries(whole).values())
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=total - 1))
    with pytest.raises(UserError, match=r"(?s)need [\d.]+ kB more in .* [\d.]+ kB free.*choose another place with"):
        write(source, tmp_path / "weights")
    assert not (tmp_path / "weights").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=total))
    assert write(source, tmp_path / "weights")


@pytest.mark.parametrize("reserves", [True, False])
def test_room_is_reserved_and_a_full_disk_keeps_nothing(source, whole, small_disk, interrupted, monkeypatch, reserves):
    folder, other = small_disk / "weights", small_disk / "other"

    def fill() -> None:
        """Somebody else takes the room, but for the manifest's where the rank files have theirs."""
        free = shutil.disk_usage(small_disk).free
        other.write_bytes(bytes(free - free % 4096 - (128 * 1024 if reserves else 4096)))

    monkeypatch.setattr(sharder, "_PIECE_BYTES", 500)
    interrupted(MIDDLE, fill)
    if not reserves:
        monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(errno.EOPNOTSUPP, "not supported")))
        with pytest.raises(OSError, match="No space left"):  # errors.run prints it without a traceback
            write(source, folder)
        assert not folder.exists()
        interrupted()
        other.unlink()
    write(source, folder)
    assert content(folder) == content(whole)


# --- which rank has what --------------------------------------------------------------------------


def layouts_of(gemma: GemmaConfig) -> dict[str, TensorLayout]:
    """How shard_weights() lays out the two projections of the text encoder."""
    layout = TensorLayout(lambda weight: layers_first(weight, gemma.hidden_size), split=1)
    return {f"{stream}_aggregate_embed.weight": layout for stream in ("video", "audio")}


@pytest.fixture(scope="module")
def sources(tiny, source):
    """The tensors of both models of the tiny assets, and the layouts in which they are stored."""
    gemma3 = Source(SHARDED_MODELS["gemma3"], [Checkpoint(tiny.checkpoint), *gemma_files(tiny.gemma_root)])
    return {"dit": (source, {}), "gemma3": (gemma3, layouts_of(gemma_config(tiny.gemma_root)))}


def test_every_tensor_has_exactly_one_row_and_every_row_a_tensor(sources):
    """Those of the full-size model, by ltx-core's modules on the meta device, and of the tiny one."""
    shapes = {"dit": {}, "gemma3": {}}
    with torch.device("meta"):
        for model, prefix, configurator in (
            ("dit", "", LTXModelConfigurator),
            ("gemma3", "video_connector.", upstream.Embeddings1DConnectorConfigurator),
            ("gemma3", "audio_connector.", upstream.AudioEmbeddings1DConnectorConfigurator),
        ):
            tensors = configurator.from_config(released_config()).state_dict()
            shapes[model] |= {prefix + name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert {model: len(names) for model, names in shapes.items()} == {"dit": 4186, "gemma3": 258}  # as released
    for model, (source, _) in sources.items():
        table, names = SHARDED_MODELS[model].table, {*source.locations, *shapes[model]}
        rows = {name: [pattern for pattern in table if re.fullmatch(pattern, name)] for name in names}
        assert {name: found for name, found in rows.items() if len(found) != 1} == {}
        later = {"keyframes_abs_pos_embedding"}  # LTX-2.5's
        assert {*table} - later == {rows[name][0] for name in source.locations}
        for name, shape in shapes[model].items():  # and what it splits can be split
            split = rule(SHARDED_MODELS[model], name)
            for tp in (4, 32):
                local = local_shape(shape, split, tp, name)
                assert torch.Size(local).numel() * (tp if split in (COL, ROW) else 1) == torch.Size(shape).numel()


def test_a_tensor_of_no_row_of_two_or_of_two_files_stops_the_sharder(tmp_path):
    model = SHARDED_MODELS["dit"]._replace(table=SHARDED_MODELS["dit"].table | {r"proj_out\.weight": COL})
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    for name, matches in (("proj_out.weight_scale", 0), ("proj_out.weight", 2)):
        save_file({f"model.diffusion_model.{name}": torch.ones(4, 4)}, one)
        with pytest.raises(UserError, match=rf"{re.escape(name)}' matches {matches} rows"):
            shard_specs(Source(model, [TensorFile(one, "")]), 2, {})
    shutil.copy(one, two)
    with pytest.raises(UserError, match=r"'proj_out\.weight' is in two places: .*one.* and .*two"):
        Source(model, [TensorFile(one, ""), TensorFile(two, "")])


@pytest.mark.parametrize("model", ["dit", "gemma3"])
def test_the_parts_of_all_ranks_give_back_every_source_tensor_bit_for_bit(model, sources, tmp_path):
    source, arranged = sources[model]
    # fp32 keeps every bit of bf16 and of fp32 sources.
    shard_weights(source, tmp_path, {"tp": TP}, TP, torch.float32, shard_specs(source, TP, arranged))
    ranks, host = [load_file(tmp_path / rank_file(rank)) for rank in range(TP)], load_file(tmp_path / HOST_FILE)
    splits = {name: source.split(name) for name in source.locations}
    assert {*host} == {name for name, split in splits.items() if split == HOST} and host
    assert all({*rank} == {*splits} - {*host} for rank in ranks)
    for name, split in splits.items():
        parts = [host[name]] if split == HOST else [rank[name] for rank in ranks]
        if split in (HOST, ALL):
            assert all(torch.equal(part, parts[0]) for part in parts)
            whole = parts[0]
        elif name in arranged:  # (layers, out, width)
            whole = torch.cat(parts, dim=1).permute(1, 2, 0).flatten(1)
        else:
            whole = torch.cat(parts, dim=split)
        assert torch.equal(whole, source.tensor(name).float()), name


def test_degrees_that_cut_a_head_or_a_tensor_are_refused_by_name():
    sizes = TinySizes(gemma_heads=24, gemma_kv_heads=8, gemma_head_dim=384, gemma_hidden=3840)
    gemma = read_config(tiny_gemma_config(sizes), Path("config.json"))
    with pytest.raises(UserError, match=r"(?s)degree 12 .*Gemma num_key_value_heads=8.*one of 1, 2, 4, 8, 24$"):
        gemma.check_tensor_parallel(12)  # which divides the tensor
    with pytest.raises(UserError, match="degree 16 does not divide Gemma num_attention_heads=24"):
        gemma.check_tensor_parallel(16)
    gemma.check_tensor_parallel(24)  # a rank has one query and one key-value head, which three ranks share
    for tp in (8, 3, 0):
        with pytest.raises(UserError, match=rf"degree {tp} does not divide num_attention_heads=4"):
            helpers.made_config()[1].check_tensor_parallel(tp)
    with pytest.raises(UserError, match=r"'to_q' of shape \[6, 4\] cannot be split over 4 ranks along dimension 0"):
        local_shape((6, 4), COL, 4, "to_q")


# --- more ranks than key-value heads ----------------------------------------------------------------

TOKENS = 12
DEGREES = (1, 4, 8)  # of 2 key-value heads a rank holds both, 1 shared by two ranks, 1 shared by four
# Two layers of a width of 32, whose sums over up to eight ranks have another order
EQUAL = helpers.fp32_bound(*helpers.block_summands(32, TOKENS, attentions=1) * 2)


@pytest.fixture(scope="module", params=["Gemma 3", "Gemma 4"])
def model(request, tmp_path_factory):
    """A text encoder, and its rank files at every degree."""
    folder = tmp_path_factory.mktemp("shared")
    sizes = TinySizes(layers=1, heads=8, connector_layers=1, gemma_layers=2, gemma_heads=8, gemma_kv_heads=2)
    assets = make_tiny(folder, sizes)
    checkpoint = Checkpoint(assets.checkpoint)
    if request.param == "Gemma 3":
        gemma, files = gemma_config(assets.gemma_root), gemma_files(assets.gemma_root)
    else:
        write_gemma4_file(folder / "text.safetensors", sizes)
        file = TextEncoderFile(folder / "text.safetensors", "")
        gemma, files = read_config(file.gemma_config, file.path), [file]
        for name in [name for name in checkpoint.shapes if name in file.shapes]:
            del checkpoint.shapes[name]  # the file has the projections
    config = transformer_config(checkpoint.config)
    source = Source(SHARDED_MODELS["gemma3"], [checkpoint, *files], config.heads | gemma.heads)
    for tp in DEGREES:
        specs = shard_specs(source, tp, layouts_of(gemma))
        shard_weights(source, folder / f"tp{tp}", {"tp": tp}, tp, torch.float32, specs)
    return SimpleNamespace(folder=folder, gemma=gemma, config=config)


def test_the_encoder_gives_the_same_at_every_degree_and_a_plan_counts_every_copy_of_a_head(model):
    def encoded(tp: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Features of all ranks side by side, and every rank's hidden states."""
        ranks = [load_file(model.folder / f"tp{tp}" / rank_file(rank)) for rank in range(tp)]
        planned = sum(text_weights(model.gemma, model.config, tp).values())
        assert [sum(tensor.numel() for tensor in weights.values()) for weights in ranks] == [planned] * tp
        comm, inputs = Together(tp), encoder_inputs(randn(1, TOKENS, model.gemma.hidden_size), [TOKENS], model.gemma)
        with torch.device("meta"):
            encoders = [Gemma3Encoder(model.gemma, model.config, tp, comm, states=True) for _ in range(tp)]

        def run(encoder, weights):
            mine = {name: weights[name] for name, _ in encoder.named_parameters()}
            with torch.no_grad():
                return functional_call(encoder, mine, (inputs,), strict=True)

        with ThreadPoolExecutor(tp) as pool:
            outputs = list(pool.map(run, encoders, ranks))
        features = torch.cat([out["video_features"] for out in outputs], -1)
        return features, [out["hidden_states"] for out in outputs]

    alone, (alone_states,) = encoded(1)
    for tp in DEGREES[1:]:
        features, states = encoded(tp)
        assert rel(features, alone) < EQUAL, tp
        assert all(rel(mine, alone_states) < EQUAL for mine in states), tp
