"""Contexts on disk: a prompt that the same encoder encoded before needs no encoder, which is 24 GB
that are not loaded.

A file is found by the tokens of a job's prompts, the encoder's fingerprint, how it was run, and the
code that ran it.
"""

import os
from pathlib import Path

import torch

from ltx_neuron.config import TEXT_TOKENS, digest
from ltx_neuron.errors import UserError
from ltx_neuron.files import write_tensors
from ltx_neuron.text.encoders import Contexts
from ltx_neuron.weights.tensorfile import TensorFile

KEPT = 64  # files; one holds 13 MB a prompt


class PromptCache:
    """`identity` is all that the contexts depend on besides the prompts; `widths` are those of
    video and audio."""

    def __init__(self, folder: Path, identity: dict, widths: tuple[int, int], dtype: torch.dtype):
        self.folder, self.identity, self.widths, self.dtype = folder, identity, widths, dtype

    def _path(self, prompts: list[list[int]]) -> Path:
        return self.folder / f"{digest([prompts, self.identity])}.safetensors"

    def read(self, prompts: list[list[int]]) -> list[Contexts] | None:
        """The contexts of a job's prompts, without hidden states; None where they are not there, or
        not whole."""
        path = self._path(prompts)
        if not path.is_file():
            return None
        shapes = [(1, TEXT_TOKENS, width) for width in self.widths]
        wanted = [(shapes[0], self.dtype), (shapes[1], self.dtype), ((1, TEXT_TOKENS), torch.int64)]
        try:
            file = TensorFile(path, "it is made anew")
            tensors = {name: file.read(name) for name in file.shapes}
            found = [
                Contexts(*(tensors[f"{name}.{i}"] for name in Contexts._fields[:3]), None)
                for i in range(len(prompts))
            ]
        except (UserError, KeyError):
            return None
        if any([(tuple(t.shape), t.dtype) for t in contexts[:3]] != wanted for contexts in found):
            return None
        os.utime(path)  # the least recently used ones go first
        return found

    def write(self, prompts: list[list[int]], found: list[Contexts]) -> None:
        """Keep contexts for the next run. It is no error that they cannot be kept: this run has
        them."""
        tensors = {
            f"{name}.{i}": getattr(contexts, name)
            for i, contexts in enumerate(found)
            for name in Contexts._fields[:3]
        }
        try:
            write_tensors(self._path(prompts), tensors, {})
        except OSError as error:
            print(f"the prompt's contexts are not kept for the next run: {error}")
        files = sorted(self.folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
        for path in files[:-KEPT]:
            path.unlink(missing_ok=True)
