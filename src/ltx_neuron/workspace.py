"""Workspace: one checkpoint on one profile, and the artifacts that belong to it. What the
scripts share.

It knows the identity of every weight set and graph, makes them, and finds them again or says what
to type.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from itertools import chain
from pathlib import Path

import torch

from ltx_neuron import artifacts
from ltx_neuron.backends import registry
from ltx_neuron.backends.export import TorchDistComm
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.config import (
    REGISTERS,
    Bucket,
    check_gemma_fits,
    digest,
    gemma_config,
    transformer_config,
    video_decoder_config,
)
from ltx_neuron.files import exclusive
from ltx_neuron.host.arithmetic import Arithmetic, arithmetic, fastest_libraries
from ltx_neuron.job import Job, Stage
from ltx_neuron.models.gemma3 import layers_first
from ltx_neuron.models.modulation import host_weights
from ltx_neuron.models.programs import (
    Program,
    connector_program,
    dit_program,
    gemma3_program,
    may_divide,
    tile_program,
    tile_program_name,
)
from ltx_neuron.plan import (
    CoreMemory,
    check_fits,
    check_text_fits,
    compiled_activations,
    compiled_tile,
    does_not_fit,
)
from ltx_neuron.profiles import Profile, require_runtime
from ltx_neuron.text.cache import (
    HOST_ENCODER_CODE,
    RANK_ENCODER_CODE,
    PromptCache,
    encoder_identity,
)
from ltx_neuron.text.host_encoder import HostTextEncoder
from ltx_neuron.text.inputs import gemma3_program_name, load_tokenizer
from ltx_neuron.tune import chosen
from ltx_neuron.weights.checkpoint import Checkpoint, Source, gemma_files
from ltx_neuron.weights.lora import MergedSource, WeightSet
from ltx_neuron.weights.rankfiles import check_whole, rank_file, verify
from ltx_neuron.weights.sharder import (
    Layout,
    ShardSpec,
    check_specs,
    compare,
    shard_specs,
    shard_weights,
)
from ltx_neuron.weights.sharding import MODELS
from ltx_neuron.weights.tensorfile import DTYPES

ROOT = Path(__file__).resolve().parents[2]  # where the scripts lie
MAX_TIMESTEPS = 4  # how many more distinct timesteps than needed a found graph may have


class Workspace:
    """Paths are the user's; nothing is read before it is needed. Raises UserError for whatever does
    not fit together."""

    def __init__(
        self,
        checkpoint_path: Path,
        profile: Profile,
        artifacts_dir: Path,
        tp: int,
        dtype: str,
        gemma_root: Path | None = None,
        blocks_per_graph: int | None = None,
    ):
        self.checkpoint_path = Path(checkpoint_path)
        self.gemma_root = gemma_root and Path(gemma_root)
        self.artifacts = Path(artifacts_dir)
        self.profile, self.tp = profile, tp
        self.dtype_name, self.dtype = dtype, DTYPES[dtype]
        self.blocks_per_graph = blocks_per_graph  # None: the profile's
        self._typed = profile.settings
        self.chosen: chosen.Chosen | None = None
        self.ignores_tuned, self._said = False, ""
        self.checkpoint = Checkpoint(self.checkpoint_path)
        self.transformer = transformer_config(self.checkpoint.config)
        self.transformer.check_tensor_parallel(tp)
        self._found: dict[str, Path] = {}  # finished folders, by the digest of their identity
        self._dit_sources: dict[WeightSet, MergedSource] = {}
        self._dit_folders: dict[WeightSet, Path] = {}

    def take_tuned(self) -> None:
        """Take what python -m ltx_neuron.tune chose for this device and model, if it did. What was
        typed still wins."""
        config = self.transformer.digest
        identity = chosen.identity(self.profile, self.tp, self.dtype_name, config)
        self.chosen = chosen.load(self.artifacts, identity)
        if self.chosen:
            self.profile = self.chosen.profile_of_run(self.profile)

    def say_tuned(self, buckets: Iterable[Bucket] = ()) -> None:
        """Print once which tuned settings are in use, if there are any.

        buckets  of a size that is not asked for yet
        """
        self.dit_profile(buckets)
        line = self.chosen.line() if self.chosen else ""
        if line != self._said:
            print(line)
        self._said = line

    @cached_property
    def gemma(self):
        config = gemma_config(self.gemma_root)
        projection = self.checkpoint.shapes.get(
            "text_embedding_projection.video_aggregate_embed.weight"
        )
        check_gemma_fits(config, self.transformer, self.gemma_root, projection and projection[1])
        return config

    def dit_source(self, loras: WeightSet = ()) -> MergedSource:
        """The DiT's weights, with LoRAs merged in. UserError where one is not of this model."""
        if loras not in self._dit_sources:
            files, heads = [self.checkpoint], self.transformer.heads
            self._dit_sources[loras] = MergedSource(MODELS["dit"], files, loras, heads)
        return self._dit_sources[loras]

    @cached_property
    def gemma_source(self) -> Source:
        heads = self.transformer.heads | self.gemma.heads
        return Source(MODELS["gemma3"], [self.checkpoint, *gemma_files(self.gemma_root)], heads)

    @cached_property
    def video_decoder(self):
        """The sizes of the video decoder; UserError where the ranks cannot run it."""
        return video_decoder_config(self.checkpoint.config)

    @cached_property
    def vae_source(self) -> Source:
        return Source(MODELS["vae"], [self.checkpoint])

    @cached_property
    def tokenizer(self):
        """Gemma's tokenizer."""
        return load_tokenizer(self.gemma_root)

    def host_text_encoder(self) -> HostTextEncoder:
        """The text encoder for the host's CPU; it loads weights when it encodes."""
        return HostTextEncoder(
            self.gemma_source, self.gemma, self.transformer, self.dtype, self.arithmetic.libraries
        )

    @property
    def arithmetic(self) -> Arithmetic:
        """What the host computes with."""
        found = arithmetic(self.profile.host_dtype, self.dtype, self.artifacts)
        return found._replace(libraries=fastest_libraries(self.artifacts))

    @property
    def identity(self) -> dict:
        """What the outputs of a run depend on besides the job: recorded in reports and sidecars."""
        return {
            "checkpoint": self.checkpoint.fingerprint,
            "model_version": self.checkpoint.model_version,
            "config": self.transformer.digest,
            "dtype": self.dtype_name,
            "profile_set": list(self.profile.settings),
            "host_threads": self.profile.host_threads,
            **self.arithmetic.describe(),
            "rank_threads": self.profile.rank_threads(self.tp),
        }

    def prompt_cache(self, neuron_gemma: bool) -> PromptCache:
        """The contexts of earlier runs with this encoder, on the ranks (`neuron_gemma`) or on the
        host."""
        profile, libraries = self.profile, self.arithmetic.libraries._asdict()
        device = {"device": "host", "host_products": libraries}
        if neuron_gemma:
            graphs = registry.identity(profile, "gemma3")
            device = {"device": "ranks", "tp": self.tp, "profile": profile.name, **graphs}
        code = RANK_ENCODER_CODE if neuron_gemma else HOST_ENCODER_CODE
        identity = encoder_identity(
            weights=self.gemma_source.fingerprint,
            gemma_config=self.gemma.digest,
            transformer_config=self.transformer.digest,
            dtype=self.dtype_name,
            code=artifacts.code_digest(profile.backend, *code),
            threads=(profile.host_threads, profile.rank_threads(self.tp)),
            device=device | {"profile_set": list(profile.settings)},
        )
        widths = self.transformer.video.inner, self.transformer.audio.inner
        return PromptCache(self.artifacts / "prompts", identity, widths, self.dtype)

    # --- identities -------------------------------------------------------------------------------

    def _weights_identity(self, model: str, source: Source) -> dict:
        return {
            "kind": "weights",
            "model": model,
            "source": source.fingerprint,
            "tp": self.tp,
            "dtype": self.dtype_name,
            "layout": artifacts.LAYOUT,
            "loras": getattr(source, "lora_identity", []),
        }

    def _graph_identity(self, model: str, bucket: str, config: str) -> dict:
        return {
            "kind": "graphs",
            "model": model,
            "bucket": bucket,
            "config": config,
            "tp": self.tp,
            "dtype": self.dtype_name,
            "backend": self.profile.backend,
            "code": artifacts.code_digest(self.profile.backend),
            "torch": torch.__version__,
            **registry.identity(self.profile, model),
        }

    def dit_profile(self, buckets: Iterable[Bucket], used: bool = True) -> Profile:
        """The profile of the DiT's graphs of a size, given as its stages' buckets. used: whether
        they are compiled or run."""
        if not self.chosen:
            return self.profile
        return self.chosen.profile_of_size(self.profile, buckets, used)

    def graphs_of(self, job: Job) -> dict[str, object]:
        """What of a job's graphs its latents depend on."""
        profile = self.dit_profile(job.buckets)
        return {
            "blocks_per_graph": self.cut(profile),
            "attention": profile.attention,
            "sequence_parallel": profile.sequence_parallel,
        }

    def cut(self, profile: Profile) -> int:
        """Blocks in one of the DiT's graphs, 0 for the whole step."""
        return profile.blocks_per_graph if self.blocks_per_graph is None else self.blocks_per_graph

    def _dit_identity(self, bucket: Bucket, profile: Profile) -> dict:
        identity = self._graph_identity("dit", bucket.name, self.transformer.digest)
        return identity | {
            "blocks_per_graph": self.cut(profile),
            "attention": profile.attention,
            "sequence_parallel": self._divides(bucket, profile),
        }

    def _divides(self, bucket: Bucket, profile: Profile) -> bool:
        """Whether a bucket's graphs are sequence parallel."""
        return profile.sequence_parallel and may_divide(bucket, self.tp)

    def _gemma3_identity(self, tokens: int) -> dict:
        config = f"{self.gemma.digest}-{self.transformer.digest}"
        states = {"hidden_states": self.profile.return_hidden_states}
        return self._graph_identity("gemma3", str(tokens), config) | states

    def _connectors_identity(self) -> dict:
        return self._graph_identity("connectors", "1024", self.transformer.digest) | {
            "attention": self.profile.attention
        }

    def _vae_identity(self, tile: tuple[int, int, int]) -> dict:
        name = "x".join(map(str, tile))
        return self._graph_identity("vae", name, self.video_decoder.digest)

    # --- cutting rank files -----------------------------------------------------------------------

    def shard_dit(
        self, sets: Iterable[WeightSet] = ((),), workers: int | None = None
    ) -> list[Path]:
        """Write the DiT's rank files, once for every set of LoRAs; returns the folders."""
        sources = list(map(self.dit_source, sets))  # one that does not fit is refused first
        return [self._shard("dit", s, self._dit_specs(s), workers) for s in sources]

    def shard_gemma3(self, workers: int | None = None) -> Path:
        """Write the text encoder's, its projections' and the connectors' rank files; returns the
        folder."""
        return self._shard("gemma3", self.gemma_source, self._gemma3_specs(), workers)

    def shard_vae(self, workers: int | None = None) -> Path:
        """Write the video decoder's rank files, which are all alike; returns the folder."""
        return self._shard("vae", self.vae_source, self._vae_specs(), workers)

    def shard(
        self, model: str, sets: Iterable[WeightSet] = ((),), workers: int | None = None
    ) -> list[Path]:
        """Write the rank files of a model, one of MODELS; returns the folders. sets: the DiT's."""
        if model == "dit":
            return self.shard_dit(sets, workers)
        return [self.shard_vae(workers) if model == "vae" else self.shard_gemma3(workers)]

    def _shard(
        self, model: str, source: Source, specs: list[ShardSpec], workers: int | None
    ) -> Path:
        identity = self._weights_identity(model, source)
        path = artifacts.folder(self.artifacts, identity)
        if not shard_weights(source, path, identity, self.tp, self.dtype, specs, workers):
            print(f"already there, nothing to do (--verify checks every byte): {path}")
        return path

    def _dit_specs(self, source: Source) -> list[ShardSpec]:
        specs = shard_specs(source, self.tp, {})
        (bucket,) = Job("").buckets
        program = dit_program(
            self.transformer, bucket, self.tp, TorchDistComm(self.tp), self.dtype, 1
        )
        check_specs(specs, program.weights(), host_weights(self.transformer))
        return specs

    def _gemma3_specs(self) -> list[ShardSpec]:
        config, gemma, comm = self.transformer, self.gemma, TorchDistComm(self.tp)
        gemma.check_tensor_parallel(self.tp)
        # The aggregate projections are stored layer by layer, as the encoder multiplies them.
        by_layer = Layout(lambda weight: layers_first(weight, gemma.hidden_size), split=1)
        layouts = {f"{stream}_aggregate_embed.weight": by_layer for stream in ("video", "audio")}
        specs = shard_specs(self.gemma_source, self.tp, layouts)
        tokens, attention = self.profile.text_buckets[0], self.profile.attention
        encoder = gemma3_program(gemma, config, tokens, self.tp, comm, self.dtype, False)
        connectors = connector_program(config, self.tp, comm, self.dtype, attention)
        host = {
            "embed_tokens.weight": (gemma.vocab_size, gemma.hidden_size),
            "video_connector.learnable_registers": (REGISTERS, config.video_connector.inner),
            "audio_connector.learnable_registers": (REGISTERS, config.audio_connector.inner),
        }
        check_specs(specs, encoder.weights() | connectors.weights(), host)
        return specs

    def _vae_specs(self) -> list[ShardSpec]:
        specs = shard_specs(self.vae_source, self.tp, {})
        check_specs(specs, tile_program(self.video_decoder, (1, 1, 1), self.dtype).weights(), {})
        return specs

    # --- verifying rank files ---------------------------------------------------------------------

    def verify_dit(self, sets: Iterable[WeightSet] = ((),)) -> list[Path]:
        """Compare the DiT's finished rank files, of every set of LoRAs, with their manifests and
        bit for bit with the checkpoint. Raises UserError that lists what differs; returns the
        folders."""
        paths = {loras: self.dit_weights(loras) for loras in sets}
        for loras, path in paths.items():
            source = self.dit_source(loras)
            self._verify(path, source, self._dit_specs(source))
        return list(paths.values())

    def verify_gemma3(self) -> list[Path]:
        """Compare the text encoder's finished rank files with their manifest and bit for bit with
        Gemma's files and the checkpoint. Raises UserError that lists what differs."""
        path = self.gemma3_weights()
        self._verify(path, self.gemma_source, self._gemma3_specs())
        return [path]

    def verify(self, model: str, sets: Iterable[WeightSet] = ((),)) -> list[Path]:
        """Compare the finished rank files of a model, one of MODELS, as verify_dit does."""
        if model != "vae":
            return self.verify_dit(sets) if model == "dit" else self.verify_gemma3()
        path = self.vae_weights()
        self._verify(path, self.vae_source, self._vae_specs())
        return [path]

    def _verify(self, path: Path, source: Source, specs: list[ShardSpec]) -> None:
        check_whole(path, verify(path) or compare(source, path, self.tp, self.dtype, specs))

    # --- compiling graphs -------------------------------------------------------------------------

    def compile_dit(self, buckets: list[Bucket]) -> list[Path]:
        """Trace the DiT step for each bucket, of one size, that is not there yet; returns the
        folders."""
        profile = self.dit_profile(buckets)
        comm = registry.comm(profile, self.tp)

        def program(bucket: Bucket) -> Program:
            return dit_program(
                self.transformer,
                bucket,
                self.tp,
                comm,
                self.dtype,
                self.cut(profile),
                profile.attention,
                self._divides(bucket, profile),
            )

        if profile.sequence_parallel:
            for tokens in sorted(
                {b.video_tokens for b in buckets if not self._divides(b, profile)}
            ):
                print(
                    f"{tokens} video tokens do not divide over {self.tp} ranks: compiled without"
                    " sequence parallelism"
                )
        programs = [(self._dit_identity(b, profile), partial(program, b)) for b in buckets]
        return self._compile(programs, profile)

    def compile_text(self) -> list[Path]:
        """Trace the text encoder for every bucket of tokens, and the connectors."""
        self.gemma.check_tensor_parallel(self.tp)
        check_text_fits(self.profile, self.tp, self.dtype_name, self.gemma, self.transformer)
        comm, states = registry.comm(self.profile, self.tp), self.profile.return_hidden_states

        def encoder(tokens: int) -> Program:
            return gemma3_program(
                self.gemma, self.transformer, tokens, self.tp, comm, self.dtype, states
            )

        def connectors() -> Program:
            return connector_program(
                self.transformer, self.tp, comm, self.dtype, self.profile.attention
            )

        buckets = self.profile.text_buckets
        programs = [(self._gemma3_identity(n), partial(encoder, n)) for n in buckets]
        return self._compile([*programs, (self._connectors_identity(), connectors)])

    def compile_vae(self, clip: tuple[int, int, int]) -> list[Path]:
        """Trace the video decoder for every shape of a clip's tiles; `clip` is its latent (F, h,
        w)."""

        def program(tile: tuple[int, int, int]) -> Program:
            return tile_program(self.video_decoder, tile, self.dtype)

        shapes = self.tile_shapes(clip)
        return self._compile([(self._vae_identity(t), partial(program, t)) for t in shapes])

    def tile_shapes(self, clip: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        """The shapes of the tiles in which the ranks decode a clip's latent (F, h, w)."""
        from ltx_neuron.host import tiles  # imports ltx-core: not needed for flags

        return tiles.tile_shapes(clip, tiles.tiling_for_ranks(self.profile, clip, self.tp))

    def _compile(
        self, programs: list[tuple[dict, Callable[[], Program]]], profile: Profile | None = None
    ) -> list[Path]:
        """Compile each program of an identity that is not there yet; returns all folders. Where
        another process compiles one, this waits and takes it. profile: another than the run's."""
        profile, paths = profile or self.profile, []
        for identity, make in programs:
            path = artifacts.folder(self.artifacts, identity)
            paths.append(path)
            if (path / artifacts.MANIFEST).is_file():
                continue
            require_runtime(profile, self.tp)
            with exclusive(path, "compiling"):
                if not (path / artifacts.MANIFEST).is_file():
                    registry.compile_program(make, path, identity, self.dtype, profile, self.tp)
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
        tiles: list[Manifest],
        loras: WeightSet = (),
    ) -> CoreMemory:
        """What a generation needs of a core, by what was counted when its graphs were compiled and
        by the sizes of its rank files. tiles: manifests of a video decoder on the ranks. loras: of
        any of its weight sets, which are of one size."""
        return CoreMemory(
            _rank_bytes(self.dit_weights(loras)),
            _rank_bytes(self.gemma3_weights()) if neuron_gemma else 0,
            compiled_activations(manifests),
            _rank_bytes(self.vae_weights()) if tiles else 0,
            compiled_tile(tiles),
        )

    def check_compiled_fits(self, memory: CoreMemory, job: Job, neuron_gemma: bool) -> None:
        """Raise UserError where a generation does not fit, by its compiled_memory: nothing is
        exported."""
        limit, needed = self.profile.memory_bytes_per_core, memory.needed(self.profile)
        if limit is not None and needed > limit:
            self.check_plan_fits(job, neuron_gemma)  # names a size that fits
            advice = "Type a smaller size, a larger --tp-degree, or --dtype bfloat16"
            raise does_not_fit(self.profile, job.size, self.tp, needed, advice)

    # --- finding what was made --------------------------------------------------------------------

    def dit_weights(self, loras: WeightSet = (), command: str = "") -> Path:
        """The folder of the DiT's rank files with these LoRAs merged in. command: what makes them,
        where more than this set alone is to be made."""
        if loras not in self._dit_folders:
            identity = self._weights_identity("dit", self.dit_source(loras))
            command = command or self._shard_command({"--lora": loras})
            self._dit_folders[loras] = self._find(identity, command)
        return self._dit_folders[loras]

    def check_dit_weights(self, jobs: Iterable[Job]) -> None:
        """Raise UserError where a stage's weight set is missing, with the commands that make all
        that are."""
        different = {tuple(stage.loras for stage in job.stages): job for job in jobs}
        commands = {}
        for sets, job in different.items():
            if not all(map(self._is_sharded, sets)):
                given = job.loras, job.stage_1_loras, job.stage_2_loras
                given = given if len(sets) > 1 else (*sets, (), ())
                named = dict(zip(("--lora", "--ic-lora", "--distilled-lora"), given, strict=True))
                commands[self._shard_command(named)] = None
        for loras in chain.from_iterable(different):
            self.dit_weights(loras, "\n".join(commands))

    def _is_sharded(self, loras: WeightSet) -> bool:
        identity = self._weights_identity("dit", self.dit_source(loras))
        return (artifacts.folder(self.artifacts, identity) / artifacts.MANIFEST).is_file()

    def _shard_command(self, loras: dict[str, WeightSet]) -> str:
        """What makes the weight sets that LoRAs name, given by their flags."""
        given = [(flag, lora) for flag, several in loras.items() for lora in several]
        words = [word for flag, lora in given for word in (flag, lora.path, lora.strength)]
        return self._command("shards/shard_backbone_weights.py", *words)

    def gemma3_weights(self) -> Path:
        """The folder of the text encoder's rank files."""
        command = self._command("shards/shard_gemma3_weights.py", gemma=True)
        return self._find(self._weights_identity("gemma3", self.gemma_source), command)

    def vae_weights(self) -> Path:
        """The folder of the video decoder's rank files."""
        command = self._command("shards/shard_vae_weights.py")
        return self._find(self._weights_identity("vae", self.vae_source), command)

    def tile_programs(self, clip: tuple[int, int, int]) -> dict[str, Manifest]:
        """The compiled video decoder, a program per shape of the tiles of a clip, given as its
        latent (F, h, w)."""
        frames, height, width = 8 * clip[0] - 7, 32 * clip[1], 32 * clip[2]
        flags = "--height", height, "--width", width, "--num-frames", frames
        command = self._command("compile/compile_vae.py", *flags)
        return {
            tile_program_name(tile): Manifest(self._find(self._vae_identity(tile), command))
            for tile in self.tile_shapes(clip)
        }

    def text_programs(self, buckets: tuple[int, ...]) -> dict[str, Manifest]:
        """The compiled text encoder, a program per bucket of tokens, and the connectors."""
        self.gemma.check_tensor_parallel(self.tp)
        identities = {gemma3_program_name(n): self._gemma3_identity(n) for n in buckets}
        identities["connectors"] = self._connectors_identity()
        command = self._command("compile/compile_gemma3.py", gemma=True)
        return {name: Manifest(self._find(i, command)) for name, i in identities.items()}

    def dit_program_for(self, job: Job, stage: Stage) -> tuple[Bucket, Manifest]:
        """The compiled step for a stage: the graph with the fewest distinct timesteps that are
        enough. Raises UserError with the command that compiles it."""
        needed = job.bucket(stage).timesteps
        candidates = [job.bucket(stage, needed + more) for more in range(MAX_TIMESTEPS)]
        profile = self.dit_profile(job.buckets)
        compiled = (bucket for bucket in candidates if self._is_compiled(bucket, profile))
        bucket = next(compiled, candidates[0])
        command = self._command("compile/compile_transformer.py", *_shape_flags(job))
        return bucket, Manifest(self._find(self._dit_identity(bucket, profile), command))

    def compiled_buckets(self) -> set[str]:
        """Names of the buckets that the DiT is compiled for on this profile, however it is cut."""
        wanted = self._graph_identity("dit", "", self.transformer.digest)
        fields = ("model", "config", "tp", "dtype", "backend", "code", "torch")
        return {
            stored["bucket"]
            for stored in artifacts.finished_graphs(self.artifacts)
            if all(stored.get(field) == wanted[field] for field in fields)
        }

    def _is_compiled(self, bucket: Bucket, profile: Profile) -> bool:
        folder = artifacts.folder(self.artifacts, self._dit_identity(bucket, profile))
        return os.path.isfile(folder / artifacts.MANIFEST)

    def _find(self, identity: dict, command: str) -> Path:
        """The finished folder of an identity, checked once; UserError with the command to type."""
        key = digest(identity)
        if key not in self._found:
            self._found[key] = artifacts.find(self.artifacts, identity, command)
        return self._found[key]

    def _command(self, script: str, *flags, gemma: bool = False) -> str:
        """What to type to make something of this workspace with one of the scripts."""
        on_path = shutil.which("python") == sys.executable
        python = "python" if on_path else _from_here(Path(sys.executable))
        words = [python, _from_here(ROOT / script), "--checkpoint-path", self.checkpoint_path]
        words += ["--gemma-root", self.gemma_root] if gemma else []
        words += [*flags, "--tp-degree", self.tp, "--dtype", self.dtype_name]
        words += ["--artifacts-dir", self.artifacts, "--profile", self.profile.name]
        for setting in self._typed:
            words += ["--profile-set", setting]
        if not script.startswith("compile/"):
            return shlex.join(map(str, words))
        if script == "compile/compile_transformer.py" and self.blocks_per_graph is not None:
            words += ["--blocks-per-graph", self.blocks_per_graph]
        words += ["--no-tuned"] if self.ignores_tuned else []
        tuned = self.chosen and self.chosen.line()
        return shlex.join(map(str, words)) + (f"\n{tuned}" if tuned else "")


def _from_here(path: Path) -> Path:
    """A path as it is typed in this folder."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _shape_flags(job: Job) -> list:
    """What compile_transformer.py takes for a job's graphs."""
    size, flags = job.size, []
    if not job.retake:  # whose file says it
        flags += ["--height", size.height, "--width", size.width]
        flags += ["--num-frames", size.num_frames, "--frame-rate", size.frame_rate]
    elif job.extension:
        flags += ["--num-frames", size.num_frames]
    flags += [*(["--two-stage"] if size.two_stage else []), "--recipe", job.recipe]
    # An IC-LoRA's metadata says how its references are scaled.
    for lora in job.stage_1_loras if job.references else ():
        flags += ["--ic-lora", lora.path, lora.strength]
    return flags + job.shape_flags


def _rank_bytes(folder: Path) -> int:
    """Bytes of one rank's weights: its file, whose header is small beside them."""
    return (folder / rank_file(0)).stat().st_size
