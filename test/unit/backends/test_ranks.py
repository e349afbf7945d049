"""What ranks of every backend share: parts of tensors, and what they check."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from ltx_neuron.backends import ranks, teams
from ltx_neuron.backends.nxd import runtime
from ltx_neuron.backends.ranks import Call
from ltx_neuron.backends.torchdist import host
from ltx_neuron.models.signatures import Field

WHOLE = Field((1, 4, 8), torch.float32, split=2)
PER_BLOCK = Field((3, 4), torch.float32, per_block=True)


@pytest.mark.parametrize("backend", [host.TorchDistRanks, runtime.NxdRanks, teams.GuidanceGroups])
def test_methods_of_a_backend_have_the_signatures_of_the_protocol(backend):
    for method in ranks.Ranks.__abstractmethods__:
        own, wanted = (inspect.signature(getattr(kind, method)) for kind in (backend, ranks.Ranks))
        assert own == wanted, method


def test_a_rank_keeps_its_part_of_an_upload_which_has_the_whole_shape():
    """Of a field per block, a tensor for each group of blocks."""
    whole = torch.arange(64.0).view(1, 4, 16)
    assert torch.equal(ranks.rank_parts(WHOLE, "x", whole, 1, 2)["x"], whole[:, :, 8:])
    rows = torch.arange(24.0).view(6, 4)
    parts = ranks.rank_parts(PER_BLOCK, "keep_cond", rows, 1, 2)
    assert [*parts] == [ranks.indexed("keep_cond", first) for first in (0, 3)]
    assert torch.equal(torch.cat([*parts.values()]), rows)
    for field, shape in ((WHOLE, (1, 4, 16)), (PER_BLOCK, (6, 4))):
        ranks.check_shape("toy", "x", field, torch.empty(shape), tp=2)
    for field, shape in ((WHOLE, (1, 4, 8)), (PER_BLOCK, (4, 4)), (PER_BLOCK, (3, 5)), (PER_BLOCK, (0, 4))):
        with pytest.raises(ValueError, match="toy.x: got shape"):
            ranks.check_shape("toy", "x", field, torch.empty(shape), tp=2)


LATENT = torch.ones(1, 3, 4)
LATENTS = ["video_latent", "audio_latent"]


@pytest.mark.parametrize(
    ("number", "video", "broken", "looked_at"),
    [
        (0.5, LATENT, [], ["finite"]),
        (float("-inf"), LATENT * float("-inf"), LATENTS[:1], ["finite", *LATENTS]),
        # each number is one, and their sum is none
        (float("inf"), LATENT * 3e38, LATENTS, ["finite", *LATENTS]),
    ],
)
def test_latents_are_downloaded_only_where_the_number_says_that_one_is_broken(number, video, broken, looked_at):
    held, downloads = {"finite": torch.tensor([number]), "video_latent": video, "audio_latent": LATENT}, []
    assert ranks.broken_latents([*held], lambda name: downloads.append(name) or held[name]) == broken
    assert downloads == looked_at
    assert ranks.broken_latents(["video_x0"], lambda _: pytest.fail("downloaded")) == []  # a run without that number


def test_a_call_reads_the_tensors_of_its_pass_its_step_and_its_blocks():
    graphs = {"head": (["step", "latent"], ["hidden"]), "blocks": (["hidden", "keep"], ["hidden"])}
    manifest = SimpleNamespace(
        runs={"pass": [("head", 0), ("blocks", 2)]},
        graphs={graph: {"inputs": inputs, "outputs": outputs} for graph, (inputs, outputs) in graphs.items()},
        fields=dict.fromkeys(("step", "latent", "hidden"), WHOLE) | {"keep": PER_BLOCK},
    )
    runs = [("pass", {"keep": "keep_uncond"}, {"hidden": "hidden_uncond"})]
    assert ranks.calls_of(manifest, runs, {"step": 3}) == [
        Call("head", 0, {"step": "step@3", "latent": "latent"}, {"hidden": "hidden_uncond"}),
        Call("blocks", 2, {"hidden": "hidden", "keep": "keep_uncond@2"}, {"hidden": "hidden_uncond"}),
    ]
