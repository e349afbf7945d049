"""Shared parts of all models' configurations: the supported release, checks of values, digests.

All sizes come from the checkpoint's `config` metadata and Gemma's config.json. A value that the
code does not implement raises an error with its name.
"""

import dataclasses
import hashlib
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ltx_neuron.errors import UserError
from ltx_neuron.hub import download_released

CHECKPOINT_DOWNLOAD = download_released("distilled")
# The tokenizer pads to this length, and the connectors return it (ltx-core base_encoder.py:182).
TEXT_TOKENS = 1024
# Names of head counts. Several ranks may have copies of one of these heads. The second count is of
# layers that use their keys as values.
KEY_VALUE_HEADS = "Gemma num_key_value_heads"
GLOBAL_KEY_VALUE_HEADS = "Gemma num_global_key_value_heads"
HOST_DECODES = "; leave out --neuron-vae: the host decodes it"
HOST_ENCODES = "; leave out --neuron-vae: the host encodes it"


def gemma_download(root: Path, beside: bool = False) -> str:
    """The command that downloads Gemma to `root`, and how to accept its terms first. beside: to a
    folder beside `root`, which has another model; so too if `root` is a file."""
    folder, typed = Path(root), ""
    if beside or folder.is_file():
        folder = folder.with_name("gemma-3-12b" + "-qat" * (folder.name == "gemma-3-12b"))
        typed = f"\nand type --gemma-root {shlex.quote(str(folder))}"
    return (
        "hf download google/gemma-3-12b-it-qat-q4_0-unquantized --local-dir"
        f" {shlex.quote(str(folder))}{typed}\n(once, before: accept the terms on"
        " https://huggingface.co/google/gemma-3-12b-it-qat-q4_0-unquantized and type hf auth"
        " login)"
    )


def digest(value: object) -> str:
    """Twelve hex digits of SHA-256 over a value's canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class AttentionSize:
    """Heads and head dimension of one attention; `inner` is their product."""

    heads: int
    head_dim: int

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim


class ModelConfig:
    # Counts of heads by name, which a tensor-parallel degree must divide.
    heads: dict[str, int] = {}
    # Fields that a later release added, with their value in earlier releases. Digests leave out a
    # field with this value, so artifacts of earlier releases keep their identity.
    added: ClassVar[dict[str, object]] = {}

    @property
    def digest(self) -> str:
        """Identity of the traced models: equal configs give equal graphs."""
        values = dataclasses.asdict(self)  # pyright: ignore[reportArgumentType]: of subclasses
        return digest({k: v for k, v in values.items() if (k, v) not in self.added.items()})

    def check_tensor_parallel(self, tp: int) -> None:
        check_heads(tp, self.heads)


def check_heads(tp: int, heads: dict[str, int]) -> None:
    """Raise UserError unless every rank gets whole heads: even splits of the weights can still cut
    a head. Several ranks may have copies of one key-value head."""

    def cut(degree: int) -> list[str]:
        return [
            name
            for name, count in heads.items()
            if count % degree
            and (name not in (KEY_VALUE_HEADS, GLOBAL_KEY_VALUE_HEADS) or degree % count)
        ]

    wrong = [*heads] if tp < 1 else cut(tp)
    if wrong:
        degrees = [str(degree) for degree in range(1, max(heads.values()) + 1) if not cut(degree)]
        raise UserError(
            f"tensor-parallel degree {tp} does not divide {wrong[0]}={heads[wrong[0]]}; a rank"
            f" must hold whole heads.\nType --tp-degree with one of {', '.join(degrees)}"
        )


def check_values(section: str, values: dict, allowed: dict, by: str, advice: str = "") -> None:
    """Raise UserError for the first value that `by`, an operation, does not implement."""
    for name, value in allowed.items():
        if values.get(name) != value:
            got = repr(values[name]) if name in values else "absent"
            raise UserError(
                f"checkpoint config: {section}.{name} is {got}, {by} implements only"
                f" {value!r}{advice}"
            )


def check_numbers(config, where: str) -> None:
    """Raise UserError for a size or scale of a configuration that is not a number above 0."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type is AttentionSize:
            check_numbers(value, f"{where}{field.name} ")
        elif field.type in (int, float) or (field.type == int | None and value is not None):
            kinds = (int, float) if field.type is float else (int,)
            if type(value) not in kinds or not 0 < value < float("inf"):
                kind = "a number" if field.type is float else "a whole number"
                raise UserError(f"{where}{field.name} is {value!r}, wanted {kind} above 0")
