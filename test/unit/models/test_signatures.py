"""The saved graphs hold what a rank may run and nothing else: counted in the .pt2 files."""

import hashlib
import json
import math
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import diffusion_vae
import pytest
import torch
from graphs import operations
from helpers import Held, furthest, ltx_model, made_config, randn, run_program, step_inputs, step_number
from lint import compare_ranks, fx
from tiny import TinySizes
from tiny.config import released_config, tiny_config
from tiny.gemma import gemma_config as tiny_gemma_config

from ltx_neuron.backends import mesh, registry
from ltx_neuron.backends.export import TorchDistComm, compile_program, fake_process_group, trace
from ltx_neuron.backends.manifest import Manifest
from ltx_neuron.config.common import TEXT_TOKENS
from ltx_neuron.config.gemma import read_config
from ltx_neuron.config.profiles import resolve
from ltx_neuron.config.sound import audio_decoder_config, vocoder_config
from ltx_neuron.config.transformer import Bucket, transformer_config
from ltx_neuron.config.video import video_decoder_config
from ltx_neuron.errors import UserError
from ltx_neuron.files import MANIFEST
from ltx_neuron.models.parallel import SingleRank
from ltx_neuron.models.programs import (
    Program,
    connector_program,
    cut_graphs,
    diffusion_program,
    dit_program,
    gemma3_program,
    spectrogram_program,
    tile_program,
    waveform_program,
    weight_name,
    with_convolution,
)
from ltx_neuron.models.signatures import Field
from ltx_neuron.sampling.latents import video_positions
from ltx_neuron.sampling.schedules import STAGE_2_SIGMAS

TP, DTYPE = 4, torch.bfloat16
SOUND = "mel decoder", "vocoder"  # in float32 whatever the dtype
BUCKET = Bucket(video_tokens=24, audio_tokens=18, timesteps=2, max_steps=8)
GUIDED = Bucket(video_tokens=6, audio_tokens=4, timesteps=1, max_steps=3, guided=True)
HELD = Bucket(24, 18, 2, 8, audio_timesteps=2, biased=True, nag=True, ancestral=True)
VOICED = Bucket(6, 4, 1, max_steps=3, guided=True, audio_timesteps=2, identity=True)
# All-reduces of a block: q/k norms of three stages; two streams x (three attentions, feed-forward)
STATISTICS, ACTIVATIONS = 3, 8
CONNECTOR_SUMS, GEMMA_SUMS = 5, 2  # of a layer
CONTEXT = resolve("cpu", ("context_parallel=4",))
RELEASED = transformer_config(released_config())


@pytest.fixture(scope="module")
def manifests(tmp_path_factory):
    """Compiled programs by name. `released` has the full-size blocks: on the meta device they take no memory."""
    sizes, (_, config) = TinySizes(), made_config(TinySizes(layers=1))
    _, marked = made_config(TinySizes(layers=1), use_keyframes_abs_pos_embedding=True)
    _, many_heads = made_config(TinySizes(layers=1, heads=2 * TP))
    gemma, tiny = read_config(tiny_gemma_config(sizes), Path("gemma")), tiny_config(sizes)
    decoder, small = video_decoder_config(tiny), (2, 3, 2)
    # Of the released kinds of stages one each: others differ in their sizes alone.
    whole, sound = diffusion_vae.config_of(), vocoder_config(tiny)
    last_stages = replace(whole, **{name: getattr(whole, name)[-3:] for name in ("channels", "depths", "kernels")})
    last_stages = replace(last_stages, upsamplings=whole.upsamplings[-2:])
    vocoder, bwe = (replace(each, blocks=((3, (1,)),)) for each in (sound.vocoder, sound.bwe))
    common = dict(tp=TP, comm=TorchDistComm(TP), dtype=DTYPE)
    step = partial(dit_program, blocks_per_graph=1, **common)
    compiled, folder = {}, tmp_path_factory.mktemp("graphs")
    with fake_process_group(CONTEXT.world_size(TP), groups=mesh.groups(CONTEXT, TP)):
        programs = {
            "released": step(RELEASED, BUCKET, attention="nki"),
            "whole step": step(config, BUCKET, blocks_per_graph=0),
            "guided": step(config, VOICED, attention="nki"),
            "held audio, a bias and NAG, ancestral, divided": step(marked, HELD, sequence_parallel=True),
            "context parallel": step(many_heads, GUIDED, context=registry.context(CONTEXT, TP)),
            "gemma3": gemma3_program(gemma, config, 128, states=True, **common),
            "connectors": connector_program(config, **common),
            "video decoder": tile_program(video_decoder_config(released_config()), small, DTYPE),
            "video decoder, conv3d": with_convolution(tile_program(decoder, small, DTYPE), "conv3d"),
            "diffusion decoder": diffusion_program(last_stages, (3, 3, 4), DTYPE),
            "mel decoder": spectrogram_program(audio_decoder_config(tiny), 3),
            "vocoder": waveform_program(replace(sound, vocoder=vocoder, bwe=bwe), 5),
        }
        for name, program in programs.items():
            compile_program(program, folder / name, {"model": name}, torch.float32 if name in SOUND else DTYPE)
            compiled[name] = Manifest(folder / name), program
    return compiled


