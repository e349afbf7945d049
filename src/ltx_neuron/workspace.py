"""Workspace: makes the weight sets and graphs of one checkpoint on one profile, compares them with
their sources, and checks whether a generation fits the device.

Its base class Finished finds existing ones.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path

from tqdm import tqdm

from ltx_neuron import artifacts
from ltx_neuron.backends import registry
from ltx_neuron.backends.export import TorchDistComm
from ltx_neuron.backends.manifest import Manifest, record_size
from ltx_neuron.config.diffusion import DiffusionDecoderConfig
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
    diffusion_program,
    dit_program,
    encoder_program,
    gemma3_program,
    spectrogram_program,
    tile_program,
    waveform_program,
    with_convolution,
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
from ltx_neuron.profiles import Profile
from ltx_neuron.weights.checkpoint import Source
from ltx_neuron.weights.lora import WeightSet
from ltx_neuron.weights.rankfiles import check_whole, file_entries, is_finished, rank_path, verify
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
    """Makes missing weight sets and graphs."""

    # --- sharding ---------------------------------------------------------------------------------

    def shard(
        self, model: str, sets: Iterable[WeightSet] = ((),), workers: int | None = None
    ) -> list[Path]:
        """Write the rank files of a model, one of MODELS; of every set of LoRAs; for the video
        decoder, also those of Profile.vae_models. Returns the folders."""
        # Wrong sources raise before anything is written.
        sources = [source for loras in sets for source in self.sources_of(model, loras)]
        specs_of = [self._specs(source) for source in sources]
        for note in dict.fromkeys(note for source in sources for note in source.notes):
            print(note)
        paths = []
        for source, specs in zip(sources, specs_of, strict=True):
            identity = self.weights_identity(source)
            path, dtype = artifacts.folder(self.artifacts, identity), DTYPES[identity["dtype"]]
            if not shard_weights(source, path, identity, self.tp, dtype, specs, workers):
                print(f"already complete (--verify checks every byte): {path}")
            paths.append(path)
        return paths

    def verify(self, model: str, sets: Iterable[WeightSet] = ((),)) -> list[Path]:
        """Compare the finished rank files of a model, one of MODELS, with their manifests and bit
        for bit with the checkpoint and Gemma's files. Returns the folders; raises UserError with
        the differences. sets: of the DiT's LoRAs."""
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
        """Bytes of a model's rank files, whether they exist or not."""
        identity = self.weights_identity(source)
        path, dtype = artifacts.folder(self.artifacts, identity), DTYPES[identity["dtype"]]
        if is_finished(path, identity):
            return sum(entry["bytes"] for entry in file_entries(path).values())
        return set_bytes(self._specs(source), self.tp, dtype)

    def sources_of(self, model: str, loras: WeightSet) -> list[Source]:
        """The sources of one shard command."""
        models = self.profile.vae_models if model == "vae" else (model,)
        return [self.source(name, loras) for name in models]

    def check_weights(self, model: str) -> None:
        """Raise UserError unless the files have all tensors of a model's config."""
        self._specs(self.source(model))

    def _specs(self, source: Source) -> list[ShardSpec]:
        """How a model's tensors are distributed over its rank files. Raises UserError if they are
        not the model's."""
        parts = {
            "dit": self._dit_parts,
            "gemma3": self._gemma3_parts,
            "vae": lambda: ([self._tile_program((1, 1, 1))], {}, {}),
            "encoder": lambda: ([self._encoder_program((1, 32, 32))], {}, {}),
            "sound": self._sound_parts,
        }
        programs, host, layouts = parts[source.model.name]()
        specs = shard_specs(source, self.tp, layouts)
        weights = {name: shape for each in programs for name, shape in each.weights().items()}
        check_specs(specs, weights, host)
        return specs

    # For each model: the programs with its weights on the ranks, the shapes of the host's weights,
    # and layouts of tensors that rank files store differently from the checkpoint.

    def _dit_parts(self) -> tuple[list[Program], dict, dict]:
        (bucket,) = Job().buckets
        comm = TorchDistComm(self.tp)
        program = dit_program(self.transformer, bucket, self.tp, comm, self.dtype, 1)
        return [program], host_weights(self.transformer), {}

    def _gemma3_parts(self) -> tuple[list[Program], dict, dict]:
        config, gemma, comm = self.transformer, self.gemma, TorchDistComm(self.tp)
        gemma.check_tensor_parallel(self.tp)
        tokens, attention = self.profile.text_buckets[0], self.profile.attention
        encoder = gemma3_program(gemma, config, tokens, self.tp, comm, self.dtype, False)
        connectors = connector_program(config, self.tp, comm, self.dtype, attention)
        host = {
            "embed_tokens.weight": (gemma.vocab_size, gemma.hidden_size),
            "video_connector.learnable_registers": (REGISTERS, config.video_connector.inner),
            "audio_connector.learnable_registers": (REGISTERS, config.audio_connector.inner),
        }
        # The encoder multiplies the aggregate projections layer by layer.
        by_layer = Layout(lambda weight: layers_first(weight, gemma.hidden_size), split=1)
        layouts = {f"{stream}_aggregate_embed.weight": by_layer for stream in ("video", "audio")}
        return [encoder, connectors], host, layouts

    def _sound_parts(self) -> tuple[list[Program], dict, dict]:
        config, layouts = self.vocoder, {}
        for name in self.source("sound").names:
            if (arrange := arrangement(name, config)) is not None:
                layouts[name] = Layout(arrange, split=0)
        programs = [spectrogram_program(self.audio_decoder, 1), waveform_program(config, 1)]
        return programs, {}, layouts

    # --- compiling graphs -------------------------------------------------------------------------

    def compile_dit(self, buckets: list[Bucket], job: Job | None = None) -> list[Path]:
        """Trace the DiT step for each missing bucket of one size; returns all folders. job: its
        size and recipe are recorded in all manifests."""
        profile = self.dit_profile(buckets)
        comm, context = registry.comm(profile, self.tp), registry.context(profile, self.tp)
        cut = profile.blocks_per_graph
        programs, whole = [], set()
        for bucket in buckets:
            divides = self._divides(bucket, profile)
            if profile.sequence_parallel and bucket.video_tokens and not divides:
                whole.add(bucket.video_tokens)
            arguments = bucket, self.tp, comm, self.dtype, cut, profile.attention, divides, context
            programs.append(partial(dit_program, self.transformer, *arguments))
        for tokens in sorted(whole):
            print(
                f"{tokens} video tokens are not divisible by {self.tp} ranks: compiled without"
                " sequence parallelism"
            )
        paths = self._compile(self.dit_identities(buckets), programs, profile)
        if job:
            self.record_size(job, buckets)
        return paths

    def record_size(self, job: Job, buckets: list[Bucket]) -> None:
        """Record the job's size, recipe and inputs in the manifests of the DiT's graphs."""
        for identity in self.dit_identities(buckets):
            path = artifacts.folder(self.artifacts, identity)
            record_size(path, compiled_size(job))

    def compile_text(self) -> list[Path]:
        """Trace the text encoder for every token bucket, and the connectors."""
        gemma, config, profile = self.gemma, self.transformer, self.profile
        gemma.check_tensor_parallel(self.tp)
        check_text_fits(profile, self.tp, self.dtype_name, gemma, config)
        shared = self.tp, registry.comm(profile, self.tp), self.dtype
        states, attention = profile.return_hidden_states, profile.attention
        buckets = profile.text_buckets
        programs = [partial(gemma3_program, gemma, config, n, *shared, states) for n in buckets]
        programs.append(partial(connector_program, config, *shared, attention))
        return self._compile(self.text_identities(buckets).values(), programs)

    def compile_vae(self, clip: tuple[int, int, int]) -> list[Path]:
        """Trace the video decoder for every tile shape of a clip's latent (F, h, w)."""
        programs = [partial(self._tile_program, tile) for tile in self.tile_shapes(clip)]
        return self._compile(self.tile_identities(clip).values(), programs)

    def compile_encoder(self, job: Job) -> list[Path]:
        """Trace the video encoder for every tile shape of a job's videos."""
        programs = [partial(self._encoder_program, tile) for tile in self.encoder_tiles(job)]
        return self._compile(self.encoder_identities(job).values(), programs)

    def _encoder_program(self, tile: tuple[int, int, int]) -> Program:
        program = encoder_program(self.video_encoder, tile, self.dtype)
        return with_convolution(program, self.profile.vae_convolution)

    def _tile_program(self, tile: tuple[int, int, int]) -> Program:
        """The program of the video decoder for tiles of latents (f, h, w), or of the diffusion
        decoder for clips."""
        config = self.video_decoder
        if isinstance(config, DiffusionDecoderConfig):
            return diffusion_program(config, tile, self.dtype)
        program = tile_program(config, tile, self.dtype)
        return with_convolution(program, self.profile.vae_convolution)

    def compile_sound(self, latents: int) -> list[Path]:
        """Trace mel decoder and vocoder for the spans of a sound with this number of latents."""
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
        """Compile the programs of missing identities; returns all folders. Waits for one that
        another process compiles. profile: by default the run's."""
        profile, identities = profile or self.profile, [*identities]
        paths = [artifacts.folder(self.artifacts, identity) for identity in identities]
        named = [*zip(paths, identities, programs, strict=True)]
        missing = [each for each in named if not self.is_made(each[1])]
        model = identities[0]["model"] if identities else ""
        for path, identity, make in tqdm(
            missing, f"{model} graphs", disable=not missing, unit="graph"
        ):
            self.check_runtime()
            with exclusive(path, "compiling"):
                if not self.is_made(identity):
                    dtype = DTYPES[identity["dtype"]]
                    registry.compile_program(make, path, identity, dtype, profile, self.tp)
        registry.precompile(paths, profile, self.tp, self.compiler_cache)
        return paths

    @property
    def compiler_cache(self) -> Path:
        """The cache folder of compilers that run in the ranks."""
        return self.artifacts / "compiled"

    # --- whether a generation fits the device -----------------------------------------------------

    def check_plan_fits(self, job: Job, neuron_gemma: bool) -> None:
        """Raise UserError if a generation does not fit by the plan, for which its graphs are
        exported. neuron_gemma: whether the ranks encode the prompt."""
        gemma = self.gemma if neuron_gemma else None
        profile = self.dit_profile(job.buckets, used=False)
        check_fits(self.checkpoint, profile, job, self.tp, self.dtype_name, gemma)

    def compiled_memory(
        self, stages: list[list[Manifest]], neuron_gemma: bool, decoders: list[Manifest], job: Job
    ) -> CoreMemory:
        """The memory that a generation needs per core, from the weights and costs in its graphs'
        manifests and the sizes of other rank files.

        stages    manifests of each stage's program, or of those of its tiles
        decoders  manifests of the video VAE and of the decoders of sound on the ranks
        """
        programs = chain.from_iterable(stages)
        weights = {n: shape for manifest in programs for n, shape in manifest.weights().items()}
        models = {manifest.identity["model"] for manifest in decoders}
        return CoreMemory(
            sum(map(math.prod, weights.values())) * self.dtype.itemsize,
            _rank_bytes(self.weights("gemma3", self.text_loras(job))) if neuron_gemma else 0,
            compiled_activations(stages),
            sum(_rank_bytes(self.weights(model)) for model in models),
            compiled_tile(decoders),
        )

    def check_compiled_fits(self, memory: CoreMemory, job: Job, neuron_gemma: bool) -> None:
        """Raise UserError if a generation does not fit by its compiled_memory. Exports nothing."""
        limit, needed = self.profile.memory_bytes_per_core, memory.needed(self.profile)
        if limit is not None and needed > limit:
            self.check_plan_fits(job, neuron_gemma)  # names a size that fits
            advice = "Type a smaller size, a larger --tp-degree, or --dtype bfloat16"
            raise does_not_fit(self.profile, job.size, self.tp, needed, advice)


def compiled_size(job: Job) -> dict:
    """The entry of a manifest whose graphs are compiled for a job."""
    inputs = {"inputs": job.own_graphs} if job.own_graphs else {}
    return asdict(job.size) | {"recipe": job.recipe} | inputs


def _rank_bytes(folder: Path) -> int:
    """Bytes of one rank's weights: those of its file, whose header is negligible."""
    return rank_path(folder, 0).stat().st_size


def verify_finished(model: str, artifacts_dir: Path) -> None:
    """Compare every finished weight set of a model with its manifest."""
    models = ("vae", "encoder", "sound") if model == "vae" else (model,)
    folders = [path for each in models for path in artifacts.finished_weights(artifacts_dir, each)]
    if not folders:
        raise UserError(
            f"no finished {model} weights in {artifacts_dir}; choose another place with"
            " --artifacts-dir DIR"
        )
    for path in folders:
        check_whole(path, verify(path), command(shard_verb(model), "--checkpoint-path", "FILE"))
        print(f"whole: {path} (--checkpoint-path compares it with the source as well)")
