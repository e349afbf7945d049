"""Kernels that numba compiled, kept on disk until the source of any kernel changes.

numba keeps what it compiled of a function until the function's own file changes, with what was
inlined from others: after an update of those alone it would run the old instructions, maybe on
memory that is laid out anew. So what is kept is named by the sources of all kernels.
"""

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path


@cache
def sources_digest() -> str:
    """Of the files beside this one that kernels are written in."""
    texts = (path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return hashlib.sha256(b"".join(text for text in texts if b"numba" in text)).hexdigest()[:12]


def compile_or_load(compiler: Callable, function: Callable) -> Callable:
    """What the compiler, which takes `cache`, makes of a function, or made of it before."""
    function.__qualname__ += f"_{sources_digest()}"  # a part of the name of what numba keeps
    try:
        return compiler(cache=True)(function)
    except RuntimeError:  # neither this file's folder nor the user's for caches can be written
        return compiler()(function)
