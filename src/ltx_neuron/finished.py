"""Finished: finds the existing weight sets and graphs of one checkpoint on one profile by their
identities. Errors for missing ones have the command that makes them."""

import dataclasses
import os
from collections.abc import Iterable
from functools import cached_property
from itertools import chain
from pathlib import Path

import torch

from ltx_neuron import artifacts, hub, invocation
from ltx_neuron.backends import registry
from ltx_neuron.backends.manifest import Manifest, recorded_sizes
from ltx_neuron.config.common import ModelConfig, digest
from ltx_neuron.config.diffusion import (
    DiffusionDecoderConfig,
    diffusion_decoder_config,
    is_diffusion_vae,
    shortest,
)
from ltx_neuron.config.gemma import check_gemma_fits
from ltx_neuron.config.release import Release
from ltx_neuron.config.sound import audio_decoder_config, span_sizes, vocoder_config
from ltx_neuron.config.transformer import Bucket, TransformerConfig, transformer_config
from ltx_neuron.config.video import video_decoder_config, video_encoder_config
from ltx_neuron.errors import FieldError, UserError
from ltx_neuron.host.arithmetic import Arithmetic, arithmetic, fastest_libraries
from ltx_neuron.host.encoding import tile_counts
from ltx_neuron.job import LORA_FIELDS, Job, Stage
from ltx_neuron.models.programs import (
    encoder_program_name,
    may_divide,
    spectrogram_program_name,
    tile_program_name,
    waveform_program_name,
)
from ltx_neuron.profiles import Profile, describe_backend, require_runtime
from ltx_neuron.sampling.size import Size
from ltx_neuron.sampling.spec import ConditionFields, SizeFields, to_flags
from ltx_neuron.text.cache import HOST_ENCODER_CODE, RANK_ENCODER_CODE, PromptCache
from ltx_neuron.text.host_encoder import HostTextEncoder
from ltx_neuron.text.inputs import embedded_tokenizer, gemma3_program_name, load_tokenizer
from ltx_neuron.tune import tuned_settings
from ltx_neuron.weights.checkpoint import Checkpoint, Source
from ltx_neuron.weights.lora import MergedSource, WeightSet, identity_of
from ltx_neuron.weights.model_files import PARTS, ModelFiles, check_release, named_release
from ltx_neuron.weights.sharding import MODELS
from ltx_neuron.weights.tensorfile import DTYPES, TensorFile

# Models of the VAEs, each with the config section whose file contains it
_SECTIONS = {"vae": "vae", "encoder": "vae", "sound": "audio_vae"}
MAX_TIMESTEPS = 4  # a suitable graph has fewer surplus timesteps


