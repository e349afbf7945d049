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


class PromptCache:
    """Files of contexts in a folder, the least recently used of which make room for new ones.

    Any number of processes may use the folder at once. Where it cannot be read or written, that
    costs one printed line and the encoding of the prompts.

    folder    made when the first contexts are written
    identity  of the encoder, all that contexts depend on besides the prompts' tokens: equal ones
              give equal bits. The tokenizer's files are not part of it: contexts are found by the
              tokens that the tokenizer gives, so another tokenizer finds others
    widths    of the video and audio contexts
    dtype     of both
    """

    def __init__(self, folder: Path, identity: dict, widths: tuple[int, int], dtype: torch.dtype):
        self.folder, self.identity = folder, identity
        video, audio = widths
        # Shape and dtype of the fields of Contexts that are kept; hidden states are large.
        self._kept = {
            "video": ((1, TEXT_TOKENS, video), dtype),
            "audio": ((1, TEXT_TOKENS, audio), dtype),
            "attention_mask": ((1, TEXT_TOKENS), torch.int64),
        }
        self._said = False

    def _path(self, prompts: list[list[int]]) -> Path:
        return self.folder / f"{digest([prompts, self.identity])}.safetensors"

    def read(self, prompts: list[list[int]]) -> list[Contexts] | None:
        """The contexts of a job's prompts (token ids), without hidden states. None where they are
        not there, or the file is damaged or holds others."""
        path = self._path(prompts)
        try:
            if not path.is_file():
                return None
            file = TensorFile(path, "it is made anew")
            for name, shape in file.shapes.items():
                if (shape, file.torch_dtype(name)) != self._kept[name.split(".")[0]]:
                    return None
            contexts = [
                Contexts(
                    **{field: file.read(f"{field}.{i}") for field in self._kept}, hidden_states=None
                )
                for i in range(len(prompts))
            ]
        # It is damaged, or another process has made room since.
        except (UserError, KeyError, FileNotFoundError):
            return None
        except OSError as error:
            self._say(f"contexts of earlier runs cannot be read: {error}")
            return None
        # Marks the file as used. Another process may have removed it by now, and a folder that is
        # shared to be read needs no marks.
        with suppress(OSError):
            os.utime(path)
        return contexts

    def write(self, prompts: list[list[int]], contexts: list[Contexts]) -> None:
        """Keep the contexts of a job's prompts for later runs, and remove the files that were used
        longest ago."""
        tensors = {
            f"{field}.{i}": getattr(each, field)
            for i, each in enumerate(contexts)
            for field in self._kept
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
        for path in sorted(used, key=used.__getitem__)[:-MAX_FILES]:
            path.unlink(missing_ok=True)

    def _say(self, why: str) -> None:
        """Print the first reason why the folder is of no use."""
        if not self._said:
            print(why)
        self._said = True
