"""Loads models on the ranks: the text encoder, then the transformer, then the VAEs if the ranks
decode. One model is loaded at a time, unless the profile keeps all or the VAEs fit too.

The ranks start when the first model is needed. Both stages and all jobs share one copy of the
transformer's weights; a weight set with other LoRAs replaces it.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ltx_neuron.artifacts.workspace import Workspace
from ltx_neuron.backends import registry
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.backends.ranks import Ranks
from ltx_neuron.backends.tiles import RankEncoder, RankSound, RankSpans, RankTiles
from ltx_neuron.backends.torchdist.host import start_server
from ltx_neuron.config.diffusion import DiffusionDecoderConfig
from ltx_neuron.config.transformer import TransformerConfig
from ltx_neuron.errors import NoPermission, UserError
from ltx_neuron.files import check_readable
from ltx_neuron.models.modulation import modulation_table
from ltx_neuron.models.vocoder import resampling_filters
from ltx_neuron.report.latency import Recorder
from ltx_neuron.text import inputs
from ltx_neuron.text.encoders import RankTextEncoder
from ltx_neuron.weights.lora import WeightSet
from ltx_neuron.weights.rankfiles import open_host_file

# Programs of the VAEs by name, of the models "vae", "encoder" and "sound".
VaePrograms = Mapping[str, dict[str, Manifest]]
_REMEMBERED_TABLES = 8  # per weight set; at most 11 MB for each distinct timestep
_REMEMBERED_WEIGHT_SETS = 4  # weight sets whose modulation tables are kept


class ModulationTables:
    """A cache of a weight set's modulation tables, which depend only on the schedule. The weights
    (0.87 GB) are read only for a missing table."""

    def __init__(self, weights: Any, config: TransformerConfig):
        self.weights, self.config = weights, config
        self._tables: dict[tuple, Tensor] = {}

    def __call__(self, stream: str, *rows: Any) -> Tensor:
        """modulation_table of a stream. rows: its arguments from `sigmas` on."""
        key = stream, *(tuple(x.tolist()) if isinstance(x, Tensor) else x for x in rows)
        if key not in self._tables:
            if len(self._tables) >= _REMEMBERED_TABLES:
                self._tables.clear()
            self._tables[key] = modulation_table(self.weights, self.config, stream, *rows)
        return self._tables[key]


class Residency:
    """Starts the ranks of a workspace and loads models into them; `close` ends them."""

    def __init__(self, workspace: Workspace, recorder: Recorder):
        self.workspace, self.recorder = workspace, recorder
        self.ranks: Ranks | None = None
        # The transformer on the ranks: its weight set, and its programs by name.
        self.weights: Path | None = None
        self._programs: frozenset[str] = frozenset()
        self._ran: frozenset[str] = frozenset()  # programs that these ranks have loaded so far
        self._vae_programs: frozenset[str] = frozenset()  # the VAEs' loaded programs
        self._decoding = threading.Lock()  # held while VAEs are loaded or run
        start_server(workspace.profile, workspace.tp, workspace.compiler_cache)
        self.vae_stays = False  # whether the VAEs fit beside the transformer
        self._modulation: dict[Path, ModulationTables] = {}  # by weight set

    @contextmanager
    def text_encoder(
        self, prompts: list[list[list[int]]], loras: WeightSet = ()
    ) -> Iterator[RankTextEncoder]:
        """The sharded Gemma and the connectors, with these LoRAs, while the block runs.

        prompts  the token ids of every job's prompts, which determine the loaded buckets
        """
        workspace = self.workspace
        with self.recorder.phase("load_gemma3"):
            ranks = self.start()
            if (self.weights or self._vae_programs) and not workspace.profile.resident:
                self._unload()
            known = workspace.profile.text_buckets
            apart = workspace.profile.guidance_parallel > 1
            packs = (pack for job in prompts for pack in inputs.pack_prompts(job, apart))
            buckets = tuple({inputs.bucket_for(pack, known) for pack in packs})
            weights = workspace.weights("gemma3", loras)
            with _remedy(weights):
                programs = workspace.programs(workspace.text_graphs(buckets))
                ranks.load(weights, programs, workspace.dtype)
            models = workspace.gemma, workspace.transformer
            encoder = RankTextEncoder(ranks, weights, *models, buckets, workspace.dtype, apart)
        yield encoder
        with self.recorder.phase("unload_gemma3"):
            if not workspace.profile.resident:
                self._unload()

    def load_transformer(self, programs: dict[str, Manifest], loras: WeightSet) -> None:
        """Load the transformer with at least these programs, by bucket name. loras: of the first
        weight set."""
        if self.weights and programs.keys() <= self._programs:
            return
        weights = self.workspace.dit_weights(loras)
        with self.recorder.phase("load_transformer"):
            ranks = self.start()
            if self._vae_programs and not self.vae_stays:
                self._unload()
            with self._swapping(weights):
                ranks.load(weights, programs, self.workspace.dtype)
        self._programs = frozenset(programs)
        profile, earlier = self.workspace.profile, self._ran - self._programs
        self._ran |= self._programs
        # TorchNeuron frees tensors, but never a loaded graph (ModelHandleCache, 2026).
        if earlier and profile.device == "neuron" and profile.backend == "torchdist":
            print(
                f"another size: the graphs of {', '.join(sorted(earlier))} stay in the device's"
                " memory, because TorchNeuron never frees a graph. If it gets full, restart this"
                " process"
            )

    def use_weights(self, loras: WeightSet) -> ModulationTables:
        """Load the weight set with these LoRAs into the transformer. Returns its modulation
        tables."""
        weights = self.workspace.dit_weights(loras)
        if self.weights != weights:
            with self.recorder.phase("load_transformer"), self._swapping(weights):
                assert self.ranks  # load_transformer comes first
                self.ranks.replace_weights(weights)
        if weights not in self._modulation:
            if len(self._modulation) >= _REMEMBERED_WEIGHT_SETS:
                self._modulation.clear()
            tables = ModulationTables(open_host_file(weights), self.workspace.transformer)
            self._modulation[weights] = tables
        return self._modulation[weights]

    @contextmanager
    def _swapping(self, weights: Path) -> Iterator[None]:
        """Record the loading of a weight set as a swap if it replaces another one."""
        began, swapped = time.perf_counter(), self.weights not in (None, weights)
        with _remedy(weights):
            yield
        if swapped:
            self.recorder.counters.weight_swaps += 1
            self.recorder.counters.weight_swap_seconds += time.perf_counter() - began
        self.weights = weights

    def video_decoder(self, vae: VaePrograms) -> RankTiles | RankSpans:
        """The video decoder. All VAEs with programs are loaded together, beside the transformer or
        instead of it."""
        ranks, config = self._load_vae(vae), self.workspace.video_decoder
        if isinstance(config, DiffusionDecoderConfig):
            return RankSpans(ranks, config, self.workspace.dtype, self._decoding)
        return RankTiles(ranks, self._decoding)

    def video_encoder(self, vae: VaePrograms) -> RankEncoder:
        """The video encoder, loaded like video_decoder."""
        return RankEncoder(self._load_vae(vae), self._decoding)

    def sound_decoder(self, vae: VaePrograms) -> RankSound:
        """Mel decoder and vocoder, loaded like video_decoder."""
        resampling = resampling_filters(self.workspace.vocoder)
        return RankSound(self._load_vae(vae), resampling, self._decoding)

    def _load_vae(self, vae: VaePrograms) -> Ranks:
        # Loading is a separate phase, also when the thread that decodes sound starts it.
        with self.recorder.paused(), self._decoding:
            programs = frozenset(name for model in vae.values() for name in model)
            ranks = self.start()
            if programs <= self._vae_programs:
                return ranks
            workspace = self.workspace
            if self.weights and not self.vae_stays:
                with self.recorder.phase("unload_transformer"):
                    self._unload()
            with self.recorder.phase("load_vae"):
                for model, model_programs in vae.items():
                    dtype = torch.float32 if model == "sound" else workspace.dtype
                    if model_programs:
                        with _remedy(weights := workspace.weights(model)):
                            ranks.load(weights, model_programs, dtype)
            self._vae_programs = programs
        return ranks

    def unload_transformer(self) -> None:
        """Free the ranks' device and host memory."""
        if self.ranks:
            with self.recorder.phase("unload_transformer"):
                self.close()

    def poll(self) -> None:
        """Raise the error of a rank that ended or froze while idle."""
        if self.ranks:
            self.ranks.check()

    def close(self) -> None:
        """End the ranks."""
        if self.ranks:
            self.ranks.close()
        self.ranks, self._ran = None, frozenset()
        self._forget()

    def start(self) -> Ranks:
        """The ranks; the first call starts them."""
        if not self.ranks:
            workspace = self.workspace
            self.ranks = registry.ranks(workspace.profile, workspace.tp, workspace.compiler_cache)
            self.ranks.lost = self.recorder.lost_groups
        return self.ranks

    def _unload(self) -> None:
        if self.ranks:
            self.ranks.unload()
        self._forget()

    def _forget(self) -> None:
        self.weights, self._programs, self._vae_programs = None, frozenset(), frozenset()


@contextmanager
def _remedy(weights: Path) -> Iterator[None]:
    """Add the remedy to a rank's refusal of its files, unless they are not readable."""
    try:
        yield
    except NoPermission:
        raise
    except UserError as error:
        for path in weights.glob("*.safetensors"):
            check_readable(path)  # ranks answer only with text, which may have this cause
        raise UserError(
            f"{error}\nDelete {weights} and run the command again, which prints how to make it"
        ) from None
