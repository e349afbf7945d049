"""Profiles: which one a machine has, what --profile-set may change, and what is refused before a run."""

import re
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import pytest

from ltx_neuron.backends import environment, mesh
from ltx_neuron.config import profiles
from ltx_neuron.config.profiles import PROFILES, TRAINIUM2, require_runtime, resolve
from ltx_neuron.errors import UserError
from ltx_neuron.machine import Machine, probe

LARGE = PROFILES["trn2.48xlarge"]


def test_a_machine_has_one_profile_by_itself_or_is_refused():
    for machine, wanted in (
        (Machine("m7i.4xlarge"), "cpu"),
        (Machine("p5.48xlarge", 0, 8), "cuda"),
        (Machine("trn2u.48xlarge", 16), "trn2.48xlarge"),
        (Machine("trn3pd98.3xlarge", 1), "trn3"),
        # A Neuron machine that we do not know is never run as another.
        (Machine("trn2.3xlarge"), "no /dev/neuron*: the Neuron driver is not loaded"),
        (Machine("trn1.2xlarge", 1), "this machine (trn1.2xlarge) has 1 Neuron devices but no profile"),
        (Machine("", 16), "(no known EC2 instance type) has 16 Neuron devices"),  # in a container
    ):
        if wanted in PROFILES:
            assert resolve(machine=machine).name == wanted
        else:
            with pytest.raises(UserError, match=re.escape(wanted)) as error:
                resolve(machine=machine)
            assert "--profile with one of cpu, cuda, trn2.3xlarge, trn2.48xlarge" in str(error.value)
        assert resolve("cpu", machine=machine).name == "cpu"  # a name is taken at its word


@pytest.mark.parametrize(
    "product, devices, wanted",
    [
        ("trn2.48xlarge\n", [f"neuron{i}" for i in range(16)], ("trn2.48xlarge", 16)),
        ("u-6tb1.metal", [], ("", 0)),  # of no family that has a profile
        ("Standard PC (i440FX + PIIX, 1996)", ["neuron_core", "neuronics"], ("", 0)),
        (None, ["neuron0", "neuron1"], ("", 2)),
    ],
)
def test_the_machine_is_read_from_its_firmware_and_device_files(tmp_path, product, devices, wanted):
    (tmp_path / "dev").mkdir()
    for name in devices:
        (tmp_path / "dev" / name).touch()
    if product is not None:
        (tmp_path / "sys/devices/virtual/dmi/id").mkdir(parents=True)
        (tmp_path / "sys/devices/virtual/dmi/id/product_name").write_text(product)
    machine = probe(tmp_path)
    assert (machine.instance, machine.neuron_devices) == wanted


def test_limits_and_peaks_are_those_of_the_ranks_that_share_the_model():
    # Documented: LNC=2 makes 4 logical cores of a chip's 8, with one bank of so many GiB each.
    for name, cores, bank, flops, memory in (
        ("trn2.3xlarge", 4, 24, 667e12, 2.9e12),
        ("trn2.48xlarge", 64, 24, 667e12, 2.9e12),
        ("trn3", 4, 36, 671e12, 4.9e12),
    ):
        profile, single = PROFILES[name], resolve(name, ("lnc=1",))
        assert (profile.cores, profile.memory_bytes_per_core, profile.tp, profile.lnc) == (cores, bank * 2**30, 4, 2)
        assert (single.cores, single.memory_bytes_per_core) == (2 * cores, bank * 2**29)
        assert (profile.flops(4), profile.flops(16), profile.memory_bytes_per_second(4)) == (flops, 4 * flops, memory)
    # Within the chip; then over NeuronLink, in one direction.
    assert LARGE.link_bytes_per_second(4) == 3.5e12 and LARGE.link_bytes_per_second(16) == 4 * 512e9
    assert PROFILES["cpu"].flops(4) is PROFILES["cpu"].memory_bytes_per_core is PROFILES["cpu"].cores is None


