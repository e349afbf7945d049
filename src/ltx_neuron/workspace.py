"""Workspace: one checkpoint on one profile, and the artifacts that belong to it. What the
commands share.

It makes weight sets and graphs, compares them with what they are of, and knows whether they fit
the device. What is there it finds as Finished does.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path

from tqdm import tqdm

from ltx_neuron import artifacts
from ltx_neuron.backends import registry
from ltx_neuron.backends.export import TorchDistComm
from ltx_neuron.backends.manifest import Manifest, record_size
from ltx_neuron.config.sound import span_sizes
from ltx_neuron.config.transformer import REGISTERS, Bucket
from ltx_neuron.errors import UserError
from ltx_neuron.files import exclusive
from ltx_neuron.finished import Finished, shard_verb
from ltx_neuron.invocation import command
from ltx_neuron.job import Job
from ltx_neuron.models.gemma3 import layers_first
from ltx_neuron.models.modulation import host_weights
from ltx_neuron.models.programs import (
    Program,
    connector_program,
    dit_program,
    gemma3_program,
    spectrogram_program,
    tile_program,
    waveform_program,
)
from ltx_neuron.models.vocoder import arrangement
from ltx_neuron.plan import (
    CoreMemory,
    check_fits,
    check_text_fits,
    compiled_activations,
    compiled_tile,
    does_not_fit,
)
from ltx_neuron.profiles import Profile, require_runtime
from ltx_neuron.weights.checkpoint import Source
from ltx_neuron.weights.lora import WeightSet
from ltx_neuron.weights.rankfiles import (
    RankSource,
    check_whole,
    file_entries,
    is_finished,
    rank_path,
    verify,
)
from ltx_neuron.weights.sharder import (
    Layout,
    ShardSpec,
    check_specs,
    compare,
    set_bytes,
    shard_specs,
    shard_weights,
)
from ltx_neuron.weights.tensorfile import DTYPES


class Workspace(Finished):
    """Makes what is not there."""

    # --- cutting rank files -----------------------------------------------------------------------

    def shard(
        self, model: str, sets: Iterable[WeightSet] = ((),), workers: int | None = None
    ) -> list[Path]:
        """Write the rank files of a model, one of MODELS, of the DiT once for every set of LoRAs;
        returns the folders. With those of the video decoder come those of sound."""
        # One that does not fit is refused before anything is written.
        sources = [source for loras in sets for source in self.sources_of(model, loras)]
        specs_of = [self._specs(source) for source in sources]
        paths = []
        for source, specs in zip(sources, specs_of, strict=True):
            identity = self.weights_identity(source)
            path, dtype = artifacts.folder(self.artifacts, identity), DTYPES[identity["dtype"]]
            if not shard_weights(source, path, identity, self.tp, dtype, specs, workers):
                print(f"already there, nothing to do (--verify checks every byte): {path}")
            paths.append(path)
        return paths

    def verify(self, model: str, sets: Iterable[WeightSet] = ((),)) -> list[Path]:
        """Compare the finished rank files of a model, one of MODELS, with their manifests and bit
        for bit with the checkpoint and Gemma's files. Raises UserError that lists what differs;
        returns the folders. sets: the DiT's."""
        paths = []
        for loras in sets:
            for source in self.sources_of(model, loras):
                path = self.weights(source.model.name, loras)
                dtype = DTYPES[self.weights_identity(source)["dtype"]]
                problems = verify(path) or compare(source, path, dtype, self._specs(source))
                check_whole(path, problems, self._shard_command(model, {"--lora": loras}))
                paths.append(path)
        return paths

    def weight_bytes(self, source: Source) -> int:
        """Of the rank files of a model's weights, finished or not."""
        identity = self.weights_identity(source)
        path, dtype = artifacts.folder(self.artifacts, identity), DTYPES[identity["dtype"]]
        if is_finished(path, identity):
            return sum(entry["bytes"] for entry in file_entries(path).values())
        return set_bytes(self._specs(source), self.tp, dtype)

    def sources_of(self, model: str, loras: WeightSet) -> list[Source]:
        """What is sharded by one command."""
        return [self.source(name, loras) for name in _models_of(model)]

    def _specs(self, source: Source) -> list[ShardSpec]:
        """How the tensors of a model are distributed over its files. UserError where they are not
        those of the model."""
        parts = {
            "dit": self._dit_parts,
            "gemma3": self._gemma3_parts,
            "vae": self._vae_parts,
            "sound": self._sound_parts,
        }
        programs, host, layouts = parts[source.model.name]()
        specs = shard_specs(source, self.tp, layouts)
        weights = {name: shape for each in programs for name, shape in each.weights().items()}
        check_specs(specs, weights, host)
        return specs

    # Of a model: the programs that take its weights on the ranks, the shapes of those that stay on
    # the host, and the layouts in which tensors are stored otherwise than in the checkpoint.

    def _dit_parts(self) -> tuple[list[Program], dict, dict]:
        (bucket,) = Job("").buckets
        comm = TorchDistComm(self.tp)
        program = dit_program(self.transformer, bucket, self.tp, comm, self.dtype, 1)
        return [program], host_weights(self.transformer), {}

    def _gemma3_parts(self) -> tuple[list[Program], dict, dict]:
        config, gemma, comm = self.transformer, self.gemma, TorchDistComm(self.tp)
        gemma.check_tensor_parallel(self.tp)
        tokens, attention = self.profile.text_buckets[0], self.profile.connector_attention
        encoder = gemma3_program(gemma, config, tokens, self.tp, comm, self.dtype, False)
        connectors = connector_program(config, self.tp, comm, self.dtype, attention)
        host = {
            "embed_tokens.weight": (gemma.vocab_size, gemma.hidden_size),
            "video_connector.learnable_registers": (REGISTERS, config.video_connector.inner),
            "audio_connector.learnable_registers": (REGISTERS, config.audio_connector.inner),
        }
        # The aggregate projections are stored layer by layer, as the encoder multiplies them.
        by_layer = Layout(lambda weight: layers_first(weight, gemma.hidden_size), split=1)
        layouts = {f"{stream}_aggregate_embed.weight": by_layer for stream in ("video", "audio")}
        return [encoder, connectors], host, layouts

    def _vae_parts(self) -> tuple[list[Program], dict, dict]:
        return [tile_program(self.video_decoder, (1, 1, 1), self.dtype)], {}, {}

    def _sound_parts(self) -> tuple[list[Program], dict, dict]:
        config, layouts = self.vocoder, {}
        for name in self.source("sound").names:
            if (arrange := arrangement(name, config)) is not None:
                layouts[name] = Layout(arrange, split=0)
        programs = [spectrogram_program(self.audio_decoder, 1), waveform_program(config, 1)]
        return programs, {}, layouts

    # --- compiling graphs -------------------------------------------------------------------------

    def compile_dit(self, buckets: list[Bucket], job: Job | None = None) -> list[Path]:
        """Trace the DiT step for each bucket, of one size, that is not there yet; returns the
        folders. job: whose size and recipe their manifests record, also those that are there."""
        profile = self.dit_profile(buckets)
        self.check_attention(profile)
        comm, cut = registry.comm(profile, self.tp), profile.blocks_per_graph
        programs, whole = [], set()
        for bucket in buckets:
            divides = self._divides(bucket, profile)
            if profile.sequence_parallel and not divides:
                whole.add(bucket.video_tokens)
            arguments = bucket, self.tp, comm, self.dtype, cut, profile.attention, divides
            programs.append(partial(dit_program, self.transformer, *arguments))
        for tokens in sorted(whole):
            print(
                f"{tokens} video tokens do not divide over {self.tp} ranks: compiled without"
                " sequence parallelism"
            )
        paths = self._compile(self.dit_identities(buckets), programs, profile)
        if job:
            self.record_size(job, buckets)
        return paths

    def record_size(self, job: Job, buckets: list[Bucket]) -> None:
        """Have the manifests of the DiT's graphs name the job's size and recipe."""
        for identity in self.dit_identities(buckets):
            path = artifacts.folder(self.artifacts, identity)
            record_size(path, asdict(job.size) | {"recipe": job.recipe})

    def compile_text(self) -> list[Path]:
        """Trace the text encoder for every bucket of tokens, and the connectors."""
        gemma, config, profile = self.gemma, self.transformer, self.profile
        gemma.check_tensor_parallel(self.tp)
        check_text_fits(profile, self.tp, self.dtype_name, gemma, config)
        shared = self.tp, registry.comm(profile, self.tp), self.dtype
        states, attention = profile.return_hidden_states, profile.connector_attention
        buckets = profile.text_buckets
        programs = [partial(gemma3_program, gemma, config, n, *shared, states) for n in buckets]
        programs.append(partial(connector_program, config, *shared, attention))
        return self._compile(self.text_identities(buckets).values(), programs)

    def compile_vae(self, clip: tuple[int, int, int]) -> list[Path]:
        """Trace the video decoder for every shape of a clip's tiles; `clip` is its latent (F, h,
        w)."""
        tiles, decoder = self.tile_shapes(clip), self.video_decoder
        programs = [partial(tile_program, decoder, tile, self.dtype) for tile in tiles]
        return self._compile(self.tile_identities(clip).values(), programs)

    def compile_sound(self, latents: int) -> list[Path]:
        """Trace mel decoder and vocoder for the spans of so many latents of sound."""
        span, rows = span_sizes(latents)
        spectrogram = partial(spectrogram_program, self.audio_decoder, span)
        waveform = partial(waveform_program, self.vocoder, rows)
        return self._compile(self.sound_identities(latents).values(), [spectrogram, waveform])

    def _compile(
        self,
        identities: Iterable[dict],
        programs: Iterable[Callable[[], Program]],
        profile: Profile | None = None,
    ) -> list[Path]:
        """Compile each program of an identity that is not there yet; returns all folders. Where
        another process compiles one, this waits and takes it. profile: another than the run's."""
        profile, identities = profile or self.profile, [*identities]
        paths = [artifacts.folder(self.artifacts, identity) for identity in identities]
        named = [*zip(paths, identities, programs, strict=True)]
        missing = [each for each in named if not self.is_made(each[1])]
        model = identities[0]["model"]
        for path, identity, make in tqdm(
            missing, f"{model} graphs", disable=not missing, unit="graph"
        ):
            require_runtime(profile, self.tp)
            with exclusive(path, "compiling"):
                if not self.is_made(identity):
                    dtype = DTYPES[identity["dtype"]]
                    registry.compile_program(make, path, identity, dtype, profile, self.tp)
        registry.precompile(paths, profile, self.tp, self.compiler_cache)
        return paths

    @property
    def compiler_cache(self) -> Path:
        """Where compilers that run in the ranks keep what they made."""
        return self.artifacts / "compiled"

    # --- whether a generation fits the device -----------------------------------------------------

    def check_plan_fits(self, job: Job, neuron_gemma: bool) -> None:
        """Raise UserError where a generation does not fit, by the plan: its graphs are exported for
        that. neuron_gemma: whether the prompt is encoded on the ranks."""
        gemma = self.gemma if neuron_gemma else None
        profile = self.dit_profile(job.buckets, used=False)
        check_fits(self.checkpoint, profile, job, self.tp, self.dtype_name, gemma)

    def compiled_memory(
        self,
        manifests: list[Manifest],
        neuron_gemma: bool,
        decoders: list[Manifest],
        loras: WeightSet = (),
    ) -> CoreMemory:
        """What a generation needs of a core, by what was counted when its graphs were compiled and
        by the sizes of its rank files.

        decoders  manifests of the decoders of video and sound on the ranks
        loras     of any of its weight sets, which are of one size
        """
        models = {manifest.identity["model"] for manifest in decoders}
        return CoreMemory(
            _rank_bytes(self.dit_weights(loras)),
            _rank_bytes(self.weights("gemma3")) if neuron_gemma else 0,
            compiled_activations(manifests),
            sum(_rank_bytes(self.weights(model)) for model in models),
            compiled_tile(decoders),
        )

    def check_compiled_fits(self, memory: CoreMemory, job: Job, neuron_gemma: bool) -> None:
        """Raise UserError where a generation does not fit, by its compiled_memory: nothing is
        exported."""
        limit, needed = self.profile.memory_bytes_per_core, memory.needed(self.profile)
        if limit is not None and needed > limit:
            self.check_plan_fits(job, neuron_gemma)  # names a size that fits
            advice = "Type a smaller size, a larger --tp-degree, or --dtype bfloat16"
            raise does_not_fit(self.profile, job.size, self.tp, needed, advice)


