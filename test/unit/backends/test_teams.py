"""Guidance groups share the passes of a step, give the bits of one, and go on without those that fail."""

import threading
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from ltx_neuron.backends import registry
from ltx_neuron.backends.ranks import NotFiniteError, RankError, RankRefusal, Ranks
from ltx_neuron.backends.teams import GuidanceGroups
from ltx_neuron.backends.torchdist import host
from ltx_neuron.config.profiles import resolve
from ltx_neuron.engine.preflight import check_guidance_groups
from ltx_neuron.errors import UserError
from ltx_neuron.models.signatures import Field

PASSES = ("cond", "uncond", "perturbed", "isolated")
FIELD = Field((1, 4), torch.float32)
PROGRAM = SimpleNamespace(fields=dict.fromkeys(("latent", *(f"{k}_video" for k in PASSES)), FIELD))
START = torch.arange(4.0).view(1, 4) / 3
KILLED = "rank 1 of 2 failed: the process was killed (SIGKILL)"


class Group(Ranks):
    """Ranks whose passes and "guide" are a few operations on tensors in this process.

    fails  (method, word in its arguments) -> the error that it raises there
    """

    def __init__(self, fails: dict | None = None):
        super().__init__(2)
        self.fails, self.calls, self.closed, self.tensors, self.sequences = fails or {}, [], False, {}, {}

    def _call(self, *call) -> None:
        assert not self.closed
        self.calls.append(call)
        for (method, word), error in self.fails.items():
            if method == call[0] and word in str(call):
                raise error

    load, replace_weights, unload, check = (
        lambda self, *_, name=name: self._call(name) for name in ("load", "replace_weights", "unload", "check")
    )

    def put(self, program, like=None, **tensors):
        self._call("put", *tensors)
        self.bytes_sent += sum(tensor.nbytes for tensor in tensors.values())
        self.tensors |= tensors

    def define(self, program, sequence, runs):
        self.sequences[sequence] = runs

    def run(self, program, sequence="main", step=0):
        for run, _, writes in self.sequences.get(sequence, [(sequence, {}, {})]):
            latent = self.tensors["latent"]
            self._call("run", run, *writes.values(), step)
            self.launches += 1
            if run == "pass":
                (name,) = writes.values()
                self.tensors[name] = (latent * 1.7 + len(name) + step).sin()
            elif run == "guide":
                predictions = [x for name, x in sorted(self.tensors.items()) if name != "latent"]
                self.tensors["latent"] = latent + sum(predictions) / 7
            else:
                self.tensors["latent"] = (latent * 1.3 + step).cos()
        return 2.0

    def get(self, program, name):
        self._call("get", name)
        return self.tensors[name]

    def hashes(self, *names):
        self._call("hashes")
        return [str(self.tensors[name]) for name in names] * self.tp

    def close(self):
        self.closed = True


def started(groups: list[Group], passes=PASSES) -> GuidanceGroups:
    """A team that holds the latents and the guided sequence of these passes."""
    team = GuidanceGroups([partial(lambda group: group, group) for group in groups])
    team.load(None, {"dit": PROGRAM}, torch.float32)
    runs = [("pass", {}, {"video_x0": f"{kind}_video"}) for kind in passes]
    team.define("dit", "guided", [*runs, ("guide", {}, {})])
    team.define("dit", "repeat", [("guide", {}, {})])
    team.put("dit", latent=START)
    return team


def latent_of(groups: list[Group], sequences=("guided",) * 3, passes=PASSES) -> torch.Tensor:
    team = started(groups, passes)
    for step, sequence in enumerate(sequences):
        team.run("dit", sequence, step=step)
    assert same(team)
    return team.get("dit", "latent")


def same(team: GuidanceGroups) -> bool:
    return len(set(team.hashes("latent"))) == 1


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("sequences", [("guided",) * 3, ("guided", "repeat", "guided")])
@pytest.mark.parametrize("passes", [PASSES, PASSES[:1]])
def test_groups_make_the_bits_of_one(count, sequences, passes):
    alone, groups = latent_of([Group()], sequences, passes), [Group() for _ in range(count)]
    assert torch.equal(latent_of(groups, sequences, passes), alone)
    assert all(torch.equal(group.tensors["latent"], alone) for group in groups)  # every group holds the state


def test_passes_are_dealt_one_to_each_group_in_turn_and_sent_to_the_others():
    team = started(groups := [Group(), Group(), Group()])
    assert (sent := team.bytes_sent) == 3 * START.nbytes
    assert team.run("dit", "guided", step=0) == 2 * 2.0 + 2.0  # two passes of group 1, then guide
    passes = [[call[2] for call in group.calls if call[:2] == ("run", "pass")] for group in groups]
    assert passes == [["cond_video", "isolated_video"], ["uncond_video"], ["perturbed_video"]]
    assert team.bytes_sent - sent == (2 + 3 + 3) * START.nbytes
    assert team.launches == 2 + 1
    of_passes = [(1 + n % 3, kind, 2.0) for n, kind in enumerate(PASSES)]
    assert team.pass_ms == of_passes + [(number, "guide", 2.0) for number in (1, 2, 3)]


def test_groups_run_their_passes_at_the_same_time(monkeypatch):
    both, run = threading.Barrier(2, timeout=10), Group.run
    monkeypatch.setattr(Group, "run", lambda *call, **numbers: (both.wait(), run(*call, **numbers))[1])
    latent_of([Group(), Group()], ("guided",), PASSES[:2])