class Finished:
    """Existing artifacts of a checkpoint on a profile. Reads files when they are needed, and raises
    UserError for those that do not fit together."""

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
        self._said, self._said_backend = "", False
        self.compat: str | None = None  # of jobs without their own
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
        if self.profile.device == "neuron" and not self._said_backend:
            print(f"profile {self.profile.name}: {describe_backend(self.profile)}")
        self._said_backend = True

    def say_tuned(self, buckets: Iterable[Bucket] = ()) -> None:
        """Print once which tuned settings are in use, if there are any.

        buckets  of a further size
        """
        self.dit_profile(buckets)
        line = self.tuned_settings.line() if self.tuned_settings else ""
        if line != self._said:
            print(line)
        self._said = line

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
            files: list[TensorFile] = [self.checkpoint]
            heads = self.transformer.heads
            if model == "dit":
                source = self._merged(loras)
            elif model == "gemma3":
                files += self.files.text_files()
                source = MergedSource(MODELS[model], files, loras, heads | self.gemma.heads)
            else:
                source = Source(MODELS[model], [self.files.of(_SECTIONS[model])])
            self._sources[model, loras] = source
        return self._sources[model, loras]

    def _merged(self, loras: WeightSet) -> Source:
        """The DiT with LoRAs. Those of another release are merged if they fit, with a note."""
        release = self.checkpoint.release
        files = {lora: lora.file() for lora in loras}
        others = {lora: found for lora in loras if (found := named_release(files[lora]))}
        others = {lora: found for lora, found in others.items() if found is not release}
        try:
            source = MergedSource(MODELS["dit"], [self.checkpoint], loras, self.transformer.heads)
        except UserError:
            for lora in others:
                check_release(files[lora], "--lora", release, release.download("lora"))
            raise
        source.notes += [
            f"--lora {lora.path} is of LTX-{found.version}, the model of LTX-{release.version}: it"
            " is merged, as all its layers fit"
            for lora, found in others.items()
        ]
        return source

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
        """Gemma's tokenizer."""
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
        source, libraries = self.source("gemma3", loras), self.arithmetic.libraries
        return HostTextEncoder(source, self.gemma, self.transformer, self.dtype, libraries)

    @property
    def arithmetic(self) -> Arithmetic:
        """The host's arithmetic: dtype and libraries."""
        found = arithmetic(self.profile.host_dtype, self.dtype, self.artifacts)
        return found._replace(libraries=fastest_libraries(self.artifacts))

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
            **self.arithmetic.describe(),
            "rank_threads": self.profile.rank_threads(self.tp),
        }

    def prompt_cache(self, neuron_gemma: bool, loras: WeightSet = ()) -> PromptCache:
        """The cache of this encoder's contexts, on the ranks (`neuron_gemma`) or on the host."""
        profile, libraries = self.profile, self.arithmetic.libraries._asdict()
        device = {"device": "host", "host_products": libraries}
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

    # --- identities -------------------------------------------------------------------------------

    def weights_identity(self, source: Source) -> dict:
        """The identity of the rank files of a model's weights."""
        model = source.model.name
        return {
            "kind": "weights",
            "model": model,
            "source": source.fingerprint,
            "tp": self.tp,
            "dtype": "float32" if model == "sound" else self.dtype_name,
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
            "dtype": "float32" if model == "sound" else self.dtype_name,
            "backend": self.profile.backend,
            "code": artifacts.code_digest(self.profile.backend),
            "torch": torch.__version__,
            **registry.identity(self.profile, model),
        }

    def dit_profile(self, buckets: Iterable[Bucket], used: bool = True) -> Profile:
        """The profile of the DiT's graphs of one size. buckets: its stages'; used: whether the
        caller compiles or runs them."""
        if not self.tuned_settings:
            return self.profile
        return self.tuned_settings.profile_of_size(self.profile, buckets, used)

    def graphs_of(self, job: Job) -> dict[str, object]:
        """The settings of a job's graphs that affect its latents."""
        profile = self.dit_profile(job.buckets)
        return {
            "blocks_per_graph": profile.blocks_per_graph,
            "attention": profile.attention,
            "sequence_parallel": profile.sequence_parallel,
            **context_parallelism(profile),
        }

    def _dit_identity(self, bucket: Bucket, profile: Profile) -> dict:
        identity = self._graph_identity("dit", bucket.name, self.transformer.digest)
        return identity | {
            "blocks_per_graph": profile.blocks_per_graph,
            "attention": profile.attention,
            "sequence_parallel": self._divides(bucket, profile),
            **(context_parallelism(profile) if bucket.video_tokens else {}),
        }

    def dit_identities(self, buckets: list[Bucket]) -> list[dict]:
        """Identities of the DiT step for each bucket of one size."""
        profile = self.dit_profile(buckets)
        return [self._dit_identity(bucket, profile) for bucket in buckets]

    def _divides(self, bucket: Bucket, profile: Profile) -> bool:
        """Whether a bucket's graphs use sequence parallelism."""
        return profile.sequence_parallel and may_divide(bucket, self.tp, profile.context_parallel)

    # Identities of the other models' programs, by the programs' names.

    def text_identities(self, buckets: Iterable[int]) -> dict[str, dict]:
        """The text encoder for these token buckets, and the connectors."""
        profile, config = self.profile, self.transformer.digest
        identities = {}
        for tokens in buckets:
            both = f"{self.gemma.digest}-{config}"
            identity = self._graph_identity("gemma3", str(tokens), both)
            identity["hidden_states"] = profile.return_hidden_states
            identities[gemma3_program_name(tokens)] = identity
        connectors = self._graph_identity("connectors", "1024", config)
        return identities | {"connectors": connectors | {"attention": profile.attention}}

    def tile_identities(self, clip: tuple[int, int, int]) -> dict[str, dict]:
        """The video decoder for every tile shape of a clip's latent (F, h, w)."""
        config = self.video_decoder
        return {
            tile_program_name(tile): self._tile_identity("vae", tile, config)
            for tile in self.tile_shapes(clip)
        }

    def encoder_identities(self, job: Job) -> dict[str, dict]:
        """The video encoder for every tile shape of a job's videos; empty if the host encodes
        them."""
        return {
            encoder_program_name(tile): self._tile_identity("encoder", tile, self.video_encoder)
            for tile in self.encoder_tiles(job)
        }

    def _tile_identity(self, model: str, tile: tuple[int, int, int], config: ModelConfig) -> dict:
        identity = self._graph_identity(model, "x".join(map(str, tile)), config.digest)
        if isinstance(config, DiffusionDecoderConfig):  # it has no convolutions
            return identity
        return identity | {"convolution": self.profile.vae_convolution}

    def sound_identities(self, latents: int) -> dict[str, dict]:
        """Mel decoder and vocoder for the spans of a sound with this number of latents."""
        latents, rows = span_sizes(latents)
        configs = {
            spectrogram_program_name(latents): self.audio_decoder,
            waveform_program_name(rows): self.vocoder,
        }
        return {
            name: self._graph_identity("sound", name, config.digest)
            for name, config in configs.items()
        }

    # --- finding artifacts ------------------------------------------------------------------------

    def weights(self, model: str, loras: WeightSet = (), command: str = "") -> Path:
        """The folder of the rank files of a model, one of MODELS; of the DiT with these LoRAs.
        command: for the error if they are missing; by default one that makes only these."""
        identity = self.weights_identity(self.source(model, loras))
        return self._find(identity, command or self._shard_command(model, {"--lora": loras}))

    def dit_weights(self, loras: WeightSet = ()) -> Path:
        return self.weights("dit", loras)

    def check_dit_weights(self, jobs: Iterable[Job]) -> None:
        """Raise UserError for missing weight sets, with the commands that make all of them."""
        different = {tuple(stage.loras for stage in job.stages): job for job in jobs}
        commands = {}
        for sets, job in different.items():
            identities = (self.weights_identity(self.source("dit", loras)) for loras in sets)
            if not all(map(self.is_made, identities)):
                given: tuple[WeightSet, ...] = tuple(getattr(job, name) for name in LORA_FIELDS)
                given = given if len(set(sets)) > 1 else (sets[0], (), (), ())
                flags = "--lora", "--ic-lora", "--distilled-lora", "--detailing-lora"
                named: dict[str, WeightSet] = dict(zip(flags, given, strict=True))
                commands[self._shard_command("dit", named)] = None
        for loras in chain.from_iterable(different):
            self.weights("dit", loras, "\n".join(commands))

    def _shard_command(self, model: str, loras: dict[str, WeightSet]) -> str:
        """The command that makes a model's weight sets. loras: by their flags."""
        given = [(flag, lora) for flag, several in loras.items() for lora in several]
        words = [word for flag, x in given for word in (flag, hub.spelled(x.path), x.strength)]
        return self._command(shard_verb(model), *words, gemma=model == "gemma3")

    def tile_programs(self, clip: tuple[int, int, int]) -> dict[str, Manifest]:
        """The compiled video decoder, a program per tile shape of a clip's latent (F, h, w)."""
        frames, height, width = 8 * clip[0] - 7, 32 * clip[1], 32 * clip[2]
        flags = "--height", height, "--width", width, "--num-frames", frames
        command = self._command("compile vae", *flags)
        return self._programs(self.tile_identities(clip), command)

    def encoder_programs(self, job: Job) -> dict[str, Manifest]:
        """The compiled video encoder, a program per tile shape of a job's videos."""
        command = self._command("compile vae", *_shape_flags(job))
        return self._programs(self.encoder_identities(job), command)

    def sound_programs(self, size: Size, latents: int) -> dict[str, Manifest]:
        """The compiled mel decoder and vocoder for the spans of a sound with this number of
        latents. size: for the command."""
        flags = "--num-frames", size.num_frames, "--frame-rate", size.frame_rate
        command = self._command("compile vae", *flags)
        return self._programs(self.sound_identities(latents), command)

    def text_programs(self, buckets: tuple[int, ...]) -> dict[str, Manifest]:
        """The compiled text encoder, a program per token bucket, and the connectors."""
        self.gemma.check_tensor_parallel(self.tp)
        command = self._command("compile gemma3", gemma=True)
        return self._programs(self.text_identities(buckets), command)

    def _programs(self, identities: dict[str, dict], command: str) -> dict[str, Manifest]:
        return {name: Manifest(self._find(each, command)) for name, each in identities.items()}

    def dit_program_for(self, job: Job, stage: Stage, tile: int = 0) -> tuple[Bucket, Manifest]:
        """The compiled step for a stage or for one of its tiles: the graph with the fewest
        sufficient timesteps. Raises UserError with the command that compiles it."""
        needed = job.bucket(stage).timesteps
        counts = (needed + more for more in range(MAX_TIMESTEPS))
        candidates = [job.stage_buckets(stage, count)[tile] for count in counts]
        profile = self.dit_profile(job.buckets)
        compiled = (b for b in candidates if self.is_made(self._dit_identity(b, profile)))
        bucket = next(compiled, candidates[0])
        command = self._command("compile transformer", *_shape_flags(job))
        return bucket, Manifest(self._find(self._dit_identity(bucket, profile), command))

    def dit_programs_for(self, job: Job, stage: Stage) -> list[tuple[Bucket, Manifest]]:
        """The compiled step for a stage, or that for each of its tiles, as dit_program_for."""
        tiles = range(len(job.stage_tiles(stage)) or 1)
        return [self.dit_program_for(job, stage, number) for number in tiles]

    def compiled_sizes(self) -> dict[str, list[dict]]:
        """The DiT's compiled buckets on this profile, with any number of blocks per graph: their
        names -> the video sizes in their manifests."""
        wanted = self._graph_identity("dit", "", self.transformer.digest)
        fields = ("model", "config", "tp", "dtype", "backend", "code", "torch")
        sizes: dict[str, list[dict]] = {}
        for path in artifacts.finished_folders(self.artifacts, "graphs"):
            stored = artifacts.stored_identity(path) or {}
            if all(stored.get(field) == wanted[field] for field in fields):
                sizes.setdefault(stored["bucket"], []).extend(recorded_sizes(path))
        return sizes

    def is_made(self, identity: dict) -> bool:
        """Whether the folder of an identity is finished, without a check of its files."""
        return os.path.isfile(artifacts.folder(self.artifacts, identity) / artifacts.MANIFEST)

    def _find(self, identity: dict, command: str) -> Path:
        """The finished folder of an identity, checked once. Raises UserError with `command`."""
        key = digest(identity)
        if key not in self._found:
            self._found[key] = artifacts.find(self.artifacts, identity, command)
        return self._found[key]

    def _command(self, verb: str, *flags, gemma: bool = False) -> str:
        """The command that makes an artifact of this workspace."""
        if self.prepare_command:
            return self.prepare_command
        words = ["--checkpoint-path", hub.spelled(self.checkpoint_path)]
        given = self.files.given
        words += ["--gemma-root", hub.spelled(given["gemma"])] if gemma and "gemma" in given else []
        for kind, part in PARTS.items() if verb.endswith("vae") else ():
            words += [part.flag, hub.spelled(given[kind])] if kind in given else []
        words += [*flags, "--tp-degree", self.tp, "--dtype", self.dtype_name]
        words += ["--artifacts-dir", self.artifacts, "--profile", self.profile.name]
        for setting in self._typed:
            words += ["--profile-set", setting]
        if not verb.startswith("compile"):
            return invocation.command(verb, *words)
        words += [] if self.profile.tuned else ["--profile-set", "tuned=no"]
        tuned = self.tuned_settings and self.tuned_settings.line()
        return invocation.command(verb, *words) + (f"\n{tuned}" if tuned else "")

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
        clips = (clip.pixels for clip in job.encoded_clips if not clip.whole)
        return list(dict.fromkeys(tile for pixels in clips for tile in tile_counts(pixels)))


def shard_verb(model: str) -> str:
    """The verb that makes the weights of a model, one of MODELS."""
    named = {"dit": "transformer", "sound": "vae", "encoder": "vae"}
    return f"shard {named.get(model, model)}"


def _shape_flags(job: Job) -> list:
    """The flags of compile transformer for a job's graphs."""
    # The metadata of a LoRA with references has their scale.
    loras = ["ic_lora"] * bool(job.references) + ["lora"] * bool(job.dubbing)
    loras += ["detailing_lora"] * job.dfr
    names = [*SizeFields.model_fields, "nag_scale", *loras, *ConditionFields.model_fields]
    return to_flags(job.to_line(), names)


def context_parallelism(profile: Profile) -> dict:
    """What the DiT's graphs depend on in a run with context parallelism."""
    if profile.context_parallel == 1:
        return {}
    return {"context_parallel": profile.context_parallel}


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
    if (count or job.dfr) and not transformer.use_keyframes_abs_pos_embedding:
        raise FieldError(
            f"{'{dfr}' if job.dfr else f'{{num_generated_keyframes}} {count}'}: the model of"
            f" {checkpoint.path}, LTX {checkpoint.model_version}, generates no keyframes; leave it"
            " out"
        )
