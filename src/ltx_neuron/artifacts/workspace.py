"""Workspace: one checkpoint on one profile, and the weights and graphs that it may need.

A Need has all of one artifact in one place: its identity, its maker, and the command for errors.
`needs` is the one list of those of jobs, which build.py makes, and runs and the doctor find.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property, partial
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ltx_neuron import artifacts, hub, invocation
from ltx_neuron.artifacts import tuned_settings
from ltx_neuron.backends import registry
from ltx_neuron.backends.manifest import Manifest, recorded_sizes
from ltx_neuron.config.common import digest
from ltx_neuron.config.diffusion import (
    DiffusionDecoderConfig,
    diffusion_decoder_config,
    is_diffusion_vae,
    shortest,
)
from ltx_neuron.config.gemma import check_gemma_fits
from ltx_neuron.config.parts import KINDS
from ltx_neuron.config.profiles import Profile, describe_backend, require_runtime
from ltx_neuron.config.release import Release
from ltx_neuron.config.sound import SPAN_LATENTS, audio_decoder_config, span_sizes, vocoder_config
from ltx_neuron.config.transformer import Bucket, TransformerConfig, transformer_config
from ltx_neuron.config.video import video_decoder_config, video_encoder_config
from ltx_neuron.errors import FieldError, UserError, flag_of
from ltx_neuron.format import few
from ltx_neuron.host import dtypes
from ltx_neuron.job import Job, Stage
from ltx_neuron.models.programs import (
    Program,
    connector_program,
    diffusion_program,
    dit_program,
    encoder_program,
    gemma3_program,
    may_divide,
    program_name,
    spectrogram_program,
    tile_program,
    waveform_program,
    with_convolution,
)
from ltx_neuron.sampling.compat import COMPAT
from ltx_neuron.sampling.shapes import TIME_SCALE
from ltx_neuron.sampling.size import Size
from ltx_neuron.text.cache import HOST_ENCODER_CODE, RANK_ENCODER_CODE, PromptCache
from ltx_neuron.text.host_encoder import HostTextEncoder
from ltx_neuron.text.inputs import embedded_tokenizer, load_tokenizer
from ltx_neuron.weights.checkpoint import Checkpoint, Source
from ltx_neuron.weights.lora import MergedSource, WeightSet, identity_of, merged_transformer
from ltx_neuron.weights.model_files import ModelFiles
from ltx_neuron.weights.sharding import SHARDED_MODELS
from ltx_neuron.weights.tensorfile import DTYPES

# Model -> its title, its name in the shard command, and the config section of a VAE's file
SHARD_COMMANDS = {
    "dit": ("DiT", "transformer", ""),
    "gemma3": ("Gemma", "gemma3", ""),
    "vae": ("VAE", "vae", "vae"),
    "encoder": ("VAE", "vae", "vae"),
    "sound": ("VAE", "vae", "audio_vae"),
}
MAX_TIMESTEPS = 4  # a suitable graph has fewer surplus timesteps


class Need(NamedTuple):
    """Weights or graphs with a folder of their own.

    title     of those that are made together
    identity  determines the folder
    command   what the user types to make them
    name      of graphs: their program's, on the ranks
    program   of graphs: returns the program to compile
    profile   of graphs, if it is not the workspace's
    source    of weights: the tensors to shard
    note      printed before they are made
    size      of the DiT's graphs: the job's size in words
    """

    title: str
    identity: dict
    command: str
    name: str = ""
    program: Callable[[], Program] | None = None
    profile: Profile | None = None
    source: Source | None = None
    note: str = ""
    size: str = ""

    @property
    def model(self) -> str:
        return self.identity["model"]


class Workspace:
    """One checkpoint on one profile. Reads files when they are needed, and raises UserError for
    those that do not fit together."""

    def __init__(
        self,
        checkpoint_path: str | Path,
        profile: Profile,
        artifacts_dir: str | Path,
        tp: int,
        dtype: str,
        gemma_root: str | Path | None = None,
        **part_paths: str | Path | None,
    ):
        """part_paths: as of ModelFiles."""
        self.checkpoint_path = Path(checkpoint_path)
        self.artifacts = Path(artifacts_dir)
        self.profile, self.tp = profile, tp
        self.dtype_name, self.dtype = dtype, DTYPES[dtype]
        self._typed = profile.settings
        self.tuned_settings: tuned_settings.TunedSettings | None = None
        self._printed, self._printed_backend = "", False
        self.compat: str | None = None  # of jobs without their own
        self.recipe_note = ""  # a line about a recipe that nobody chose
        self.spatial_scale = Size.spatial_scale  # of the upsampler's file
        self.prepare_command = ""  # if set, errors have it instead of each artifact's command
        self.files = ModelFiles(checkpoint_path, gemma_root, **part_paths)
        self.checkpoint, self.config = self.files.checkpoint, self.files.config
        self.transformer = transformer_config(self.checkpoint.config)
        self.transformer.check_tensor_parallel(tp)
        profile.check_cores(tp)
        self._found: dict[str, Path] = {}  # finished folders, by the digest of their identity
        self._sources: dict[tuple[str, WeightSet], Source] = {}

    @property
    def gemma_root(self) -> Path | None:
        """Gemma's folder, or the text encoder's file."""
        return self.files.gemma_root

    def resolved(self, job: Job, compat: str | None = None) -> Job:
        """The job with the settings of the checkpoint's release, and of `compat` if it has none of
        its own. Raises FieldError for a job that the checkpoint cannot run."""
        if job.compat is None and (compat := compat or self.compat):
            job = job.replaced(compat=compat)
        job = job.scaled(self.spatial_scale)
        check_job(job, self.checkpoint, self.transformer)
        return of_release(job, self.checkpoint.release)

    def take_tuned(self) -> None:
        """Apply the tuned settings for this device and model, if there are any and the profile does
        not have tuned=no. Settings that the user typed take precedence."""
        if not self.profile.tuned:
            return
        config = self.transformer.digest
        identity = tuned_settings.identity(self.profile, self.tp, self.dtype_name, config)
        self.tuned_settings = tuned_settings.load(self.artifacts, identity)
        if self.tuned_settings:
            self.profile = self.tuned_settings.profile_of_run(self.profile)

    def check_runtime(self) -> None:
        """Raise UserError without the backend's packages; on Neuron, print once which it is."""
        require_runtime(self.profile, self.tp)
        if self.profile.device == "neuron" and not self._printed_backend:
            print(f"profile {self.profile.name}: {describe_backend(self.profile)}")
        self._printed_backend = True

    def print_tuned(self, buckets: Iterable[Bucket] = ()) -> None:
        """Print once which tuned settings are in use, if there are any, and the recipe's note.

        buckets  of a further size
        """
        self.dit_profile(buckets)
        if self.recipe_note:
            print(self.recipe_note)
            self.recipe_note = ""
        line = self.tuned_settings.line() if self.tuned_settings else ""
        if line != self._printed:
            print(line)
        self._printed = line

    @cached_property
    def gemma(self):
        assert self.gemma_root
        config, file = self.files.gemma, self.files.text_encoder
        projection = self.files.projections.shapes.get(
            "text_embedding_projection.video_aggregate_embed.weight"
        )
        features, download = projection[1] if projection else None, file.download if file else ""
        check_gemma_fits(config, self.transformer, self.gemma_root, features, download)
        return config

    def source(self, model: str, loras: WeightSet = ()) -> Source:
        """The weights of a model, one of MODELS; of the DiT, and of the connectors beside Gemma,
        with LoRAs merged in. Raises UserError for a LoRA of another model."""
        if (model, loras) not in self._sources:
            heads = self.transformer.heads
            if model == "gemma3":
                files = [self.checkpoint, *self.files.text_files()]
                source = MergedSource(SHARDED_MODELS[model], files, loras, heads | self.gemma.heads)
            elif model == "dit":
                source = merged_transformer(self.checkpoint, loras, heads)
            else:
                source = Source(SHARDED_MODELS[model], [self.files.of(SHARD_COMMANDS[model][2])])
            self._sources[model, loras] = source
        return self._sources[model, loras]

    @cached_property
    def video_decoder(self):
        """The video decoder's configuration. Raises UserError if the ranks do not support it."""
        if is_diffusion_vae(self.config):
            return diffusion_decoder_config(self.config, self.source("vae").names)
        return video_decoder_config(self.config)

    @cached_property
    def video_encoder(self):
        """The video encoder's configuration. Raises UserError if the ranks do not support it."""
        return video_encoder_config(self.config)

    @cached_property
    def audio_decoder(self):
        """The mel decoder's configuration. Raises UserError if the ranks do not support it."""
        return audio_decoder_config(self.config)

    @cached_property
    def vocoder(self):
        """The vocoder's configuration. Raises UserError if the ranks do not support it."""
        return vocoder_config(self.config)

    @cached_property
    def tokenizer(self):
        assert self.gemma_root
        file = self.files.text_encoder
        return embedded_tokenizer(file) if file else load_tokenizer(self.gemma_root)

    def text_loras(self, job: Job) -> WeightSet:
        """The LoRAs of a job that change the connectors. Raises FieldError unless all stages have
        them, because the prompt is encoded once."""
        sources = (self.source("dit", stage.loras) for stage in job.stages)
        first, *others = (getattr(source, "text_loras", ()) for source in sources)
        if differing := [lora for loras in others for lora in {*first} ^ {*loras}]:
            raise FieldError(
                "{lora} {path} changes the connectors, which encode the prompt once for all stages:"
                " type it as {lora} PATH [STRENGTH], not for one stage or in two strengths",
                path=differing[0].path,
            )
        return first

    def host_text_encoder(self, loras: WeightSet = ()) -> HostTextEncoder:
        """The text encoder for the host's CPU; it loads weights when it encodes."""
        source = self.source("gemma3", loras)
        return HostTextEncoder(source, self.gemma, self.transformer, self.dtype)

    @property
    def host_dtype(self) -> torch.dtype:
        """Of the video decoder on the host."""
        return dtypes.of_video(self.profile.host_dtype, self.dtype)

    @property
    def identity(self) -> dict:
        """What a run's outputs depend on besides the job, for reports and sidecars."""
        stored = self.checkpoint.quantised
        return {
            "checkpoint": self.checkpoint.fingerprint,
            **({"weights": f"{stored}, dequantised"} if stored else {}),
            "model_version": self.checkpoint.model_version,
            **self.files.identity,
            "config": self.transformer.digest,
            "dtype": self.dtype_name,
            "profile_set": list(self.profile.settings),
            "host_threads": self.profile.host_threads,
            "host_dtype": str(self.host_dtype).removeprefix("torch."),
            "rank_threads": self.profile.rank_threads(self.tp),
        }

    def prompt_cache(self, neuron_gemma: bool, loras: WeightSet = ()) -> PromptCache:
        """The cache of this encoder's contexts, on the ranks (`neuron_gemma`) or on the host."""
        profile, device = self.profile, {"device": "host"}
        if neuron_gemma:
            graphs = registry.identity(profile, "gemma3")
            device = {"device": "ranks", "tp": self.tp, "profile": profile.name, **graphs}
        code = RANK_ENCODER_CODE if neuron_gemma else HOST_ENCODER_CODE
        identity = {
            "weights": self.source("gemma3").fingerprint,
            "gemma_config": self.gemma.digest,
            "transformer_config": self.transformer.digest,
            "dtype": self.dtype_name,
            "code": artifacts.code_digest(profile.backend, *code),
            # Thread counts change the order of sums.
            "threads": [profile.host_threads, profile.rank_threads(self.tp)],
            "torch": torch.__version__,
            **device,
            "profile_set": list(profile.settings),
            **({"loras": identity_of(loras)} if loras else {}),
        }
        widths = self.transformer.video.inner, self.transformer.audio.inner
        return PromptCache(self.artifacts / "prompts", identity, widths, self.dtype)

    # --- needs ------------------------------------------------------------------------------------

    def weight_set(self, model: str, loras: WeightSet = ()) -> Need:
        """The rank files of a model, one of MODELS; of the DiT and of Gemma with these LoRAs."""
        source = self.source(model, loras)
        identity = {
            "kind": "weights",
            "model": model,
            "source": source.fingerprint,
            "tp": self.tp,
            "dtype": self._dtype_of(model),
            "layout": artifacts.LAYOUT,
            "loras": getattr(source, "lora_identity", []),
        }
        names = "".join(f", {lora.path.name} {lora.strength:g}" for lora in loras)
        title, verb, _ = SHARD_COMMANDS[model]
        command = self._command(f"shard {verb}", *(word for lora in loras for word in lora.words))
        return Need(f"{title} weights{names}", identity, command, source=source)

    def weight_sets(self, model: str, sets: Iterable[WeightSet] = ((),)) -> list[Need]:
        """The weight sets of one shard command; for the VAE those of Profile.vae_models."""
        models = self.profile.vae_models if model == "vae" else (model,)
        return [self.weight_set(name, loras) for loras in sets for name in models]

    def dit_profile(self, buckets: Iterable[Bucket], used: bool = True) -> Profile:
        """The profile of the DiT's graphs of one size. buckets: its stages'; used: whether the
        caller compiles or runs them."""
        if not self.tuned_settings:
            return self.profile
        return self.tuned_settings.profile_of_size(self.profile, buckets, used)

    def graphs_of(self, job: Job) -> dict[str, object]:
        """The settings of a job's graphs that affect its latents."""
        return graph_settings(self.dit_profile(job.buckets))

    def dit_graphs(self, buckets: Iterable[Bucket], job: Job | None = None) -> list[Need]:
        """The DiT step for buckets of one size, by default that of a job. job: for title and
        command."""
        buckets, title = [*buckets], "DiT graphs"
        profile = self.dit_profile(job.buckets if job else buckets)
        size = size_title(compiled_size(job)) if job else ""
        if job:
            title += f", {job.size}{', two stages' if job.size.two_stage else ''}"
        settings_of_size = graph_settings(profile)
        command = self._command("compile transformer", *(job.graph_flags() if job else ()))
        of_model = self._identity("dit", "", self.transformer.digest)
        of_model |= registry.identity(profile, "dit")  # a size's compiler flags may be tuned

        def need(bucket: Bucket) -> Need:
            possible = may_divide(bucket, self.tp, profile.context_parallel)
            divides = profile.sequence_parallel and possible
            settings = settings_of_size | {"sequence_parallel": divides}
            if not bucket.video_tokens:  # sound alone
                settings.pop("context_parallel", None)
            identity = of_model | {"bucket": bucket.name} | settings
            note = ""
            if profile.sequence_parallel and bucket.video_tokens and not divides:
                note = f"{bucket.video_tokens} video tokens are not divisible by {self.tp} ranks:"
                note += " compiled without sequence parallelism"

            def program() -> Program:
                comm = registry.comm(self.profile, self.tp)
                context = registry.context(self.profile, self.tp)
                cut = profile.blocks_per_graph, profile.attention, divides, context
                return dit_program(self.transformer, bucket, self.tp, comm, self.dtype, *cut)

            return Need(title, identity, command, bucket.name, program, profile, None, note, size)

        return [need(bucket) for bucket in buckets]

    def text_graphs(self, buckets: Iterable[int] = ()) -> list[Need]:
        """The text encoder for buckets of tokens, by default all of the profile's, and the
        connectors."""
        gemma, config, profile = self.gemma, self.transformer, self.profile
        gemma.check_tensor_parallel(self.tp)
        title, command = "Gemma graphs", self._command("compile gemma3")
        states, attention = profile.return_hidden_states, profile.attention

        def need(tokens: int) -> Need:
            sizes = f"{gemma.digest}-{config.digest}"
            identity = self._identity("gemma3", str(tokens), sizes, hidden_states=states)

            def program() -> Program:
                shared = self.tp, registry.comm(profile, self.tp), self.dtype
                return gemma3_program(gemma, config, tokens, *shared, states)

            return Need(title, identity, command, program_name("gemma3", tokens), program)

        def connectors() -> Program:
            comm = registry.comm(profile, self.tp)
            return connector_program(config, self.tp, comm, self.dtype, attention)

        identity = self._identity("connectors", "1024", config.digest, attention=attention)
        last = Need(title, identity, command, "connectors", connectors)
        return [*map(need, buckets or profile.text_buckets), last]

    def decoder_graphs(self, clip: tuple[int, int, int]) -> list[Need]:
        """The video decoder for every tile shape of a clip's latent (F, h, w)."""
        frames, height, width = 8 * clip[0] - 7, 32 * clip[1], 32 * clip[2]
        flags = "--height", height, "--width", width, "--num-frames", frames
        title = f"video decoder graphs, {times(clip)} latents"
        return self._tile_graphs(title, "vae", self.tile_shapes(clip), flags)

    def encoder_graphs(self, job: Job) -> list[Need]:
        """The video encoder for every tile shape of a job's videos; none if the host encodes
        them."""
        tiles = self.encoder_tiles(job)
        title = f"video encoder graphs, {', '.join(map(times, tiles))}"
        return self._tile_graphs(title, "encoder", tiles, job.graph_flags()) if tiles else []

    def _tile_graphs(
        self, title: str, model: str, tiles: list[tuple[int, int, int]], flags: Iterable
    ) -> list[Need]:
        config = self.video_decoder if model == "vae" else self.video_encoder
        has_convolutions = not isinstance(config, DiffusionDecoderConfig)
        form = {"convolution": self.profile.vae_convolution} if has_convolutions else {}
        command, needs = self._command("compile vae", *flags), []
        for tile in tiles:
            identity = self._identity(model, times(tile), config.digest, **form)
            program = partial(self.tile_program, model, tile)
            needs.append(Need(title, identity, command, program_name(model, *tile), program))
        return needs

    def tile_program(self, model: str, tile: tuple[int, int, int]) -> Program:
        """The program of the video encoder ("encoder") or decoder ("vae") for a tile, or of the
        diffusion decoder for a clip."""
        if model == "encoder":
            program = encoder_program(self.video_encoder, tile, self.dtype)
        elif isinstance(self.video_decoder, DiffusionDecoderConfig):
            return diffusion_program(self.video_decoder, tile, self.dtype)
        else:
            program = tile_program(self.video_decoder, tile, self.dtype)
        return with_convolution(program, self.profile.vae_convolution)

    def sound_graphs(self, latents: int, size: Size) -> list[Need]:
        """Mel decoder and vocoder for the spans of a sound with this number of latents. size: for
        the command."""
        flags = "--num-frames", size.num_frames, "--frame-rate", size.frame_rate
        command, (span, rows) = self._command("compile vae", *flags), span_sizes(latents)
        mel, vocoder, title = self.audio_decoder, self.vocoder, f"sound decoder graphs, {latents}"
        programs = {
            program_name("mel", span): (mel, partial(spectrogram_program, mel, span)),
            program_name("vocoder", rows): (vocoder, partial(waveform_program, vocoder, rows)),
        }
        identities = {n: self._identity("sound", n, of.digest) for n, (of, _) in programs.items()}
        return [
            Need(f"{title} latents", identities[name], command, name, program)
            for name, (_, program) in programs.items()
        ]

    def _identity(self, model: str, bucket: str, config: str, **settings: object) -> dict:
        """The identity of graphs. settings: of the profile, on which they depend."""
        return {
            "kind": "graphs",
            "model": model,
            "bucket": bucket,
            "config": config,
            "tp": self.tp,
            "dtype": self._dtype_of(model),
            "backend": self.profile.backend,
            "code": artifacts.code_digest(self.profile.backend),
            "torch": torch.__version__,
            **registry.identity(self.profile, model),
            **settings,
        }

    def _dtype_of(self, model: str) -> str:
        return "float32" if model == "sound" else self.dtype_name

    def _command(self, verb: str, *flags) -> str:
        """The command that makes weights or graphs of this workspace."""
        if self.prepare_command:
            return self.prepare_command
        words = ["--checkpoint-path", hub.hub_name(self.checkpoint_path)]
        for kind, path in self.files.given.items():
            if kind != "gemma" or verb.endswith("gemma3"):
                words += [KINDS[kind].flag, hub.hub_name(path)]
        words += [*flags, "--tp-degree", self.tp, "--dtype", self.dtype_name]
        words += ["--artifacts-dir", self.artifacts, "--profile", self.profile.name]
        for setting in self._typed:
            words += ["--profile-set", setting]
        if not verb.startswith("compile"):
            return invocation.command(verb, *words)
        words += [] if self.profile.tuned else ["--profile-set", "tuned=no"]
        tuned = self.tuned_settings and self.tuned_settings.line()
        return invocation.command(verb, *words) + (f"\n{tuned}" if tuned else "")

    # --- finding artifacts ------------------------------------------------------------------------

    def folder(self, need: Need) -> Path:
        return artifacts.folder(self.artifacts, need.identity)

    def is_made(self, need: Need) -> bool:
        """Whether the folder of a need is finished, without a check of its files."""
        return os.path.isfile(self.folder(need) / artifacts.MANIFEST)

    def find(self, need: Need, command: str = "") -> Path:
        """The finished folder of a need, checked once. Raises UserError with the command that makes
        it. command: by default the need's."""
        key = digest(need.identity)
        if key not in self._found:
            command = command or need.command
            self._check_size(need, command)
            self._found[key] = artifacts.find(self.artifacts, need.identity, command)
        return self._found[key]

    def _check_size(self, need: Need, command: str) -> None:
        """Raise UserError with the compiled sizes if the graphs of a job's size are missing only
        because this size was not compiled."""
        if not need.size or self.folder(need).is_dir():
            return
        compiled = {size_title(s) for sizes in self.compiled_sizes().values() for s in sizes}
        if compiled and need.size not in compiled:
            raise UserError(
                f"this job's size is not compiled in {self.artifacts}\n  needed: {need.size}\n"
                f"  compiled: {'; '.join(few(sorted(compiled)))}\nMake them: {command}"
            )

    def find_all(self, needs: Iterable[Need]) -> list[Path]:
        """The folders of needs, as `find`. The error for a missing one has the commands that make
        all of them."""
        needs = [*needs]
        missing = (need.command for need in needs if not self.is_made(need))
        commands = "\n".join(dict.fromkeys(missing))
        return [self.find(need, commands) for need in needs]

    def weights(self, model: str, loras: WeightSet = ()) -> Path:
        return self.find(self.weight_set(model, loras))

    def dit_weights(self, loras: WeightSet = ()) -> Path:
        return self.weights("dit", loras)

    def programs(self, graphs: Iterable[Need]) -> dict[str, Manifest]:
        return {need.name: Manifest(self.find(need)) for need in graphs}

    def dit_program_for(self, job: Job, stage: Stage, tile: int = 0) -> tuple[Bucket, Manifest]:
        """The compiled step for a stage or for one of its tiles: the graph with the fewest
        sufficient timesteps. Raises UserError with the command that compiles it."""
        needed = job.bucket(stage).timesteps
        counts = (needed + more for more in range(MAX_TIMESTEPS))
        buckets = [job.stage_buckets(stage, count)[tile] for count in counts]
        candidates = [*zip(buckets, self.dit_graphs(buckets, job), strict=True)]
        compiled = (pair for pair in candidates if self.is_made(pair[1]))
        bucket, need = next(compiled, candidates[0])
        return bucket, Manifest(self.find(need))

    def dit_programs_for(self, job: Job, stage: Stage) -> list[tuple[Bucket, Manifest]]:
        """The compiled step for a stage, or that for each of its tiles, as dit_program_for."""
        tiles = range(len(job.stage_tiles(stage)) or 1)
        return [self.dit_program_for(job, stage, number) for number in tiles]

    def compiled_sizes(self) -> dict[str, list[dict]]:
        """The DiT's compiled buckets on this profile, with any number of blocks per graph: their
        names -> the video sizes in their manifests."""
        identity = self._identity("dit", "", self.transformer.digest)
        fields = ("model", "config", "tp", "dtype", "backend", "code", "torch")
        sizes: dict[str, list[dict]] = {}
        for path in artifacts.finished_folders(self.artifacts, "graphs"):
            stored = artifacts.stored_identity(path) or {}
            if all(stored.get(field) == identity[field] for field in fields):
                sizes.setdefault(stored["bucket"], []).extend(recorded_sizes(path))
        return sizes

    @property
    def compiler_cache(self) -> Path:
        return self.artifacts / "compiled"

    def tile_shapes(self, clip: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        """The distinct shapes of the tiles in which the ranks decode a clip's latent (F, h, w).
        Each has its own graphs. The diffusion decoder's graphs serve clips of any length."""
        if isinstance(self.video_decoder, DiffusionDecoderConfig):
            return [shortest(self.video_decoder, clip)]
        from ltx_neuron.host import tiles  # imports ltx-core: not needed for flags

        cut = tiles.cut(clip, tiles.tiling_for_ranks(self.profile, clip, self.tp))
        return list(dict.fromkeys(map(tiles.tile_shape, cut)))

    def encoder_tiles(self, job: Job) -> list[tuple[int, int, int]]:
        """The distinct sizes (frames, rows, columns) of the tiles in which the ranks encode a job's
        videos. The host encodes an IC-LoRA's references, which have no tiles, and all videos where
        the encoder would take the transformer's place."""
        if not self.profile.may_keep_vae:
            return []
        from ltx_neuron.host.tiles import tile_counts  # imports ltx-core: not needed for flags

        clips = (clip.pixels for clip in job.encoded_clips if not clip.whole)
        return list(dict.fromkeys(tile for pixels in clips for tile in tile_counts(pixels)))


def compiled_size(job: Job) -> dict[str, Any]:
    """The entry of a manifest whose graphs are compiled for a job, or for its windows."""
    inputs = {"inputs": job.own_graphs} if job.own_graphs else {}
    return dataclasses.asdict(job.clips[0].size) | {"recipe": job.recipe} | inputs


def size_title(size: Mapping[str, Any]) -> str:
    """A compiled_size in words: width x height, as videos are called."""
    picture = f"{size['width']}x{size['height']} (width x height)"
    parts = [picture if size["width"] else "sound alone", f"{size['num_frames']} frames"]
    parts += ["two stages"] * size["two_stage"] + ["dev recipe"] * (size.get("recipe") == "dev")
    return ", ".join([*parts, *map(flag_of, size.get("inputs", ()))])


def graph_settings(profile: Profile) -> dict[str, object]:
    """The settings of a profile on which the DiT's graphs depend."""
    cp = profile.context_parallel
    return {
        "blocks_per_graph": profile.blocks_per_graph,
        "attention": profile.attention,
        "sequence_parallel": profile.sequence_parallel,
        **({"context_parallel": cp} if cp > 1 else {}),
    }


def times(sizes: Iterable[int]) -> str:
    return "x".join(map(str, sizes))


# --- a job on a checkpoint of a release -----------------------------------------------------------


def of_release(job: Job, release: Release) -> Job:
    """The job with a release's settings where the job has none. Returns `job` itself if nothing
    changes."""
    images = tuple(
        image if image.crf is not None else dataclasses.replace(image, crf=release.image_crf)
        for image in job.images
    )
    # Upstream's pipelines for other inputs than images use the Euler sampler without noise.
    ancestral = release.ancestral and job.recipe == "distilled" and not job.has_media()
    if (images, ancestral) == (job.images, job.ancestral):
        return job
    return job.replaced(image=images, ancestral=ancestral)


def check_job(job: Job, checkpoint: Checkpoint, transformer: TransformerConfig) -> None:
    """Raise FieldError for an input or a setting that does not run on a checkpoint."""
    count = job.num_generated_keyframes
    if (count or job.dfr or job.hdr_seams) and not transformer.use_keyframes_abs_pos_embedding:
        named = f"{{num_generated_keyframes}} {count}" if count else "{dfr}"
        raise FieldError(
            f"{named if count or job.dfr else '{text_embeddings}'}: the model of {checkpoint.path},"
            f" LTX {checkpoint.model_version}, generates no keyframes; leave it out"
        )


# --- what jobs need -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Settings of a run.

    neuron_gemma   encode prompts on the ranks, otherwise on the host's CPU
    neuron_vae     decode latents on the ranks, otherwise on the host's CPU; sound on the ranks only
                   with the profile's sound_on_ranks
    compat         a key of sampling.compat.COMPAT, the release whose numerics to follow; None: the
                   later releases
    warmup         a discarded first step per stage
    *_path         of models besides the checkpoint, or None
    cache_prompts  read contexts from the artifacts, and store new ones there
    """

    neuron_gemma: bool = False
    compat: str | None = None
    spatial_upsampler_path: str | Path | None = None
    temporal_upsampler_path: str | Path | None = None
    warmup: bool = False
    cache_prompts: bool = False
    neuron_vae: bool = False
    duration_head_path: str | Path | None = None


def needs(workspace: Workspace, jobs: list[Job], options: RunOptions) -> Iterator[Need]:
    """The weights and graphs of jobs, in the order of their making. A run also takes a stage's
    graph of the DiT for more timesteps (Workspace.dit_program_for)."""
    for loras in dict.fromkeys(stage.loras for job in jobs for stage in job.stages):
        yield workspace.weight_set("dit", loras)
    for buckets, job in {tuple(job.buckets_to_compile): job for job in jobs}.items():
        yield from workspace.dit_graphs(buckets, job)
    if options.neuron_gemma and (prompted := [job for job in jobs if job.texts]):
        for loras in dict.fromkeys(map(workspace.text_loras, prompted)):
            yield workspace.weight_set("gemma3", loras)
        yield from workspace.text_graphs()
    if options.neuron_vae:
        yield from map(workspace.weight_set, workspace.profile.vae_models)
        pictured = (job for job in jobs if not (job.sound_only or job.media.hdr))
        with_picture = (clip for job in pictured for clip in job.clips)
        for clip in dict.fromkeys(job.decoded_shape for job in with_picture):
            yield from workspace.decoder_graphs(clip)
        for job in {tuple(workspace.encoder_tiles(job)): job for job in jobs}.values():
            yield from workspace.encoder_graphs(job)
    if sound_on_ranks(workspace, options):
        # An input sound is not decoded.
        decoded = [clip for job in jobs if not (job.sound or job.silent) for clip in job.clips]
        sizes = {job.audio_latents: size for job in decoded if (size := sound_size(job))}
        for latents, size in sizes.items():
            yield from workspace.sound_graphs(latents, size)


def sound_on_ranks(workspace: Workspace, options: RunOptions) -> bool:
    """Whether the ranks decode sound; they do so only in fp32."""
    on_ranks = options.neuron_vae and workspace.profile.sound_on_ranks
    return on_ranks and audio_dtype(workspace, options) == torch.float32


def audio_dtype(workspace: Workspace, options: RunOptions) -> torch.dtype:
    """The dtype in which sound is decoded: a release used that of the transformer."""
    return workspace.dtype if COMPAT[options.compat].vocoder else torch.float32


def sound_size(job: Job) -> Size | None:
    """The size for which the decoders of a job's sound are compiled. None if the host decodes it:
    for an extended video shorter than a span, whose number of latents may be no size's."""
    if not job.extension:
        return job.of(job.stages[0]).size
    if job.audio_latents < SPAN_LATENTS:
        return None
    frames = job.extension.source_frames + job.extension.made_frames
    return dataclasses.replace(job.size, num_frames=TIME_SCALE * ceil(frames / TIME_SCALE) + 1)