def _rank_bytes(folder: Path) -> int:
    """Bytes of one rank's weights: its file, whose header is small beside them."""
    return rank_path(folder, 0).stat().st_size


# --- sharding without a checkpoint ------------------------------------------------------------


def reshard(
    folder: Path, artifacts_dir: Path, model: str, tp: int, dtype: str, workers: int | None = None
) -> Path:
    """Make the rank files of another tp or dtype from a finished folder, without the checkpoint.

    Returns their folder. Raises UserError where the finished ones cannot give that tp or dtype.
    """
    source = RankSource(folder)
    if source.model.name == "sound" and model == "vae":  # both are sharded by one command
        dtype = "float32"
    elif source.model.name != model:
        raise UserError(
            f"{folder} holds weights of {source.model.name}, wanted {model}: type"
            f" {command(shard_verb(source.model.name))}"
        )
    source.check(tp, DTYPES[dtype])
    identity = source.identity | {"tp": tp, "dtype": dtype}
    path = artifacts.folder(artifacts_dir, identity)
    specs = shard_specs(source, tp, {})
    if not shard_weights(source, path, identity, tp, DTYPES[dtype], specs, workers):
        print(f"already there, nothing to do: {path}")
    return path


def verify_finished(model: str, artifacts_dir: Path) -> None:
    """Compare every finished weight set of a model with its manifest."""
    models = _models_of(model)
    folders = [path for each in models for path in artifacts.finished_weights(artifacts_dir, each)]
    if not folders:
        raise UserError(
            f"no finished {model} weights in {artifacts_dir}; choose another place with"
            " --artifacts-dir DIR"
        )
    for path in folders:
        check_whole(path, verify(path), command(shard_verb(model), "--checkpoint-path", "FILE"))
        print(f"whole: {path} (with --checkpoint-path it is compared with the source as well)")


def _models_of(model: str) -> tuple[str, ...]:
    """The models whose weights one command shards."""
    return ("vae", "sound") if model == "vae" else (model,)
