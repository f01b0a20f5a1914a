"""Which cases of a test marked `pairwise` run in `make test`: every pair of values in one of them, and no case lost."""

from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pairwise import cover, leave_to_rest


def all_rows(*sizes):
    return [dict(zip("abcdef", values, strict=False)) for values in product(*map(range, sizes))]


def tuples(rows, size):
    return {values for row in rows for values in combinations(row.items(), size)}


@given(sizes=st.lists(st.integers(1, 4), min_size=3, max_size=4), size=st.sampled_from([1, 2, 3]), data=st.data())
def test_every_pair_of_any_rows_is_covered_and_always_by_the_same(sizes, size, data):
    rows = data.draw(st.lists(st.sampled_from(all_rows(*sizes)), unique_by=lambda row: tuple(row.values())))
    chosen = cover(rows, size)
    assert tuples((rows[position] for position in chosen), size) == tuples(rows, size)
    assert chosen == sorted(set(chosen)) == cover(rows, size)


@pytest.mark.parametrize(
    ("sizes", "most"),
    [((2, 2), 4), ((2, 2, 2), 4), ((31, 4, 4), 128), ((2,) * 6, 10), ((5,), 5), ((0,), 0)],
    ids=["two names are all", "half of three names", "the longest two", "ten of 64", "one name", "no rows"],
)
def test_few_rows_are_enough(sizes, most):
    assert len(cover(all_rows(*sizes))) <= most


def fake(path, name, params, *marks, **of_marks):
    marks = dict.fromkeys(marks, SimpleNamespace(kwargs=of_marks))
    return SimpleNamespace(
        path=Path(path), originalname=name, callspec=SimpleNamespace(params=params), get_closest_marker=marks.get,
        add_marker=lambda mark: marks.update({mark.name: mark}), marks=marks,
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


def test_what_the_rest_leaves_out_is_exhaustive():
    cases = [fake("a.py", "test", row, "pairwise", rest=3) for row in all_rows(2, 2, 2, 2)]
    leave_to_rest(cases)
    kept, rest, exhaustive = (
        [case.callspec.params for case in cases if ("rest" in case.marks, "exhaustive" in case.marks) == marks]
        for marks in ((False, False), (True, False), (False, True))
    )
    assert rest and exhaustive and len(kept) + len(rest) + len(exhaustive) == 16
    every = all_rows(2, 2, 2, 2)
    assert tuples(kept, 2) == tuples(every, 2)
    assert tuples(kept + rest, 3) == tuples(every, 3)


def test_of_first_1_each_value_comes_first_and_each_pair_in_the_rest():
    cases = [fake("a.py", "test", row, "pairwise", first=1, rest=2) for row in all_rows(3, 3, 3)]
    leave_to_rest(cases)
    kept = [case.callspec.params for case in cases if not {"rest", "exhaustive"} & case.marks.keys()]
    run = [case.callspec.params for case in cases if "exhaustive" not in case.marks]
    assert len(kept) == 3 and tuples(kept, 1) == tuples(all_rows(3, 3, 3), 1)
    assert len(run) < 27 and tuples(run, 2) == tuples(all_rows(3, 3, 3), 2)
