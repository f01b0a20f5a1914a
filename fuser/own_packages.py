"""Importing it checks that `recipes`, `ops` and `fused` are the packages beside `fuser`, not others of these names."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]


def check(name: str) -> None:
    """Raise ImportError if `import name` gives another package than that beside `fuser`."""
    spec = find_spec(name)
    places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or ())]
    found = next(filter(None, places), "nothing")
    wanted = HERE / name / "__init__.py"
    if Path(found).resolve() != wanted:
        raise ImportError(
            f"fuser needs its own package {name!r}, {wanted}, but `import {name}` finds {found}: rename that one, or "
            "take its folder from the beginning of sys.path."
        )


for _name in ("recipes", "ops", "fused"):
    check(_name)
