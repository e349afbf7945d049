"""Contexts on disk: prompts that the same encoder has encoded before need no encoder, and its 24 GB
of weights are not loaded.

A file is found by the token ids of a job's prompts and by the identity of the encoder.
"""

import os
from contextlib import suppress
from pathlib import Path

import torch

from ltx_neuron.config.common import TEXT_TOKENS, digest
from ltx_neuron.errors import UserError
from ltx_neuron.files import write_tensors
from ltx_neuron.text.encoders import Contexts
from ltx_neuron.weights.tensorfile import TensorFile

MAX_FILES = 64  # that are kept; one holds 13 MB a prompt

# The code that decides what contexts are, as files and folders of this package: what each encoder
# imports. The digest of this code is part of the encoder's identity.
HOST_ENCODER_CODE = (
    "config",
    "models",
    "text",
    "host/arithmetic",
    "weights/checkpoint",
    "weights/sharding",
    "weights/tensorfile",
)
RANK_ENCODER_CODE = ("config", "models", "text", "weights", "backends")

_KEPT_FIELDS = ("video", "audio", "attention_mask")  # of Contexts; hidden states are large


def encoder_identity(
    *,
    weights: str,
    gemma_config: str,
    transformer_config: str,
    dtype: str,
    code: str,
    threads: tuple[int, int],
    device: dict,
) -> dict:
    """All that contexts depend on besides the prompts' tokens: equal identities give equal bits.

    weights             fingerprint of the files of Gemma, the projections and the connectors
    gemma_config        digest of what config.json says: sizes, RoPE, norms
    transformer_config  digest of the checkpoint's config, which holds the connectors' sizes
    dtype               of the activations
    code                digest of HOST_ENCODER_CODE or RANK_ENCODER_CODE
    threads             of the host and of a rank: they decide how sums are divided
    device              where the encoder runs, and for ranks how many and how their graphs are
                        compiled

    PyTorch's version is added here. The tokenizer's files are not part of it: contexts are found by
    the tokens that the tokenizer gives, so another tokenizer finds others.
    """
    return {
        "weights": weights,
        "gemma_config": gemma_config,
        "transformer_config": transformer_config,
        "dtype": dtype,
        "code": code,
        "threads": list(threads),
        "torch": torch.__version__,
        **device,
    }


class PromptCache:
    """Files of contexts in a folder, the least recently used of which make room for new ones.

    Any number of processes may use the folder at once. Where it cannot be read or written, that
    costs one printed line and the encoding of the prompts.

    folder    made when the first contexts are written
    identity  of the encoder: encoder_identity
    widths    of the video and audio contexts
    dtype     of both
    """

    def __init__(self, folder: Path, identity: dict, widths: tuple[int, int], dtype: torch.dtype):
        self.folder, self.identity, self.widths, self.dtype = folder, identity, widths, dtype
        self._said = False

    def _path(self, prompts: list[list[int]]) -> Path:
        return self.folder / f"{digest([prompts, self.identity])}.safetensors"

    def read(self, prompts: list[list[int]]) -> list[Contexts] | None:
        """The contexts of a job's prompts (token ids), without hidden states. None where they are
        not there or the file is damaged."""
        path = self._path(prompts)
        try:
            if not path.is_file():
                return None
            contexts = self._read(path, len(prompts))
        except FileNotFoundError:  # another process has made room since
            return None
        except OSError as error:
            self._say(f"contexts of earlier runs cannot be read: {error}")
            return None
        if contexts:
            # Marks the file as used. Another process may have removed it by now, and a folder that
            # is shared to be read needs no marks.
            with suppress(OSError):
                os.utime(path)
        return contexts

    def _read(self, path: Path, count: int) -> list[Contexts] | None:
        """The contexts of so many prompts; None for a file that is not whole or of other ones."""
        video, audio = self.widths
        wanted = [
            ((1, TEXT_TOKENS, video), self.dtype),
            ((1, TEXT_TOKENS, audio), self.dtype),
            ((1, TEXT_TOKENS), torch.int64),
        ]
        try:
            file = TensorFile(path, "it is made anew")
            tensors = {name: file.read(name) for name in file.shapes}
            contexts = [
                Contexts(*(tensors[f"{field}.{i}"] for field in _KEPT_FIELDS), None)
                for i in range(count)
            ]
        except (UserError, KeyError):
            return None
        for each in contexts:
            if [(tuple(tensor.shape), tensor.dtype) for tensor in each[:3]] != wanted:
                return None
        return contexts

    def write(self, prompts: list[list[int]], contexts: list[Contexts]) -> None:
        """Keep the contexts of a job's prompts for later runs, and remove the files that were used
        longest ago."""
        tensors = {
            f"{field}.{i}": getattr(each, field)
            for i, each in enumerate(contexts)
            for field in _KEPT_FIELDS
        }
        try:
            write_tensors(self._path(prompts), tensors, {})
            self._make_room()
        except OSError as error:
            self._say(f"the prompt's contexts are not kept for the next run: {error}")

    def _make_room(self) -> None:
        """Remove the files that were used longest ago, of more than MAX_FILES."""
        used = {}
        for path in self.folder.glob("*.safetensors"):
            with suppress(FileNotFoundError):  # another process has made room just now
                used[path] = path.stat().st_mtime_ns
        for path in sorted(used, key=used.get)[:-MAX_FILES]:
            path.unlink(missing_ok=True)

    def _say(self, why: str) -> None:
        """Print the first reason why the folder is of no use."""
        if not self._said:
            print(why)
        self._said = True
