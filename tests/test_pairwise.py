"""Which cases of a test marked `pairwise` run in `make test`: every pair of values in one of them, and no case lost."""

from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pairwise import cover_pairs, leave_to_rest


def all_rows(*sizes):
    return [dict(zip("abcdef", values, strict=False)) for values in product(*map(range, sizes))]


def pairs(rows):
    return {pair for row in rows for pair in combinations(row.items(), 2)}


@given(sizes=st.lists(st.integers(1, 4), min_size=2, max_size=4), data=st.data())
def test_every_pair_of_any_rows_is_covered_and_always_by_the_same(sizes, data):
    rows = data.draw(st.lists(st.sampled_from(all_rows(*sizes)), unique_by=lambda row: tuple(row.values())))
    chosen = cover_pairs(rows)
    assert pairs(rows[position] for position in chosen) == pairs(rows)
    assert chosen == sorted(set(chosen)) == cover_pairs(rows)


@pytest.mark.parametrize(
    ("sizes", "most"),
    [((2, 2), 4), ((2, 2, 2), 4), ((31, 4, 4), 128), ((2,) * 6, 10), ((5,), 5), ((0,), 0)],
    ids=["two names are all", "half of three names", "the longest two", "ten of 64", "one name", "no rows"],
)
def test_few_rows_are_enough(sizes, most):
    assert len(cover_pairs(all_rows(*sizes))) <= most


def fake(path, name, params, *marks):
    marks = set(marks)
    return SimpleNamespace(
        path=Path(path), originalname=name, callspec=SimpleNamespace(params=params),
        get_closest_marker=lambda name: name in marks, add_marker=lambda mark: marks.add(mark.name), marks=marks,
    )  # fmt: skip


def test_each_marked_test_has_its_own_choice_and_others_stay_whole():
    values = [["unhashable"], None], ["x", "y"], [1.0, 0.0]
    rows = [dict(zip("abc", given, strict=True)) for given in product(*values)]
    one, other, gpu, whole = (
        [fake(path, name, row, *marks) for row in rows]
        for path, name, marks in (
            ("a.py", "test_one", ["pairwise"]),
            ("b.py", "test_one", ["pairwise"]),
            ("a.py", "test_one", ["pairwise", "gpu"]),
            ("a.py", "test_whole", []),
        )
    )
    leave_to_rest([*one, *gpu, *other, *whole])
    left = [[position for position, case in enumerate(cases) if "rest" in case.marks] for cases in (one, other)]
    assert left == [[1, 2, 4, 7]] * 2
    assert not any("rest" in case.marks for case in (*gpu, *whole))


def test_a_dict_counts_by_its_entries():
    cases = [fake("a.py", "test", {"case": row}, "pairwise") for row in all_rows(2, 2, 2)]
    leave_to_rest(cases)
    assert sum("rest" in case.marks for case in cases) == 4
