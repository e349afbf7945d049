"""Workspace: one checkpoint on one profile, and the artifacts that belong to it. What the scripts
share.

It makes weight sets and graphs, compares them with what they are of, and knows whether they fit
the device. What is there it finds as Finished does.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from ltx_neuron import artifacts
from ltx_neuron.backends import registry
from ltx_neuron.backends.export import TorchDistComm
from ltx_neuron.backends.manifest import Manifest, record_size
from ltx_neuron.config.sound import span_sizes
from ltx_neuron.config.transformer import REGISTERS, Bucket
from ltx_neuron.files import exclusive
from ltx_neuron.finished import Finished
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
from ltx_neuron.weights.rankfiles import check_whole, rank_path, verify
from ltx_neuron.weights.sharder import (
    Layout,
    ShardSpec,
    check_specs,
    compare,
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
        sources = [source for loras in sets for source in self._sources(model, loras)]
        specs_of = [self._specs(source) for source in sources]
        paths = []
        for source, specs in zip(sources, specs_of, strict=True):
            identity = self._weights_identity(source.model.name, source)
            path, dtype = artifacts.folder(self.artifacts, identity), DTYPES[identity["dtype"]]
            if not shard_weights(source, path, identity, self.tp, dtype, specs, workers):
                print(f"already there, nothing to do (--verify checks every byte): {path}")
            paths.append(path)
        return paths

    def shard_dit(
        self, sets: Iterable[WeightSet] = ((),), workers: int | None = None
    ) -> list[Path]:
        return self.shard("dit", sets, workers)

    def shard_gemma3(self, workers: int | None = None) -> Path:
        return self.shard("gemma3", workers=workers)[0]

    def verify(self, model: str, sets: Iterable[WeightSet] = ((),)) -> list[Path]:
        """Compare the finished rank files of a model, one of MODELS, with their manifests and bit
        for bit with the checkpoint and Gemma's files. Raises UserError that lists what differs;
        returns the folders. sets: the DiT's."""
        paths = []
        for loras in sets:
            for source in self._sources(model, loras):
                path = self.weights(source.model.name, loras)
                dtype = DTYPES[self._weights_identity(source.model.name, source)["dtype"]]
                check_whole(path, verify(path) or compare(source, path, dtype, self._specs(source)))
                paths.append(path)
        return paths

    def _sources(self, model: str, loras: WeightSet) -> list[Source]:
        """What a shard script cuts."""
        models = ["vae", "sound"] if model == "vae" else [model]
        return [self.source(name, loras) for name in models]

    def _specs(self, source: Source) -> list[ShardSpec]:
        """How the tensors of a model are distributed over its files. UserError where they are not
        those of the model."""
        if source.model.name == "dit":
            return self._dit_specs(source)
        specs = {"gemma3": self._gemma3_specs, "vae": self._vae_specs, "sound": self._sound_specs}
        return specs[source.model.name]()

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
        tokens, attention = self.profile.text_buckets[0], self.profile.connector_attention
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

    def _sound_specs(self) -> list[ShardSpec]:
        source, config, layouts = self.sound_source, self.vocoder, {}
        for name in source.names:
            if (arrange := arrangement(name, config)) is not None:
                layouts[name] = Layout(arrange, split=0)
        specs = shard_specs(source, self.tp, layouts)
        programs = spectrogram_program(self.audio_decoder, 1), waveform_program(config, 1)
        check_specs(specs, programs[0].weights() | programs[1].weights(), {})
        return specs

    # --- compiling graphs -------------------------------------------------------------------------

    def compile_dit(self, buckets: list[Bucket], job: Job | None = None) -> list[Path]:
        """Trace the DiT step for each bucket, of one size, that is not there yet; returns the
        folders. job: whose size and recipe their manifests record, also those that are there."""
        profile = self.dit_profile(buckets)
        self.check_attention(profile)
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
        paths = self._compile(programs, profile)
        for path in paths if job else ():
            record_size(path, asdict(job.size) | {"recipe": job.recipe})
        return paths

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
                self.transformer, self.tp, comm, self.dtype, self.profile.connector_attention
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

    def compile_sound(self, latents: int) -> list[Path]:
        """Trace mel decoder and vocoder for the spans of so many latents of sound."""
        span, rows = span_sizes(latents)
        programs = (
            partial(spectrogram_program, self.audio_decoder, span),
            partial(waveform_program, self.vocoder, rows),
        )
        identities = self._sound_identities(latents).values()
        return self._compile([*zip(identities, programs, strict=True)])

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
        tiles: list[Manifest],
        sound: Sequence[Manifest] = (),
        loras: WeightSet = (),
    ) -> CoreMemory:
        """What a generation needs of a core, by what was counted when its graphs were compiled and
        by the sizes of its rank files.

        tiles, sound  manifests of the decoders on the ranks
        loras         of any of its weight sets, which are of one size
        """
        return CoreMemory(
            _rank_bytes(self.dit_weights(loras)),
            _rank_bytes(self.gemma3_weights()) if neuron_gemma else 0,
            compiled_activations(manifests),
            (_rank_bytes(self.vae_weights()) if tiles else 0)
            + (_rank_bytes(self.sound_weights()) if sound else 0),
            compiled_tile([*tiles, *sound]),
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
