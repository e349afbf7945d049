"""Fixtures every test may use."""

import gc
import hashlib
import json
import os
import pickle
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import warm_python

pytest_plugins = ["tiers"]

ROOT = Path(__file__).resolve().parents[1]
# Scripts that tests start import this checkout, whatever is installed, and its tools.
_PATHS = [str(ROOT / "src"), str(ROOT / "tools"), os.environ.get("PYTHONPATH")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _PATHS))
# ATEN_CPU_CAPABILITY stands for an older CPU. oneDNN must see the same one: PyTorch's attention in bf16 otherwise finds
# AMX there, and then has no AVX-512 to pack its operands with.
if os.environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2"):
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")

# How many examples hypothesis draws: HYPOTHESIS_PROFILE=large, or --hypothesis-profile=large. In CI they are the same
# ones each time. It is not there where the SDK's tests run alone.
if find_spec("hypothesis"):
    from hypothesis import settings

    for profile, examples in {"small": 50, "large": 5000}.items():
        settings.register_profile(profile, max_examples=examples, deadline=None, derandomize="CI" in os.environ)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "small"))

# Settings of a profile with which less is exported, and ranks load sooner; the bits are the same.
QUICK = "blocks_per_graph=1", "text_buckets=128,1024"
SCRIPT_SECONDS = 300  # the longest a script may take; the slowest takes a tenth of it on two cores


def needs(*packages: str, extras: str) -> None:
    """Skip a test file where a package is not installed, without importing it: Ray, the client of OpenAI and Playwright
    take seconds, and a run of other files collects this one too."""
    if not all(map(find_spec, packages)):
        pytest.skip(f"an extra is not installed: pip install -e .[{extras}]", allow_module_level=True)


def pytest_configure() -> None:
    """Commands that a script starts with & ignore SIGINT, and so do their children. Tests interrupt themselves and the
    commands that they start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """A quarter of an export's time is looking for garbage: among what is imported by now, and too often."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(scope="session")
def shared(tmp_path_factory) -> Path:
    """A folder of the session's, the same one in all of its workers."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def tiny(shared):
    """Paths of one set of tiny assets, made once; tests must not change the files."""
    from tiny import make_tiny

    return once(shared / "tiny", make_tiny)


@pytest.fixture(scope="session")
def split(shared):
    """Paths of one set of tiny assets of LTX-2.5; tests must not change the files."""
    from tiny.split import make_split

    return once(shared / "split", make_split)


@pytest.fixture(scope="session")
def artifacts(shared) -> Path:
    """The artifacts folder of tests whose subject is not what lies in one: they find what others of any worker make.
    Prompts that a test wants to be encoded are its own."""
    return shared / "artifacts"


@pytest.fixture(scope="session")
def media(shared) -> Path:
    """A folder of videos, a picture and a sound (golden_jobs.make_media)."""
    from golden_jobs import make_media

    return once(shared / "media", make_media)


@pytest.fixture
def small_disk(tmp_path):
    """The folder of a file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("NO FULL DISK WAS TESTED: a small file system can be mounted by root alone")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture(scope="session")
def ffmpeg(shared) -> Path:
    """A folder for PATH with the program ffmpeg of a wheel, which runs the commands that errors print."""
    try:
        from imageio_ffmpeg import get_ffmpeg_exe

        program = get_ffmpeg_exe()
    except (ImportError, RuntimeError):  # no wheel, or one without a program
        pytest.skip("NO PRINTED ffmpeg COMMAND WAS RUN: pip install -e .[dev], on Linux x86-64")

    (shared / "ffmpeg").mkdir(exist_ok=True)
    once(shared / "ffmpeg/ffmpeg", lambda path: path.symlink_to(program))
    return shared / "ffmpeg"


@pytest.fixture(scope="session")
def scripts(shared):
    """scripts(assets, tp, dtype) returns a Setup, the same one for the same arguments. All share one artifacts folder,
    with those of other workers. It is not the one of `artifacts`: a service offers all sizes that it finds."""

    @cache
    def setup(assets, tp: int = 4, dtype: str = "float32") -> Setup:
        return Setup(shared / "scripts", assets, tp, dtype)

    return setup