FAULTS = {
    "in its pass": ("run", "uncond_video"),
    "in a pass of a later step": ("run", "'uncond_video', 1"),
    "in guide": ("run", "'guide', 1"),
    "while it receives the others' predictions": ("put", "cond_video"),
    "while its prediction is read": ("get", "uncond_video"),
    "while nothing ran": ("check", ""),
    "while latents are uploaded": ("put", "latent"),
    "at its load": ("load", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("count", [2, 4])
def test_a_group_that_fails_costs_time_and_not_the_clip(fault, count, capsys):
    groups = [Group() for _ in range(count)]
    groups[1].fails[FAULTS[fault]] = RankError(f"{KILLED}\nmore")
    team = started(groups)
    for step in range(3):
        team.moment = f"at step {step + 1} of stage_1"
        team.run("dit", "guided", step=step)
        team.check()
    assert torch.equal(team.get("dit", "latent"), latent_of([Group()]))
    assert groups[1].closed and not groups[0].closed
    assert len(team.hashes("latent")) == 2 * (count - 1)
    (line,), left = team.lost, "1 group" if count == 2 else "3 groups"
    assert capsys.readouterr().err == f"{line}\n"
    assert line.startswith("guidance group 2 lost") and line.endswith(f"({KILLED}), {left} since")
    assert "lost at step 2 of stage_1 (" in line or fault != "in a pass of a later step"


@pytest.mark.parametrize("fault", [("run", "'main', 2"), ("hashes", ""), ("get", "latent")])
def test_an_unguided_stage_runs_on_one_group_and_goes_on_on_another(fault):
    """Which repeats what ran since the last upload, and not what ran before it."""
    team = started([first := Group(), second := Group()])
    team.run("dit", step=5)
    team.put("dit", latent=START)
    team.run("dit", step=0)
    team.run("dit", step=1)
    assert "run" not in [call[0] for call in second.calls]
    first.fails[fault] = RankError(KILLED)
    team.run("dit", step=2)
    assert same(team)
    assert torch.equal(team.get("dit", "latent"), latent_of([Group()], ("main",) * 3))
    assert first.closed and not second.closed


def test_shared_work_of_a_lost_group_is_done_by_another_and_the_ranks_of_each_group_are_compared():
    groups = [Group(), Group(), Group()]
    groups[1].fails["run", "main"] = RankError(KILLED)
    team = started(groups)

    def work(number: int, group: Ranks) -> torch.Tensor:
        group.put("dit", latent=START + number)
        group.run("dit")
        return group.get("dit", "latent")

    made = team.share([partial(work, number) for number in range(5)])
    assert torch.equal(torch.cat(made), torch.cat([((START + n) * 1.3).cos() for n in range(5)]))
    assert groups[1].closed and same(team)  # though the groups differ
    groups[2].hashes = lambda *names: ["1", "2"]
    assert not same(team)
    groups[2].hashes = lambda *names: ["1", "1"]
    team.put("dit", latent=START)
    assert not same(team)  # the groups hold the same again, and differ


def test_the_loss_of_all_groups_is_the_error_of_the_last():
    groups = [Group({("run", "uncond_video"): RankError(f"rank {n} failed")}) for n in range(3)]
    team = started(groups)
    for call in partial(team.run, "dit", "guided"), team.check, partial(team.get, "dit", "latent"), team.unload:
        with pytest.raises(RankError, match="rank 2 failed"):
            call()
    assert all(group.closed for group in groups)
    team.close()


def test_an_error_that_all_groups_have_in_common_drops_none_and_one_at_the_start_ends_those_that_have_begun():
    for error in (NotFiniteError(["video_latent"]), RankRefusal("no such file")):
        team = started([Group(), Group({("run", "guide"): error})])
        with pytest.raises(type(error)):
            team.run("dit", "guided", step=0)
        assert not team.lost
    group = Group()
    with pytest.raises(ZeroDivisionError):
        GuidanceGroups([lambda: group, lambda: 1 // 0])
    assert group.closed


def test_more_groups_than_any_job_has_passes_or_tiles_are_refused_with_the_number_that_helps():
    def job(*counts: int) -> SimpleNamespace:
        """A job whose stages have so many passes, of guidance in the first and of tiles in others."""
        stages = [SimpleNamespace(guided=not n, tiles=[None] * count) for n, count in enumerate(counts)]
        return SimpleNamespace(passes=PASSES[: counts[0]], stages=stages, stage_buckets=lambda stage: stage.tiles)

    check_guidance_groups([job(2, 1), job(1, 4)], 4)
    check_guidance_groups([job(1, 1)], 1)
    with pytest.raises(UserError, match=r"no stage .* than 3.\nType .* guidance_parallel=3$"):
        check_guidance_groups([job(1, 3), job(1)], 4)
    with pytest.raises(UserError, match=r"neither.\nType .* guidance_parallel=1$"):
        check_guidance_groups([job(1, 1)], 2)


def test_every_group_has_ranks_of_its_own_which_nxd_cannot_give_it(monkeypatch):
    with pytest.raises(UserError, match="backend=nxd .*Type --profile-set backend=torchdist"):
        resolve("trn2.48xlarge", ["guidance_parallel=4", "backend=nxd"])
    monkeypatch.setattr(host, "TorchDistRanks", made := Mock(side_effect=lambda *_: Group()))
    team = registry.ranks(resolve("cpu", ["guidance_parallel=3"]), 2, None)
    assert isinstance(team, GuidanceGroups) and len(team.groups) == 3 and team.at_once == 6
    assert sorted(call.args[-1] for call in made.call_args_list) == [0, 1, 2]
