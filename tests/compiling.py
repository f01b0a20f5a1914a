"""The environment of a process that compiles kernels."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def compiling(cache: Path | str) -> dict[str, str]:
    """That of this process, its Triton included, but no interpreter, a cache of its own, and one thread.

    cache: a folder, or the name of one in `build/compiled` that stays, and that several tests share
    """
    cache = ROOT / "build" / "compiled" / cache
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return environment | {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
