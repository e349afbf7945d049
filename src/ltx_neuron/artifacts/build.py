"""How weights and graphs are made, fetched and compared with their sources."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path

from ltx_neuron import artifacts, invocation
from ltx_neuron.artifacts.store import Store, names_in
from ltx_neuron.artifacts.transfer import pull
from ltx_neuron.artifacts.workspace import (
    SHARD_COMMANDS,
    Need,
    RunOptions,
    Workspace,
    compiled_size,
)
from ltx_neuron.backends import manifest, registry
from ltx_neuron.backends.export import TorchDistComm
from ltx_neuron.config.transformer import REGISTERS, Bucket
from ltx_neuron.errors import UserError
from ltx_neuron.files import exclusive
from ltx_neuron.job import Job
from ltx_neuron.models.gemma3 import layers_first
from ltx_neuron.models.modulation import host_weights
from ltx_neuron.models.programs import (
    Program,
    connector_program,
    dit_program,
    gemma3_program,
    spectrogram_program,
    waveform_program,
)
from ltx_neuron.models.vocoder import arrangement
from ltx_neuron.plan import check_text_fits
from ltx_neuron.report.progress import bar, line
from ltx_neuron.weights.checkpoint import Source
from ltx_neuron.weights.rankfiles import check_whole, file_entries, is_finished, verify
from ltx_neuron.weights.sharder import (
    ShardSpec,
    TensorLayout,
    check_specs,
    compare,
    set_bytes,
    shard_specs,
    shard_weights,
)
from ltx_neuron.weights.tensorfile import DTYPES


def fetch(url: str, workspace: Workspace, options: RunOptions, sets: Iterable[tuple]) -> None:
    """Download the weights and graphs of a workspace that it lacks. If several processes on one
    machine do so at once, one pulls a folder and the others wait.

    sets  weight sets, at least one
    Raises UserError if the store does not answer or is damaged.
    """
    models = ["gemma3"] if options.neuron_gemma else []
    models += workspace.profile.vae_models if options.neuron_vae else ()
    listed = [workspace.weight_set(model, loras) for loras in sets for model in ("dit", *models)]
    patterns = [artifacts.folder(Path(), need.identity).as_posix() for need in listed]
    tp, dtype = workspace.tp, workspace.dtype_name
    patterns += ["tuned/*", f"graphs/*-tp{tp}-{dtype}-*", f"graphs/sound-*-tp{tp}-float32-*"]
    store = Store(url)
    stored = names_in(store.files())
    names = [name for name in stored if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if names:
        pull(store, workspace.artifacts, names)


# --- making ---------------------------------------------------------------------------------------


def make(workspace: Workspace, needs: Iterable[Need], workers: int | None = None) -> list[Path]:
    """Make the missing weights and graphs. Returns all folders. workers: threads that write
    weights."""
    needs = [*needs]
    # Wrong sources raise before anything is written.
    specs = {id(need): _specs(workspace, need.source) for need in needs if need.source}
    notes = [note for need in needs if need.source for note in need.source.notes]
    notes += [need.note for need in needs if need.note]
    for note in dict.fromkeys(notes):
        print(note)
    for need in needs:
        if need.source:
            path, dtype = workspace.folder(need), DTYPES[need.identity["dtype"]]
            of = need.identity, workspace.tp, dtype, specs[id(need)], workers
            if not shard_weights(need.source, path, *of):
                print(f"already complete (--verify checks every byte): {path}")
    for _, graphs in groupby((n for n in needs if n.program), lambda need: need.title):
        _compile(workspace, [*graphs])
    return [*map(workspace.folder, needs)]


def _compile(workspace: Workspace, graphs: list[Need]) -> None:
    """Compile missing graphs. Waits for one that another process compiles."""
    profile, tp = graphs[0].profile or workspace.profile, workspace.tp
    if graphs[0].model == "gemma3":
        sizes = workspace.gemma, workspace.transformer
        check_text_fits(profile, tp, workspace.dtype_name, *sizes)
    missing = [need for need in graphs if not workspace.is_made(need)]
    title = f"{graphs[0].model} graphs"
    for need in bar(missing, title, "graph"):
        workspace.check_runtime()
        path = workspace.folder(need)
        with exclusive(path, "compiling"):
            if need.program and not workspace.is_made(need):
                dtype = DTYPES[need.identity["dtype"]]
                registry.compile_program(need.program, path, need.identity, dtype, profile, tp)
    with line(f"{title} on the ranks"):
        registry.precompile([*map(workspace.folder, graphs)], profile, tp, workspace.compiler_cache)


def record_size(workspace: Workspace, job: Job, buckets: list[Bucket]) -> None:
    """Record the job's size, recipe and inputs in the manifests of the DiT's graphs."""
    for need in workspace.dit_graphs(buckets, job):
        manifest.record_size(workspace.folder(need), compiled_size(job))


# --- weights --------------------------------------------------------------------------------------


def check_bytes(workspace: Workspace, needs: Iterable[Need]) -> list[Path]:
    """Compare finished rank files with their manifests and bit for bit with the checkpoint and
    Gemma's files. Returns the folders; raises UserError with the differences."""
    paths = []
    for need in needs:
        assert need.source
        path, specs = workspace.find(need), _specs(workspace, need.source)
        dtype = DTYPES[need.identity["dtype"]]
        check_whole(path, verify(path) or compare(need.source, path, dtype, specs), need.command)
        print(f"whole, and bit-identical to the source: {path}")
        paths.append(path)
    return paths


