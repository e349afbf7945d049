"""What ranks of every backend share: parts of tensors, and what they check."""

import inspect

import pytest
import torch

from ltx_neuron.backends import ranks, teams
from ltx_neuron.backends.nxd import runtime
from ltx_neuron.backends.torchdist import host
from ltx_neuron.models.signatures import Field

WHOLE = Field((1, 4, 8), torch.float32, split=2)
PER_BLOCK = Field((3, 4), torch.float32, per_block=True)


@pytest.mark.parametrize("backend", [host.TorchDistRanks, runtime.NxdRanks, teams.GuidanceGroups])
def test_methods_of_a_backend_have_the_signatures_of_the_protocol(backend):
    for method in ranks.Ranks.__abstractmethods__:
        own, wanted = (inspect.signature(getattr(kind, method)) for kind in (backend, ranks.Ranks))
        assert own == wanted, method


def test_a_rank_keeps_its_part_and_of_a_field_per_block_a_tensor_for_each_group():
    whole = torch.arange(64.0).view(1, 4, 16)
    assert torch.equal(ranks.rank_parts(WHOLE, "x", whole, 1, 2)["x"], whole[:, :, 8:])
    rows = torch.arange(24.0).view(6, 4)
    parts = ranks.rank_parts(PER_BLOCK, "keep_cond", rows, 1, 2)
    assert [*parts] == [ranks.indexed("keep_cond", first) for first in (0, 3)]
    assert torch.equal(torch.cat([*parts.values()]), rows)


LATENT = torch.ones(1, 3, 4)


@pytest.mark.parametrize(
    ("number", "video", "broken", "looked_at"),
    [
        (0.5, LATENT, [], ["finite"]),
        (float("nan"), LATENT * float("nan"), ["v"], ["finite", "v", "a"]),
        (float("-inf"), LATENT * float("-inf"), ["v"], ["finite", "v", "a"]),
        # each number is one, and their sum is none
        (float("inf"), LATENT * 3e38, ["v", "a"], ["finite", "v", "a"]),
    ],
)
def test_latents_are_downloaded_only_where_the_number_says_that_one_is_broken(number, video, broken, looked_at):
    names = {"v": "video_latent", "a": "audio_latent"}
    held = {"finite": torch.tensor([number]), "video_latent": video, "audio_latent": LATENT}
    downloads = []

    def download(name: str) -> torch.Tensor:
        downloads.append(name)
        return held[name]

    actual = ranks.broken_latents(["video_latent", "audio_latent", "finite"], download)
    assert actual == [names[name] for name in broken]
    assert downloads == [names.get(name, name) for name in looked_at]
    assert ranks.broken_latents(["video_x0"], lambda _: pytest.fail("downloaded")) == []  # a run without that number


def test_only_a_tensor_of_the_whole_shape_may_be_uploaded():
    for field, shape in ((WHOLE, (1, 4, 16)), (PER_BLOCK, (3, 4)), (PER_BLOCK, (6, 4))):
        ranks.check_shape("toy", "x", field, torch.empty(shape), tp=2)
    for field, shape in ((WHOLE, (1, 4, 8)), (PER_BLOCK, (4, 4)), (PER_BLOCK, (3, 5)), (PER_BLOCK, (0, 4))):
        with pytest.raises(ValueError, match="toy.x: got shape"):
            ranks.check_shape("toy", "x", field, torch.empty(shape), tp=2)