def once(path: Path, make: Callable):
    """What make(path) returns, made by the first worker of the session that asks for it."""
    from ltx_neuron.files import exclusive

    done = path.with_name(f"{path.name}.made")
    with exclusive(path, "making"):
        if not done.is_file():
            done.write_bytes(pickle.dumps(make(path)))
        return pickle.loads(done.read_bytes())


class Setup:
    """The five scripts on one set of assets, each in its own process. Flags are keywords, see `words`. The same call is
    made once in a session, whichever worker makes it. settings: of every script's profile; four ranks run it as it is.
    """

    def __init__(self, shared: Path, assets, tp: int, dtype: str):
        self.folder, self.assets, self.tp, self.dtype = shared, assets, tp, dtype
        self.artifacts = shared / "artifacts"
        self.settings = () if tp == 4 else QUICK

    def words(self, gemma: bool = True, **flags) -> list[str]:
        """The command line of a script on these assets, behind its name."""
        more = flags.get("profile_set", ())
        flags |= {"checkpoint_path": self.assets.checkpoint, "artifacts_dir": self.artifacts}
        flags |= {"tp_degree": self.tp, "dtype": self.dtype, "profile": flags.get("profile", "cpu")}
        flags["profile_set"] = *self.settings, *((more,) if isinstance(more, str) else more)
        return words(**flags | ({"gemma_root": self.assets.gemma_root} if gemma else {}))

    def command(self, script: str, gemma: bool = True, **flags) -> list[str]:
        return [str(ROOT / script), *self.words(gemma, **flags)]

    def run(self, script: str, gemma: bool = True, **flags) -> subprocess.CompletedProcess:
        """One script in its own process, whatever its exit code."""
        return warm_python.run(self.command(script, gemma, **flags), ROOT, SCRIPT_SECONDS)

    def prepare(self, **size) -> None:
        """Shard both models and compile both, the transformer for a size. Two at a time: they need one core each."""
        text = [("shards/shard_gemma3_weights.py", {}), ("compile/compile_gemma3.py", {})]
        transformer = [("compile/compile_transformer.py", size), ("shards/shard_backbone_weights.py", {})]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self._run_all, (text, transformer), (True, False)))

    def _run_all(self, calls: list, gemma: bool) -> None:
        for script, flags in calls:
            run = partial(self.run, script, gemma, **flags)
            once(self._folder_of(script, **flags), lambda _, run=run: succeeded(run()))

    def _folder_of(self, script: str, **flags) -> Path:
        call = script, *words(**flags), self.assets.checkpoint, self.tp, self.dtype
        return self.folder / "runs" / hashlib.sha256(str(call).encode()).hexdigest()[:16]

    def generate(self, **flags) -> SimpleNamespace:
        """Run generate_ltx23.py and read what it wrote."""
        from safetensors.torch import load_file

        script, upsampler = "src/generate_ltx23.py", self.assets.spatial_upsampler
        out = self._folder_of(script, **flags)
        files = dict(output_path=out / "video.mp4", save_tensors=out / "tensors", perf_dump_path=out / "perf.json")
        once(out, lambda _: succeeded(self.run(script, spatial_upsampler_path=upsampler, **flags, **files)))
        tensors, perf = load_file(files["save_tensors"]), json.loads(files["perf_dump_path"].read_text())
        return SimpleNamespace(tensors=tensors, perf=perf, video=files["output_path"])


def words(**flags) -> list[str]:
    """Keywords as command-line words: num_frames=17 is --num-frames 17, True is the flag alone, None and False no flag,
    a tuple the flag once for each: image=((path, 0), (path, 8)) is --image twice."""
    command_line = []
    for name, values in flags.items():
        for value in values if isinstance(values, tuple) else (values,):
            arguments = () if value is True else value if isinstance(value, tuple) else (value,)
            if value is not None and value is not False:
                command_line += ["--" + name.replace("_", "-"), *map(str, arguments)]
    return command_line


def succeeded(process: subprocess.CompletedProcess) -> subprocess.CompletedProcess:
    said = f"{process.stdout[-2000:]}\n{process.stderr[-4000:]}"
    assert process.returncode == 0, f"{' '.join(process.args)}\nexit code {process.returncode}\n{said}"
    return process