def test_a_trainium3_has_its_own_target_and_links_without_a_torus():
    profile = resolve("trn3")
    assert len(variables := dict(profile.environment)) == len(profile.environment)  # the first of a name would count
    assert variables == dict(resolve("trn2.3xlarge").environment) | {"NEURON_PLATFORM_TARGET_OVERRIDE": "trn3"}
    assert profile.note.startswith("not tried")
    # A group of any chips is routed.
    assert resolve("trn3", ("chips=16", "context_parallel=6")).cores_needed(4) == 24


def test_a_setting_changes_one_value_and_the_last_of_a_key_counts():
    plain, values = resolve(LARGE.name), {"tp=16": 16, "resident=true": True, "resident=no": False}
    values |= {"attention=matmul": "matmul", "text_buckets=1024,256": (256, 1024), "blocks_per_graph=0": 0}
    for setting, value in values.items():
        key, changed = setting.partition("=")[0], resolve(LARGE.name, (setting,))
        assert getattr(changed, key) == value and type(getattr(changed, key)) is type(value)
        assert changed.settings == (setting,)
        assert replace(changed, **{key: getattr(plain, key)}, settings=()) == plain
    assert resolve("cpu", ("tp=2", "compile_backend=inductor", "tp=1")).tp == 1
    own, variables = resolve("trn2.3xlarge"), {"NEURON_RT_EXEC_TIMEOUT": "60", "A": "b=c"}
    changed = resolve(own.name, tuple(f"environment.{name}={value}" for name, value in variables.items()))
    assert dict(changed.environment) == dict(own.environment) | variables
    assert {"--lnc=2", "--auto-cast=none", "--model-type=transformer", "-O1"} <= set(own.flags("gemma3").split())
    assert "--lnc=1" in resolve(own.name, ("lnc=1",)).flags("dit")
    assert resolve(own.name, ("compiler_flags.dit=-O2",)).flags("dit") == "-O2 --lnc=2"


