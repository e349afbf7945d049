"""A script that kills itself (-9) where one of its files gets its name: the one after SKIP others
in FOLDER, at "before" or "after" that; it leaves the file's name in FOLDER.killed.

    killed.py FOLDER SKIP WHEN SCRIPT [flags]
"""

import os
import runpy
import signal
import sys
from pathlib import Path


def main() -> None:
    folder, skip, when, *sys.argv = sys.argv[1:]
    replace, seen = Path.replace, []

    def named(partial: Path, path: Path) -> Path:
        here = Path(path).parent == Path(folder)
        seen.extend([path] * here)
        if not here or len(seen) <= int(skip):
            return replace(partial, path)
        if when == "after":
            replace(partial, path)
        Path(f"{folder}.killed").write_text(Path(path).name)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("it lives")

    Path.replace = named
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
