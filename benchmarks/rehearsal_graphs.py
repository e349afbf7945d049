"""Two jobs of LTX-2.5 at the released size, as far as they go without Trainium: planned, their
graphs exported, and each graph checked against the documented limits of the compiler.

    python benchmarks/rehearsal_graphs.py --folder DIR [--tiny] [--hlo]

An IC-LoRA at 1024x1536 in two stages, and 2176x3840 in tiles of 576x1024 with the IC-LoRA in both
stages, each of 121 frames with a reference of half a stage's size, at TP 4 in bfloat16. The plan
and the checks are those of a trn2.3xlarge, with its attention kernel; the exported files are of
profile cpu. The 48 blocks share one graph. The model's files have random weights and few bytes on
the disk (lib/random_sources.py). Nothing is sharded or run. What it made is deleted at the end.
--tiny does the second one with tiny models and sizes, to try this script. --hlo only checks the HLO
of the same graphs; it needs torch_xla (test/xla/make_xla_venv.sh).
"""

import platform
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import torch
from lib.harness import finish
from lib.harness import parser as harness_parser
from lint import fx, lower
from lint.rules import Finding
from rehearsal import COLUMNS, Rehearsal
from tiny import picture
from tiny.split import labels, split_assets_in
from tiny.weights import lora_weights, save

from ltx_neuron.backends import mesh
from ltx_neuron.backends.export import fake_process_group
from ltx_neuron.config.profiles import resolve
from ltx_neuron.config.transformer import TransformerConfig, transformer_config
from ltx_neuron.errors import run
from ltx_neuron.job import Job
from ltx_neuron.models.programs import dit_program
from ltx_neuron.weights.model_files import ModelFiles

TP = 4
TRN2 = "trn2.3xlarge"
EXPORT = ["--profile", "cpu", "--profile-set", "blocks_per_graph=1", "--tp-degree", TP]
BOTH_STAGES = dict(stage_2_ic_lora=True, tile=True)
# Fields of each job, and of the last one with --tiny.
JOBS = {
    "ic_lora": (dict(height=1024, width=1536, num_frames=121),),
    "tiled": (
        dict(height=2176, width=3840, num_frames=121, tile_height=576, tile_width=1024)
        | BOTH_STAGES,
        dict(height=256, width=256, num_frames=9, tile_height=128, tile_width=128) | BOTH_STAGES,
    ),
}


class Graphs(Rehearsal):
    """A rehearsal with an adapter and its reference."""

    def write_adapter(self) -> None:
        """A LoRA on every linear layer, whose references have half a stage's size, and a still."""
        self.lora, self.sheet = (self.folder / name for name in ("ic.safetensors", "sheet.png"))
        self.files = ModelFiles(split_assets_in(self.checkpoint).distilled)
        shapes = self.files.checkpoint.shapes
        weights = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        save(self.lora, lora_weights(weights, 2), labels() | {"reference_downscale_factor": "2"})
        picture().save(self.sheet)

    def rehearse(self, name: str, part: ModuleType) -> int:
        """Plan, export and check a job, or check its HLO. Returns the number of checked graphs;
        SystemExit for a finding."""
        fields = JOBS[name][self.tiny] | {"two_stage": True}
        given = {"ic_lora": (self.lora,), "video_conditioning": (self.sheet, 1.0)}
        files = ["--checkpoint-path", self.checkpoint, "--artifacts-dir", self.artifacts]
        flags = [*files, *_flags(fields), *_flags(given)]
        if part is fx:
            plan = ["-m", "ltx_neuron", "plan", *flags]
            self.script(f"plan {name}", [*plan, "--profile", TRN2])
            print((self.folder / f"plan_{name}.log").read_text(), flush=True)
            self.script(
                f"compile {name}", ["-m", "ltx_neuron", "compile", "transformer", *flags, *EXPORT]
            )
        job = Job.model_validate(
            fields
            | {"ic_lora": ((str(self.lora),),), "video_conditioning": ((str(self.sheet), 1),)}
        )
        config = transformer_config(self.files.config)
        graphs = checked(job, config, part)
        for graph, findings in graphs.items():
            print(f"{name}: {graph}: {len(findings)} findings", flush=True)
        if broken := [finding for findings in graphs.values() for finding in findings]:
            raise SystemExit("\n".join(map(str, broken)))
        return len(graphs)


def _flags(fields: dict[str, Any]) -> list:
    """The flags that say fields."""
    flags = []
    for name, value in fields.items():
        values = [] if value is True else value if isinstance(value, tuple) else [value]
        flags += [f"--{name.replace('_', '-')}", *values]
    return flags


def checked(job: Job, config: TransformerConfig, part: ModuleType) -> dict[str, list[Finding]]:
    """The findings in each graph of a job's programs on a trn2.3xlarge. part: lint.fx for a graph
    that is exported and then as torch.compile gives it to a backend, lint.lower for its HLO."""
    profile, dtype, found = resolve(TRN2, (f"backend={part.BACKEND}",)), torch.bfloat16, {}
    groups = mesh.compiled(profile, TP)
    for bucket in job.buckets:
        with fake_process_group(profile.world_size(TP), 0, mesh.groups(profile, TP)):
            how = TP, part.comm(groups), dtype, 1, profile.attention
            program = dit_program(config, bucket, *how)
            for name in program.graphs:
                graph = f"{bucket.name} {name}"
                _, found[graph] = part.read(program, name, groups, dtype, graph).check()
    return found


def main() -> None:
    parser = harness_parser(__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="an empty folder")
    parser.add_argument("--tiny", action="store_true", help="tiny models and sizes")
    parser.add_argument("--hlo", action="store_true", help="only check the graphs' HLO")
    args = parser.parse_args()
    part = lower if args.hlo else fx
    part.require()
    rehearsal = Graphs(args.folder, args.tiny, dense=False, split=True)
    rehearsal.take_folder()
    memory = psutil.virtual_memory().total
    print(f"{psutil.cpu_count()} CPUs, {memory / 1e9:.1f} GB of memory, {platform.platform()}")
    try:
        rehearsal.write_sources()
        rehearsal.write_adapter()
        print(f"{'':32}" + "".join(f"{name:>14}" for name in COLUMNS))
        names = [name for name, sizes in JOBS.items() if len(sizes) > 1 or not args.tiny]
        graphs = {name: rehearsal.rehearse(name, part) for name in names}
    finally:
        shutil.rmtree(args.folder)
    memory = max((row.own_memory_gb for row in rehearsal.rows), default=None)
    finish(args, checked_graphs=sum(graphs.values()), memory_gb=memory)


if __name__ == "__main__":
    run(main)
