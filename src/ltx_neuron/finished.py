"""Finished: the weights and graphs of one checkpoint on one profile that are there, found by the
identity of each; for what is not, the command that makes it."""

import os
from collections.abc import Iterable
from functools import cached_property
from itertools import chain
from pathlib import Path

import torch

from ltx_neuron import artifacts, hub, invocation
from ltx_neuron.backends import registry
from ltx_neuron.backends.manifest import Manifest, recorded_sizes
from ltx_neuron.config.common import digest
from ltx_neuron.config.gemma import check_gemma_fits, gemma_config
from ltx_neuron.config.sound import audio_decoder_config, span_sizes, vocoder_config
from ltx_neuron.config.transformer import Bucket, transformer_config
from ltx_neuron.config.video import video_decoder_config
from ltx_neuron.host.arithmetic import Arithmetic, arithmetic, fastest_libraries
from ltx_neuron.job import Job, Stage
from ltx_neuron.models.programs import (
    may_divide,
    spectrogram_program_name,
    tile_program_name,
    waveform_program_name,
)
from ltx_neuron.profiles import Profile
from ltx_neuron.sampling.size import Size
from ltx_neuron.sampling.spec import ConditionFields, SizeFields
from ltx_neuron.text.cache import HOST_ENCODER_CODE, RANK_ENCODER_CODE, PromptCache
from ltx_neuron.text.host_encoder import HostTextEncoder
from ltx_neuron.text.inputs import gemma3_program_name, load_tokenizer
from ltx_neuron.tune import tuned_settings
from ltx_neuron.weights.checkpoint import Checkpoint, Source, gemma_files
from ltx_neuron.weights.gains import check_const_max
from ltx_neuron.weights.lora import MergedSource, WeightSet
from ltx_neuron.weights.sharding import MODELS
from ltx_neuron.weights.tensorfile import DTYPES, TensorFile

MAX_TIMESTEPS = 4  # how many more distinct timesteps than needed a found graph may have