def check_finished(model: str, artifacts_dir: Path) -> None:
    """Compare every finished weight set of a model with its manifest."""
    verb = SHARD_COMMANDS[model][1]
    models = [name for name, (_, others, _) in SHARD_COMMANDS.items() if others == verb]
    folders = [path for name in models for path in artifacts.finished_weights(artifacts_dir, name)]
    if not folders:
        raise UserError(
            f"no finished {model} weights in {artifacts_dir}; choose another place with"
            " --artifacts-dir DIR"
        )
    for path in folders:
        again = invocation.command(f"shard {verb}", "--checkpoint-path", "FILE")
        check_whole(path, verify(path), again)
        print(f"whole: {path} (--checkpoint-path compares it with the source as well)")


def weight_bytes(workspace: Workspace, need: Need) -> int:
    """Bytes of a weight set's files, whether they exist or not."""
    assert need.source
    path, dtype = workspace.folder(need), DTYPES[need.identity["dtype"]]
    if is_finished(path, need.identity):
        return sum(entry["bytes"] for entry in file_entries(path).values())
    return set_bytes(_specs(workspace, need.source), workspace.tp, dtype)


def check_weights(workspace: Workspace, model: str) -> None:
    """Raise UserError unless the files have all tensors of a model's config."""
    _specs(workspace, workspace.source(model))


def _specs(workspace: Workspace, source: Source) -> list[ShardSpec]:
    """How a model's tensors are distributed over its rank files. Raises UserError if they are not
    the model's."""
    programs, host, layouts = _parts(workspace, source)
    specs = shard_specs(source, workspace.tp, layouts)
    weights = {n: shape for program in programs for n, shape in program.weights().items()}
    check_specs(specs, weights, host)
    return specs


def _parts(workspace: Workspace, source: Source) -> tuple[list[Program], dict, dict]:
    """The programs with a model's weights on the ranks, the shapes of the host's weights, and
    layouts of tensors that rank files store differently from the checkpoint."""
    config, tp, dtype = workspace.transformer, workspace.tp, workspace.dtype
    comm, model = TorchDistComm(tp), source.model.name
    if model == "dit":
        (bucket,) = Job().buckets
        return [dit_program(config, bucket, tp, comm, dtype, 1)], host_weights(config), {}
    if model == "gemma3":
        gemma, profile = workspace.gemma, workspace.profile
        gemma.check_tensor_parallel(tp)
        tokens, attention = profile.text_buckets[0], profile.attention
        encoder = gemma3_program(gemma, config, tokens, tp, comm, dtype, False)
        connectors = connector_program(config, tp, comm, dtype, attention)
        host = {
            "embed_tokens.weight": (gemma.vocab_size, gemma.hidden_size),
            "video_connector.learnable_registers": (REGISTERS, config.video_connector.inner),
            "audio_connector.learnable_registers": (REGISTERS, config.audio_connector.inner),
        }
        # The encoder multiplies the aggregate projections layer by layer.
        by_layer = TensorLayout(lambda weight: layers_first(weight, gemma.hidden_size), split=1)
        layouts = {f"{stream}_aggregate_embed.weight": by_layer for stream in ("video", "audio")}
        return [encoder, connectors], host, layouts
    if model != "sound":
        tile = (1, 1, 1) if model == "vae" else (1, 32, 32)
        return [workspace.tile_program(model, tile)], {}, {}
    arranged = ((name, arrangement(name, workspace.vocoder)) for name in source.names)
    layouts = {name: TensorLayout(arrange, split=0) for name, arrange in arranged if arrange}
    mel, vocoder = workspace.audio_decoder, workspace.vocoder
    return [spectrogram_program(mel, 1), waveform_program(vocoder, 1)], {}, layouts
