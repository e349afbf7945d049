"""The flags of LoRAs, and the weight sets that they name."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from ltx_neuron.errors import UserError
from ltx_neuron.job import LORA_FIELDS
from ltx_neuron.weights.lora import Lora, WeightSet

HQ_STRENGTHS = 0.25, 0.5  # of the distilled LoRA in stage 1 and stage 2
LORAS = ("lora", "ic_lora", "distilled_lora")
_A_LORA = {"action": "append", "nargs": "+", "default": [], "metavar": ("PATH", "STRENGTH")}


def add_loras(parser: argparse.ArgumentParser) -> None:
    """The LoRAs merged into weight sets; at run time they name the sets."""
    group = parser.add_argument_group("LoRAs (what they name is sharded once, and chosen by a run)")
    add = group.add_argument
    help = "a LoRA in every stage (strength 1.0); repeatable"
    add("--lora", **_A_LORA, help=help)
    add_ic_loras(group)
    help = "dev recipe: the LoRA of stage 2 (strength 1.0); repeatable"
    add("--distilled-lora", **_A_LORA, help=help)
    for stage, strength in zip((1, 2), HQ_STRENGTHS, strict=True):
        help = f"of --distilled-lora in both stages, here in stage {stage} (default: {strength:g})"
        add(f"--distilled-lora-strength-stage-{stage}", type=float, metavar="S", help=help)


def add_ic_loras(parser: argparse._ActionsContainer) -> None:
    """What stage 1 alone runs with, beside a reference."""
    help = "distilled recipe: an IC-LoRA, in stage 1 alone (strength 1.0); repeatable"
    parser.add_argument("--ic-lora", **_A_LORA, help=help)


def lora_fields(args: argparse.Namespace) -> dict[str, WeightSet]:
    """A Job's LoRAs, by its fields: of all stages, and of stage 1 and 2 besides."""
    distilled = loras(args.distilled_lora, "--distilled-lora")
    given = args.distilled_lora_strength_stage_1, args.distilled_lora_strength_stage_2
    stage_1, stage_2 = loras(args.ic_lora, "--ic-lora"), distilled
    if given != (None, None):
        flag = "--distilled-lora-strength-stage-" + ("1" if given[0] is not None else "2")
        if not distilled:
            raise UserError(f"{flag} is of --distilled-lora; type --distilled-lora PATH as well")
        if any(len(values) > 1 for values in args.distilled_lora):
            raise UserError(
                f"{flag} takes the place of --distilled-lora's own strength: type"
                " --distilled-lora PATH alone"
            )
        strengths = [
            default if strength is None else strength
            for strength, default in zip(given, HQ_STRENGTHS, strict=True)
        ]
        first, stage_2 = (
            tuple(dataclasses.replace(lora, strength=strength) for lora in distilled)
            for strength in strengths
        )
        stage_1 += first
    return dict(zip(LORA_FIELDS, (loras(args.lora, "--lora"), stage_1, stage_2), strict=True))


def lora_keys(fields: dict[str, Any]) -> dict[str, list]:
    """The keys of a prompts file's line that ask for LoRAs, wherever it is read; the reverse of
    `lora_fields`."""
    return {
        key: [[str(lora.path.absolute()), lora.strength] for lora in fields[name]]
        for key, name in zip(LORAS, LORA_FIELDS, strict=True)
    }


def weight_sets(fields: dict[str, WeightSet]) -> tuple[WeightSet, ...]:
    """The weight sets that a Job's LoRAs name: of stage 1 and of stage 2."""
    every, first, second = fields.values()
    return tuple(dict.fromkeys([every + first, every + second]))


def loras(flag_values: list[list[str]], flag: str) -> WeightSet:
    """PATH [STRENGTH], for each time the flag was given."""
    parsed = []
    for values in flag_values:
        if len(values) > 2:
            raise UserError(
                f"{flag} takes PATH [STRENGTH], got {len(values)} values: {' '.join(values)}"
            )
        try:
            strength = float(values[1]) if len(values) == 2 else 1.0
        except ValueError:
            raise UserError(f"{flag} {' '.join(values)}: STRENGTH is a number") from None
        parsed.append(Lora(Path(values[0]), strength))
    return tuple(parsed)