class Finished:
    """What was made for a checkpoint on a profile. Paths are the user's; nothing is read before it
    is needed. Raises UserError for whatever does not fit together."""

    def __init__(
        self,
        checkpoint_path: str | Path,
        profile: Profile,
        artifacts_dir: str | Path,
        tp: int,
        dtype: str,
        gemma_root: str | Path | None = None,
    ):
        self.checkpoint_path = Path(checkpoint_path)
        self.gemma_root = Path(gemma_root) if gemma_root else None
        self.artifacts = Path(artifacts_dir)
        self.profile, self.tp = profile, tp
        self.dtype_name, self.dtype = dtype, DTYPES[dtype]
        self._typed = profile.settings
        self.tuned_settings: tuned_settings.TunedSettings | None = None
        self._said = ""
        self.prepare_command = ""  # of a run that names one command for all that is missing
        self._checked_attention = False
        self.checkpoint = Checkpoint(self.checkpoint_path)
        self.transformer = transformer_config(self.checkpoint.config)
        self.transformer.check_tensor_parallel(tp)
        self._found: dict[str, Path] = {}  # finished folders, by the digest of their identity
        self._sources: dict[tuple[str, WeightSet], Source] = {}

    def take_tuned(self) -> None:
        """Take what ltx-neuron tune chose for this device and model, if it did and the
        profile does not say tuned=no. What was typed still wins."""
        if not self.profile.tuned:
            return
        config = self.transformer.digest
        identity = tuned_settings.identity(self.profile, self.tp, self.dtype_name, config)
        self.tuned_settings = tuned_settings.load(self.artifacts, identity)
        if self.tuned_settings:
            self.profile = self.tuned_settings.profile_of_run(self.profile)

    def say_tuned(self, buckets: Iterable[Bucket] = ()) -> None:
        """Print once which tuned settings are in use, if there are any.

        buckets  of a size that is not asked for yet
        """
        self.dit_profile(buckets)
        line = self.tuned_settings.line() if self.tuned_settings else ""
        if line != self._said:
            print(line)
        self._said = line

    @cached_property
    def gemma(self):
        assert self.gemma_root
        config = gemma_config(self.gemma_root)
        projection = self.checkpoint.shapes.get(
            "text_embedding_projection.video_aggregate_embed.weight"
        )
        check_gemma_fits(
            config, self.transformer, self.gemma_root, projection[1] if projection else None
        )
        return config

    def source(self, model: str, loras: WeightSet = ()) -> Source:
        """The weights of a model, one of MODELS; of the DiT with LoRAs merged in. UserError where
        one of them is not of this model."""
        if (model, loras) not in self._sources:
            files: list[TensorFile] = [self.checkpoint]
            heads = self.transformer.heads
            if model == "dit":
                source = MergedSource(MODELS[model], files, loras, heads)
            elif model == "gemma3":
                assert self.gemma_root
                files += gemma_files(self.gemma_root)
                source = Source(MODELS[model], files, heads | self.gemma.heads)
            else:
                source = Source(MODELS[model], files)
            self._sources[model, loras] = source
        return self._sources[model, loras]

    @cached_property
    def video_decoder(self):
        """The sizes of the video decoder; UserError where the ranks cannot run it."""
        return video_decoder_config(self.checkpoint.config)

    @cached_property
    def audio_decoder(self):
        """The sizes of the mel decoder; UserError where the ranks cannot run it."""
        return audio_decoder_config(self.checkpoint.config)

    @cached_property
    def vocoder(self):
        """The sizes of the vocoder; UserError where the ranks cannot run it."""
        return vocoder_config(self.checkpoint.config)

    @cached_property
    def tokenizer(self):
        """Gemma's tokenizer."""
        assert self.gemma_root
        return load_tokenizer(self.gemma_root)

    def host_text_encoder(self) -> HostTextEncoder:
        """The text encoder for the host's CPU; it loads weights when it encodes."""
        source, libraries = self.source("gemma3"), self.arithmetic.libraries
        return HostTextEncoder(source, self.gemma, self.transformer, self.dtype, libraries)

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
            **({"weights": "float8, dequantised"} if self.checkpoint.scales else {}),
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
        identity = {
            "weights": self.source("gemma3").fingerprint,
            "gemma_config": self.gemma.digest,
            "transformer_config": self.transformer.digest,
            "dtype": self.dtype_name,
            "code": artifacts.code_digest(profile.backend, *code),
            # They decide how sums are divided.
            "threads": [profile.host_threads, profile.rank_threads(self.tp)],
            "torch": torch.__version__,
            **device,
            "profile_set": list(profile.settings),
        }
        widths = self.transformer.video.inner, self.transformer.audio.inner
        return PromptCache(self.artifacts / "prompts", identity, widths, self.dtype)

    # --- identities -------------------------------------------------------------------------------

    def weights_identity(self, source: Source) -> dict:
        """Of the rank files that are cut from a model's weights."""
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
        """The profile of the DiT's graphs of a size, given as its stages' buckets. used: whether
        they are compiled or run."""
        if not self.tuned_settings:
            return self.profile
        return self.tuned_settings.profile_of_size(self.profile, buckets, used)

    def graphs_of(self, job: Job) -> dict[str, object]:
        """What of a job's graphs its latents depend on."""
        profile = self.dit_profile(job.buckets)
        return {
            "blocks_per_graph": profile.blocks_per_graph,
            "attention": profile.attention,
            "sequence_parallel": profile.sequence_parallel,
        }

    def check_attention(self, profile: Profile) -> None:
        """Raise UserError where the weights do not suit a profile's attention."""
        if profile.attention == "nki_const_max" and not self._checked_attention:
            head_dim = self.transformer.video.head_dim
            check_const_max(self.source("dit"), head_dim, self.dtype)
            self._checked_attention = True

    def _dit_identity(self, bucket: Bucket, profile: Profile) -> dict:
        identity = self._graph_identity("dit", bucket.name, self.transformer.digest)
        return identity | {
            "blocks_per_graph": profile.blocks_per_graph,
            "attention": profile.attention,
            "sequence_parallel": self._divides(bucket, profile),
        }

    def dit_identities(self, buckets: list[Bucket]) -> list[dict]:
        """The DiT step for each bucket, of one size."""
        profile = self.dit_profile(buckets)
        return [self._dit_identity(bucket, profile) for bucket in buckets]

    def _divides(self, bucket: Bucket, profile: Profile) -> bool:
        """Whether a bucket's graphs are sequence parallel."""
        return profile.sequence_parallel and may_divide(bucket, self.tp)

    # Of the other models, by the names of their programs.

    def text_identities(self, buckets: Iterable[int]) -> dict[str, dict]:
        """The text encoder for these buckets of tokens, and the connectors."""
        profile, config = self.profile, self.transformer.digest
        identities = {}
        for tokens in buckets:
            both = f"{self.gemma.digest}-{config}"
            identity = self._graph_identity("gemma3", str(tokens), both)
            identity["hidden_states"] = profile.return_hidden_states
            identities[gemma3_program_name(tokens)] = identity
        connectors = self._graph_identity("connectors", "1024", config)
        return identities | {"connectors": connectors | {"attention": profile.connector_attention}}

    def tile_identities(self, clip: tuple[int, int, int]) -> dict[str, dict]:
        """The video decoder for every shape of the tiles of a clip's latent (F, h, w)."""
        config = self.video_decoder.digest
        return {
            tile_program_name(tile): self._graph_identity("vae", "x".join(map(str, tile)), config)
            for tile in self.tile_shapes(clip)
        }

    def sound_identities(self, latents: int) -> dict[str, dict]:
        """Mel decoder and vocoder for the spans of so many latents of sound."""
        latents, rows = span_sizes(latents)
        configs = {
            spectrogram_program_name(latents): self.audio_decoder,
            waveform_program_name(rows): self.vocoder,
        }
        return {
            name: self._graph_identity("sound", name, config.digest)
            for name, config in configs.items()
        }

    # --- finding what was made --------------------------------------------------------------------

    def weights(self, model: str, loras: WeightSet = (), command: str = "") -> Path:
        """The folder of a model's rank files, one of MODELS, of the DiT with these LoRAs merged in.
        command: what makes them, where more than this set alone is to be made."""
        identity = self.weights_identity(self.source(model, loras))
        return self._find(identity, command or self._shard_command(model, {"--lora": loras}))

    def dit_weights(self, loras: WeightSet = ()) -> Path:
        return self.weights("dit", loras)

    def check_dit_weights(self, jobs: Iterable[Job]) -> None:
        """Raise UserError where a stage's weight set is missing, with the commands that make all
        that are."""
        different = {tuple(stage.loras for stage in job.stages): job for job in jobs}
        commands = {}
        for sets, job in different.items():
            identities = (self.weights_identity(self.source("dit", loras)) for loras in sets)
            if not all(map(self.is_made, identities)):
                given: tuple[WeightSet, ...] = job.loras, job.stage_1_loras, job.stage_2_loras
                given = given if len(sets) > 1 else (*sets, (), ())
                flags = "--lora", "--ic-lora", "--distilled-lora"
                named: dict[str, WeightSet] = dict(zip(flags, given, strict=True))
                commands[self._shard_command("dit", named)] = None
        for loras in chain.from_iterable(different):
            self.weights("dit", loras, "\n".join(commands))

    def _shard_command(self, model: str, loras: dict[str, WeightSet]) -> str:
        """What makes the weight sets of a model that LoRAs name, given by their flags."""
        given = [(flag, lora) for flag, several in loras.items() for lora in several]
        words = [word for flag, x in given for word in (flag, hub.spelled(x.path), x.strength)]
        return self._command(shard_verb(model), *words, gemma=model == "gemma3")

    def tile_programs(self, clip: tuple[int, int, int]) -> dict[str, Manifest]:
        """The compiled video decoder, a program per shape of the tiles of a clip, given as its
        latent (F, h, w)."""
        frames, height, width = 8 * clip[0] - 7, 32 * clip[1], 32 * clip[2]
        flags = "--height", height, "--width", width, "--num-frames", frames
        command = self._command("compile vae", *flags)
        return self._programs(self.tile_identities(clip), command)

    def sound_programs(self, size: Size, latents: int) -> dict[str, Manifest]:
        """The compiled mel decoder and vocoder, for the spans of so many latents of sound. size:
        what they are compiled for."""
        flags = "--num-frames", size.num_frames, "--frame-rate", size.frame_rate
        command = self._command("compile vae", *flags)
        return self._programs(self.sound_identities(latents), command)

    def text_programs(self, buckets: tuple[int, ...]) -> dict[str, Manifest]:
        """The compiled text encoder, a program per bucket of tokens, and the connectors."""
        self.gemma.check_tensor_parallel(self.tp)
        command = self._command("compile gemma3", gemma=True)
        return self._programs(self.text_identities(buckets), command)

    def _programs(self, identities: dict[str, dict], command: str) -> dict[str, Manifest]:
        return {name: Manifest(self._find(each, command)) for name, each in identities.items()}

    def dit_program_for(self, job: Job, stage: Stage) -> tuple[Bucket, Manifest]:
        """The compiled step for a stage: the graph with the fewest distinct timesteps that are
        enough. Raises UserError with the command that compiles it."""
        needed = job.bucket(stage).timesteps
        candidates = [job.bucket(stage, needed + more) for more in range(MAX_TIMESTEPS)]
        profile = self.dit_profile(job.buckets)
        self.check_attention(profile)
        compiled = (b for b in candidates if self.is_made(self._dit_identity(b, profile)))
        bucket = next(compiled, candidates[0])
        command = self._command("compile transformer", *_shape_flags(job))
        return bucket, Manifest(self._find(self._dit_identity(bucket, profile), command))

    def compiled_sizes(self) -> dict[str, list[dict]]:
        """The buckets that the DiT is compiled for on this profile, however it is cut, by name:
        each with the video sizes that its manifests record."""
        wanted = self._graph_identity("dit", "", self.transformer.digest)
        fields = ("model", "config", "tp", "dtype", "backend", "code", "torch")
        sizes: dict[str, list[dict]] = {}
        for path in artifacts.finished_folders(self.artifacts, "graphs"):
            stored = artifacts.stored_identity(path) or {}
            if all(stored.get(field) == wanted[field] for field in fields):
                sizes.setdefault(stored["bucket"], []).extend(recorded_sizes(path))
        return sizes

    def is_made(self, identity: dict) -> bool:
        """Whether the folder of an identity is finished; its files are not looked at."""
        return os.path.isfile(artifacts.folder(self.artifacts, identity) / artifacts.MANIFEST)

    def _find(self, identity: dict, command: str) -> Path:
        """The finished folder of an identity, checked once; UserError with the command to type."""
        key = digest(identity)
        if key not in self._found:
            self._found[key] = artifacts.find(self.artifacts, identity, command)
        return self._found[key]

    def _command(self, verb: str, *flags, gemma: bool = False) -> str:
        """What to type to make something of this workspace."""
        if self.prepare_command:
            return self.prepare_command
        words = ["--checkpoint-path", hub.spelled(self.checkpoint_path)]
        words += ["--gemma-root", hub.spelled(self.gemma_root)] if gemma and self.gemma_root else []
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
        """The different shapes of the tiles in which the ranks decode a clip's latent (F, h, w):
        each has graphs of its own."""
        from ltx_neuron.host import tiles  # imports ltx-core: not needed for flags

        cut = tiles.cut(clip, tiles.tiling_for_ranks(self.profile, clip, self.tp))
        return list(dict.fromkeys(map(tiles.tile_shape, cut)))


def shard_verb(model: str) -> str:
    """The verb that makes the weights of a model, one of MODELS."""
    named = {"dit": "transformer", "sound": "vae"}
    return f"shard {named.get(model, model)}"


def _shape_flags(job: Job) -> list:
    """The flags of compile transformer for a job's graphs."""
    # An IC-LoRA's metadata says how its references are scaled.
    loras = ["ic_lora"] if job.references else []
    return job.spec.words([*SizeFields.model_fields, *loras, *ConditionFields.model_fields])
