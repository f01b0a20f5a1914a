"""A few of all combinations of values, in which every two values that meet anywhere still meet.

Most defects that take a combination take one of two values. `make test` runs such a choice of the cases of a test that
is marked `pairwise`, and `make test-rest` the others: of one marked `pairwise(rest=3)`, whose cases take long, as many
as every three values need, and `make test-exhaustive` those that are left. Of `pairwise(first=1)`, whose cases take
long too, `make test` runs as many as every value needs.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest


def rest(*values: Any, id: str | None = None) -> Any:
    """A parameter whose cases run in `make test-rest` alone."""
    return pytest.param(*values, id=id, marks=pytest.mark.rest)


def exhaustive(*values: Any, id: str | None = None) -> Any:
    """A parameter whose cases run in `make test-exhaustive` alone."""
    return pytest.param(*values, id=id, marks=pytest.mark.exhaustive)


def cover(rows: Sequence[Mapping[str, Hashable]], size: int = 2) -> list[int]:
    """Positions, ascending, of rows that have every pair of values that any row has, or every `size` of them; of fewer
    names, all.

    rows: {name: value}, all with the same names. Greedy: each time the row with the most pairs that are not covered yet
    and of these the first, so that the same rows give the same choice. Three names of two values: 4 of the 8 rows.
    """
    missing = [set(combinations(row.items(), min(size, len(row)))) for row in rows]
    chosen = []
    while any(missing):
        best = max(range(len(rows)), key=lambda position: len(missing[position]))
        covered = set(missing[best])
        for pairs in missing:
            pairs -= covered
        chosen.append(best)
    return sorted(chosen)


def leave_to_rest(items: Iterable[Any]) -> None:
    """Mark as `rest` what the choice leaves out of each test marked `pairwise`, and as `exhaustive` what the rest does.

    Cases for a GPU are no part of it.
    """
    tests = defaultdict(list)
    for item in items:
        if item.get_closest_marker("pairwise") and not item.get_closest_marker("gpu"):
            tests[item.path, item.originalname].append(item)
    for cases in tests.values():
        rows = [dict(_values(case.callspec.params)) for case in cases]
        mark = cases[0].get_closest_marker("pairwise")
        assert mark is not None, "they were chosen by it"
        first = cover(rows, mark.kwargs.get("first", 2))
        rest = cover(rows, mark.kwargs["rest"]) if "rest" in mark.kwargs else range(len(rows))
        for position in set(range(len(rows))).difference(first):
            cases[position].add_marker(pytest.mark.rest if position in rest else pytest.mark.exhaustive)


def _values(params: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """(name, identity of the value) of each parameter, and of each entry of one that is a dict.

    A value is the same object in each case, and need not be hashable.
    """
    for name, value in params.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", id(entry)) for key, entry in value.items())
        else:
            yield name, id(value)
