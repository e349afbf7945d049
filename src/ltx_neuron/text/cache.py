"""A cache of contexts on disk. For cached prompts the encoder's 24 GB of weights are not loaded.

The key is the token ids of a job's prompts and the identity of the encoder.
"""

import os
from contextlib import suppress
from pathlib import Path

import torch

from ltx_neuron.config.common import TEXT_TOKENS, digest
from ltx_neuron.errors import UserError
from ltx_neuron.text.encoders import Contexts
from ltx_neuron.weights.tensorfile import TensorFile, write_tensors

MAX_FILES = 64  # kept; each has 13 MB per prompt

# The files and folders of this package on which contexts depend: the imports of each encoder. The
# digest of this code is part of the encoder's identity.
HOST_ENCODER_CODE = (
    *("config", "models", "text"),
    *("weights/checkpoint", "weights/lora", "weights/model_files", "weights/sharding"),
    "weights/tensorfile",
)
RANK_ENCODER_CODE = ("config", "models", "text", "weights", "backends")


class PromptCache:
    """A folder of context files, of which the least recently used are removed.

    Any number of processes may use the folder. If it cannot be read or written, a line is printed
    and the prompts are encoded.

    folder    created with the first file
    identity  of the encoder: everything besides the tokens on which contexts depend. Equal
              identities give equal bits. The tokenizer is not part of it, because the tokens are
    widths    of the video and audio contexts
    dtype     of both
    """

    def __init__(self, folder: Path, identity: dict, widths: tuple[int, int], dtype: torch.dtype):
        self.folder, self.identity = folder, identity
        video, audio = widths
        # Shape and dtype of the stored fields of Contexts. Hidden states are too large to store.
        self._kept = {
            "video": ((1, TEXT_TOKENS, video), dtype),
            "audio": ((1, TEXT_TOKENS, audio), dtype),
            "attention_mask": ((1, TEXT_TOKENS), torch.int64),
        }
        self._said = False

    def _path(self, prompts: list[list[int]]) -> Path:
        return self.folder / f"{digest([prompts, self.identity])}.safetensors"

    def read(self, prompts: list[list[int]]) -> list[Contexts] | None:
        """The contexts of a job's prompts (token ids), without hidden states. None if they are
        missing, or the file is damaged or has other shapes."""
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
        # It is damaged, or another process removed it meanwhile.
        except (UserError, KeyError, FileNotFoundError):
            return None
        except OSError as error:
            self._say(f"contexts of earlier runs cannot be read: {error}")
            return None
        # Marks the file as used, unless another process removed it or it is read-only.
        with suppress(OSError):
            os.utime(path)
        return contexts

    def write(self, prompts: list[list[int]], contexts: list[Contexts]) -> None:
        """Store the contexts of a job's prompts, and remove the least recently used files."""
        tensors = {
            f"{field}.{i}": getattr(context, field)
            for i, context in enumerate(contexts)
            for field in self._kept
        }
        try:
            write_tensors(self._path(prompts), tensors, {})
            used = {}
            for path in self.folder.glob("*.safetensors"):
                with suppress(FileNotFoundError):  # another process removed it
                    used[path] = path.stat().st_mtime_ns
            for path in sorted(used, key=used.__getitem__)[:-MAX_FILES]:
                path.unlink(missing_ok=True)
        except OSError as error:
            self._say(f"the prompt's contexts are not kept for the next run: {error}")

    def _say(self, why: str) -> None:
        if not self._said:
            print(why)
        self._said = True