@pytest.fixture(scope="module")
def graphs(manifests):
    """Every graph as the ranks read it from its file, by program and name."""
    return {(p, name): manifest.load(name) for p, (manifest, _) in manifests.items() for name in manifest.graphs}


def values(node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    return [v for v in (value if isinstance(value, tuple | list) else [value]) if isinstance(v, torch.Tensor)]


def all_reduces(exported) -> list[torch.Tensor]:
    reduce = torch.ops._c10d_functional.all_reduce.default
    return [values(node)[0] for node in operations(exported) if node.target == reduce]


def test_a_block_has_three_sums_of_flat_statistics_and_eight_of_activations_and_no_graph_has_more(graphs):
    reduced = all_reduces(graphs["released", "blocks"])
    statistics, activations = ([t for t in reduced if t.ndim == 1], [t for t in reduced if t.ndim != 1])
    video, audio = BUCKET.video_tokens, BUCKET.audio_tokens
    assert {t.dtype for t in statistics} == {torch.float32} and {t.dtype for t in activations} == {DTYPE}
    # One number per query and key: self-attentions, text attentions, audio-video attentions of both streams
    both = 2 * (video + audio)
    assert [t.numel() for t in statistics] == [both, video + audio + 2 * TEXT_TOKENS, both]
    assert [tuple(t.shape) for t in activations] == [(1, video, 4096), (1, audio, 2048)] * (ACTIVATIONS // 2)
    wanted = {("released", "head"): 0, ("released", "tail"): 0, ("guided", "guide"): 0}
    wanted |= dict.fromkeys([("whole step", "step"), ("guided", "blocks")], STATISTICS + ACTIVATIONS)
    wanted |= {("gemma3", "gemma3"): 4 * GEMMA_SUMS, ("connectors", "connectors"): 2 * CONNECTOR_SUMS}
    assert {key: len(all_reduces(graphs[key])) for key in wanted} == wanted


def test_lint_finds_nothing_in_the_graphs_that_the_ranks_read(graphs):
    used = set()
    for (program, name), exported in graphs.items():
        assert fx.check_fx(exported, mesh.groups(CONTEXT, TP), f"{program} {name}") == []
        used |= {str(node.target) for node in operations(exported)}
        integers = {node.name for node in exported.graph.nodes for v in values(node) if v.dtype == torch.int32}
        assert integers <= {"step", "step_numbers"}, (program, name)
    collectives = {f"_c10d_functional.{name}.default" for name in fx.COLLECTIVES}
    assert used == fx.EXPORTED | collectives | {fx.WAIT}  # every operation that lint allows is needed


def test_graphs_hold_nothing_and_their_manifest_describes_them_and_reads_back_as_their_program(graphs, manifests):
    kinds = torch.export.graph_signature.InputKind
    for program_name, (manifest, program) in manifests.items():
        assert manifest.identity == {"model": program_name} and manifest.fields == program.fields
        assert {run: tuple(calls) for run, calls in manifest.runs.items()} == program.runs
        assert manifest.weights() == program.weights()
        for name, (module, inputs, outputs) in program.graphs.items():
            described, exported = manifest.graphs[name], graphs[program_name, name]
            assert (tuple(described["inputs"]), tuple(described["outputs"])) == (inputs, outputs)
            assert described["parameters"] == {n: list(p.shape) for n, p in module.named_parameters()}
            specs = exported.graph_signature.input_specs
            parameters = [spec.target.removeprefix("module.") for spec in specs if spec.kind == kinds.PARAMETER]
            taken = [spec.arg.name for spec in specs if spec.kind == kinds.USER_INPUT]
            assert (parameters, taken) == (list(described["parameters"]), described["inputs"])
            assert len(parameters) + len(taken) == len(specs) and not exported.constants  # no buffer
            nodes = {node.name: node for node in exported.graph.nodes if node.op in ("placeholder", "output")}
            pairs = [(field, nodes[field]) for field in inputs]
            pairs += zip(outputs, nodes["output"].args[0], strict=True)
            for field, node in pairs:
                (value,), wanted = values(node), manifest.fields[field]
                assert (tuple(value.shape), value.dtype) == (wanted.shape, wanted.dtype), (program_name, name, field)
    assert manifests["guided"][0].weights() == manifests["whole step"][0].weights()  # one set of rank files


def test_a_graph_takes_the_fields_that_its_module_reads_and_returns_a_state_in_its_shape():
    class Reader(torch.nn.Module):
        """Reads one of its fields, and another one if it is there."""

        def forward(self, inputs):
            more = [inputs["more"]] if inputs.get("more") is not None else []
            return {"state": torch.cat([inputs["state"], *more])}

    state = Field((2, 3), DTYPE)
    program = Program({"reader": Reader()}, {}, {"unread": state, "state": state}, {}, DTYPE)
    assert program.graphs["reader"][1:] == (("state",), ("state",)) and program.fields == {"state": state}
    program = Program({"reader": Reader()}, {}, {"state": state, "more": state}, {}, DTYPE)
    with pytest.raises(ValueError, match=r"reader returns state as .*\(4, 3\).* wanted .*\(2, 3\)"):
        program.fields  # noqa: B018 - derived when it is read


def test_no_input_of_a_released_step_holds_modulation_per_token():
    """AdaLN rows of every token would be gigabytes. The largest inputs are as wide as a stream."""
    for stream, width in (("video_tokens", 4096), ("audio_tokens", 2048)):
        longer = replace(BUCKET, **{stream: getattr(BUCKET, stream) + 1000})
        programs = [dit_program(RELEASED, bucket, TP, TorchDistComm(TP), DTYPE, 1) for bucket in (BUCKET, longer)]
        taken = {name for graph in programs[0].graphs.values() for name in graph.inputs}
        before, after = ({name: math.prod(program.fields[name].shape) for name in taken} for program in programs)
        assert max((after[name] - before[name]) / 1000 for name in taken) == width


def test_every_rank_traces_the_same_graph():
    texts = {}
    for rank in (0, TP - 1):
        with fake_process_group(TP, rank=rank):
            program = dit_program(made_config()[1], BUCKET, TP, TorchDistComm(TP), DTYPE, blocks_per_graph=1)
            texts[rank] = fx.text(trace(program, "blocks", DTYPE))
    assert "all_reduce" in texts[0] and compare_ranks("blocks", texts) == []


def test_files_hold_no_pickle_and_no_weights_and_tell_nothing_of_where_they_were_made(manifests):
    for manifest, _ in manifests.values():
        for described in manifest.graphs.values():
            with zipfile.ZipFile(manifest.folder / described["file"]) as archive:
                content = {m.filename: archive.read(m) for m in archive.infolist()}
            for name, data in content.items():
                weights = ("/weights/" in name or "/constants/" in name) and not name.endswith(".json")
                pickled = name.endswith((".pt", ".pkl", ".pickle")) or data[:1] == b"\x80"
                assert not (data and (weights or pickled)), name
            text = b"".join(content.values())
            for secret in (b"site-packages", b"dit.py", str(manifest.folder).encode()):
                assert secret not in text


def test_a_file_with_a_pickle_inside_or_that_its_manifest_does_not_describe_is_refused(manifests, tmp_path):
    source, _ = manifests["connectors"]
    content = json.loads((source.folder / MANIFEST).read_text())
    described = content["graphs"]["connectors"]
    file = tmp_path / described["file"]
    file.write_bytes((source.folder / file.name).read_bytes())
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("connectors/data/sample_inputs/other.pt", b"\x80\x02.")
    for digest, message in (
        (described["sha256"], "not the graph its manifest describes"),
        (hashlib.sha256(file.read_bytes()).hexdigest(), "holds pickled data"),
    ):
        described["sha256"] = digest
        (tmp_path / MANIFEST).write_text(json.dumps(content))
        with pytest.raises(UserError, match=message):
            Manifest(tmp_path).load("connectors")


@pytest.mark.parametrize("make", [torch.arange, torch.zeros, torch.rand])
def test_a_graph_that_makes_a_tensor_of_its_own_is_refused(make, tmp_path):
    class Planted(torch.nn.Module):
        def forward(self, inputs):
            x = inputs["x"]
            return {"x": x + make(x.shape[-1], device=x.device).to(x.dtype)}

    runs, fields = {"main": (("planted", 0),)}, {"x": Field((2, 3), DTYPE)}
    with pytest.raises(RuntimeError, match=rf"makes a constant tensor \(aten\.{make.__name__}\.default\)"):
        compile_program(Program({"planted": Planted()}, runs, fields, {}, DTYPE), tmp_path, {}, DTYPE)
    assert not (tmp_path / MANIFEST).exists()


# Blocks per graph (0: the whole step) and the calls of a run
@pytest.mark.parametrize(("cut", "calls"), [(0, 1), (1, 4)])
def test_every_cut_of_the_step_gives_the_same_bits_when_run_from_its_files(cut, calls, tmp_path):
    """With held tokens, of a model of two blocks; the step without any tracing is the whole one."""
    content, config = made_config(TinySizes(layers=2))
    weights, mask = ltx_model(content).state_dict(), torch.ones(24, 1)
    mask[:8] = 0
    held = Held(mask, randn(1, 24, 128, seed=9), torch.tensor([1.0, 0.0]), torch.cat([mask, 1 - mask], dim=1))
    positions = video_positions((3, 2, 4), 24.0)
    inputs = step_inputs(config, weights, STAGE_2_SIGMAS, positions, BUCKET.audio_tokens, held, max_steps=8)
    inputs |= step_number(1)
    plain = run_program(dit_program(config, BUCKET, 1, SingleRank(), torch.float32, 0), weights, inputs)
    with fake_process_group(1):
        program = dit_program(config, BUCKET, 1, TorchDistComm(1), torch.float32, cut)
        compile_program(program, tmp_path, {}, torch.float32)
    manifest, outputs = Manifest(tmp_path), inputs
    assert len(manifest.runs["main"]) == calls
    with torch.no_grad():
        for name, first in manifest.runs["main"]:
            described = manifest.graphs[name]
            mine = [weights[weight_name(parameter, first)] for parameter in described["parameters"]]
            results = manifest.load(name).graph_module(*mine, *(outputs[field] for field in described["inputs"]))
            outputs = outputs | dict(zip(described["outputs"], results, strict=True))
    for name in ("video_latent", "audio_latent"):
        assert torch.equal(outputs[name], plain[name])
        assert furthest(outputs[name], inputs[name]) > 0


# Blocks wanted in a graph, a model's four blocks that begin one, and the graphs without weights of their own
@pytest.mark.parametrize(
    ("wanted", "firsts", "cut"),
    [(0, [], set()), (1, [0, 1, 2, 3], {"blocks"}), (3, [0, 2], {"blocks"}), (48, [0], set())],
)
@pytest.mark.parametrize("bucket", [BUCKET, GUIDED], ids=["plain", "guided"])
def test_groups_of_blocks_are_all_alike_and_cut_where_they_are_called_for_other_blocks_again(
    bucket, wanted, firsts, cut
):
    """A guided step runs all its graphs once for each pass, on the same weights every time."""
    program = dit_program(made_config(TinySizes(layers=4))[1], bucket, 1, SingleRank(), torch.float32, wanted)
    calls = [call for run in program.runs.values() for call in run]
    assert [first for name, first in calls if name == "blocks"] == firsts
    assert not firsts or len(program.graphs["blocks"].module.transformer_blocks) * len(firsts) == 4
    assert cut_graphs(program.runs) == cut