# A profile, and a setting -> what the refusal names
WRONG = {
    "trn4": r"unknown profile 'trn4'; known: cpu, cuda, trn2.3xlarge, ",
    "cpu tp": "--profile-set tp: wanted key=value",
    "cpu tp_degree=1": "tp_degree is a flag of its own; type --tp-degree 1",
    "cpu neuron_vae=true": "type --neuron-vae",
    "cpu tps=4": "unknown key 'tps'; did you mean tp?\nKeys: backend, tp, device, compile_backend, attention, blocks_",
    "cpu name=other": "unknown key 'name'",
    "cpu environment=A": "environment.NAME, compiler_flags.dit, compiler_flags.gemma3, compiler_flags.connectors",
    "cpu tp=0": "'0' is not a whole number of at least 1",
    "cpu tp=²": "'²' is not a whole number",
    "cpu resident=maybe": "'maybe' is not yes or no",
    "cpu attention=flash": "'flash' is not one of sdpa, matmul, nki",
    "cpu text_buckets=128;256": "'128;256' is not whole numbers above 0 with commas between them",
    "cpu text_buckets=128,256": "the last of text_buckets must be 1024, the longest prompt",
    "cpu lnc=4": "lnc is 1 or 2, got 4",
    "cpu device=neuron": "device=neuron needs compile_backend=neuron, got export",
    "cpu backend=nxd": "backend=nxd needs a Neuron profile",
    "cpu attention=nki": "attention=nki needs a Neuron profile",
    "cpu vae_tile=65": "vae_tile is a multiple of",  # tiles that ltx-core would not take
    "cpu vae_overlap=768": "vae_overlap is a multiple of",
    "cpu vae_tile_frames=8": "vae_tile_frames is a multiple of",
    "cpu vae_overlap_frames=4": "vae_overlap_frames is a multiple of",
    "trn2.48xlarge context_parallel=3": "groups of 1, 2, 4, 8 or 16 chips. Type one of these",
    "trn2.48xlarge context_parallel=4 lnc=1": "context_parallel=4 needs lnc=2",
    "trn2.3xlarge context_parallel=2": "a trn2.3xlarge has one. Type context_parallel=1, or --profile trn2.48xlarge",
    "trn3 context_parallel=4": "a trn3 has one. Type context_parallel=1, or --profile-set chips=N",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_profile_or_setting_is_an_error_that_says_what_is_wanted(words):
    name, *settings = words.split()
    with pytest.raises(UserError, match=re.escape(WRONG[words])) as error:
        resolve(name, tuple(settings))
    assert "--profile" in str(error.value)
    if "48xlarge" in name:
        assert resolve("cpu", tuple(settings)).context_parallel > 1  # any number there


OLD, NEW, NXD = {"torch-neuronx": "2.9.0.2.15"}, {"torch-neuronx": "2.14.3.0"}, {"neuronx-distributed": "0.19"}
TORCHNEURON = "TorchNeuron (torch-neuronx 2.13 or later)"


def test_what_a_backend_runs_on_is_looked_for_before_anything_loads(monkeypatch):
    for words, packages, message in (  # None: it is there
        ("trn2.3xlarge", {}, f"needs {TORCHNEURON} or NxD (neuronx-distributed 0.16 or later), found neither"),
        ("trn2.3xlarge", NXD, None),
        # The public index has an empty package of this name.
        ("trn2.3xlarge", {"neuronx-distributed": "0.1"}, "found neuronx-distributed 0.1"),
        ("trn3", NEW, None),
        ("trn2.3xlarge backend=nxd", NEW, "needs NxD ("),
        ("trn2.48xlarge-g4", {}, f"needs {TORCHNEURON}, found neither"),
        ("trn2.3xlarge backend=torchdist", NXD, f"needs {TORCHNEURON}, found neuronx-distributed 0.19"),
        ("trn2.48xlarge backend=torchdist", OLD, "found torch-neuronx 2.9.0.2.15"),
        ("trn2.48xlarge backend=torchdist", {"torch-neuronx": "2.13.3.0"}, None),
        ("cuda", {}, "needs 1 GPUs that PyTorch can use, found 0"),
    ):
        monkeypatch.setattr(profiles, "package_version", packages.get)
        name, *settings = words.split()
        profile = resolve(name, tuple(settings))
        with pytest.raises(UserError, match=re.escape(message)) if message else nullcontext() as error:
            require_runtime(profile, profile.tp, Machine())
        assert error is None or "nstall" in str(error.value), words


@pytest.mark.parametrize("packages, chosen", [({}, "torchdist"), (OLD | NXD, "nxd"), (NEW | NXD, "torchdist")])
def test_a_neuron_profiles_backend_is_that_of_the_newest_installed_stack(monkeypatch, packages, chosen):
    monkeypatch.setattr(profiles, "package_version", packages.get)
    for name in ("trn2.3xlarge", "trn2.48xlarge", "trn2.48xlarge-cp4", "trn3"):
        assert resolve(name).backend == resolve(name, ("backend=auto",)).backend == chosen
        assert [resolve(name, (f"backend={x}",)).backend for x in ("nxd", "torchdist")] == ["nxd", "torchdist"]
    for name in ("cpu", "cuda", "trn2.48xlarge-g4", "trn2.48xlarge-g4cp4"):
        assert resolve(name).backend == "torchdist"


def test_more_ranks_than_the_machine_has_are_refused():
    with pytest.raises(UserError, match=r"16 ranks need 16 logical cores, trn2\.3xlarge has 4 \(LNC=2\)"):
        require_runtime(PROFILES["trn2.3xlarge"], 16)
    with pytest.raises(UserError, match="needs 2 GPUs that PyTorch can use, found 1"):
        require_runtime(PROFILES["cuda"], 2, Machine("", 0, 1))
    wanted = "tp-degree 4 x context_parallel 4 x guidance_parallel 5: 80 ranks .* has 64"
    with pytest.raises(UserError, match=f"{wanted} .*\nTogether at most 64"):
        resolve("trn2.48xlarge-g4cp4", ("guidance_parallel=5",)).check_cores(4)


def test_a_layouts_profile_is_the_machines_but_for_the_chips_of_a_clip():
    differing = ("name", "blocks_per_graph", "context_parallel", "guidance_parallel", "backend")
    for end, ranks, blocks_per_graph in (("cp4", 16, 16), ("cp8", 32, 32), ("g4", 16, 4), ("g4cp4", 64, 16)):
        profile = PROFILES[f"trn2.48xlarge-{end}"]
        profile.check_cores(4)
        assert (profile.cores_needed(4), profile.blocks_per_graph) == (ranks, blocks_per_graph)
        assert replace(profile, **{field: getattr(LARGE, field) for field in differing}) == LARGE
        # A process with NxD drives one group's cores.
        assert profile.backend == ("auto" if profile.guidance_parallel == 1 else "torchdist")


# A row or a column of the 4 x 4 torus, of which a block's chips are one, two neighbours or all.
ARCS = [{n} for n in range(4)] + [{n, (n + 1) % 4} for n in range(4)] + [{*range(4)}]
BLOCKS = [{4 * row + column for row, column in product(*arcs)} for arcs in product(ARCS, ARCS)]


def connected(cores: list[int]) -> bool:
    """Whether the torus connects logical cores, of which a chip has 4: vllm-omni-neuron's rule."""
    chips = {core // 4 for core in cores}
    offsets = {core % 4 for core in cores}
    same = {*cores} == {4 * chip + offset for chip in chips for offset in offsets}
    return chips in BLOCKS and same


def test_a_launch_is_let_through_if_the_torus_connects_every_group_of_its_ranks(monkeypatch):
    """At every first core that is a multiple of a world's ranks, up to a row."""
    accepted = set()
    for tp, cp, guidance in product((1, 4, 8, 16, 32), (1, 2, 4, 8, 16), (1, 2, 4)):
        settings = [f"context_parallel={cp}", "backend=torchdist", f"guidance_parallel={guidance}"]
        layout = replace(resolve("trn2.48xlarge"), context_parallel=cp, guidance_parallel=guidance)
        needed, size = layout.cores_needed(tp), layout.world_size(tp)
        groups = [[*range(size)], *(ranks for part in mesh.groups(layout, tp).values() for ranks in part)]
        for first in range(65 - needed):  # none if it needs more than 64
            worlds = range(first, first + needed, size)
            right = all(connected([world + rank for rank in ranks]) for world in worlds for ranks in groups)
            monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", f"{first}-{first + needed - 1}")
            try:
                resolve("trn2.48xlarge", tuple(settings)).check_degree(tp)
                environment.cores(layout, tp)
            except UserError:
                assert not (right and first % min(size, 16) == 0), (tp, cp, guidance, first)
            else:
                assert right, (tp, cp, guidance, first)
                accepted.add((tp, cp))
    assert accepted >= {(4, cp) for cp in (1, 2, 4, 8, 16)} | {(16, 4)}


def test_groups_that_are_no_rows_of_chips_are_refused_in_context_parallelism_on_a_torus(monkeypatch):
    for tp in (8, 32):  # the ranks with the same heads are on every second chip, or in every second row
        with pytest.raises(UserError, match=f"tp-degree {tp} x context_parallel 2: .*\nType --tp-degree 1, 4 or 16, "):
            resolve("trn2.48xlarge", ("context_parallel=2",)).check_degree(tp)
        LARGE.check_degree(tp)  # alone they are a pair of chips, or two rows
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "8-23")
    wanted = "'8-23': 16 ranks begin at a multiple of 16 cores, .*\nType: export .*_CORES=0-15"
    with pytest.raises(UserError, match=wanted):
        environment.cores(resolve("trn2.48xlarge-cp4"), 4)
    switched = replace(resolve("trn2.48xlarge"), chip=replace(TRAINIUM2, torus_row=0), context_parallel=4)
    switched.check_degree(8)
    assert environment.cores(switched, 4) == [*range(8, 24)]
