"""The end of a step of delayed scaling: the kernel against torch, bit for bit, for histories of any length."""

import pytest
import torch

from recipes.casts.amax_history import STATES, EndOfStep, end_step_ref, end_step_triton, end_steps

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered in divide:RuntimeWarning"),
]

LARGEST = 448.0 / 8


def state(length: int, num_scales: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """A history with zeros, subnormal and huge numbers, Inf and NaN in any slot, and scales."""
    history = torch.randn(length, num_scales).abs() * 2.0 ** torch.randint(-140, 120, (length, num_scales))
    for special in (0.0, float("inf"), float("nan"), 2.0**-149):
        history[torch.rand(length, num_scales) < 0.5 / max(length, 4)] = special
    history[0, torch.rand(num_scales) < 0.2] = 0.0
    return history.to(device), torch.rand(num_scales).add(0.5).to(device)


def check(length: int, num_scales: int, most_recent: bool, device: str) -> None:
    history, scale = state(length, num_scales, device)
    theirs = history.clone(), scale.clone()
    end_step_triton((history,), (scale,), LARGEST, most_recent)
    end_step_ref(*theirs, LARGEST, "most_recent" if most_recent else "max")
    torch.testing.assert_close(history, theirs[0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(scale, theirs[1], rtol=0, atol=0)


def check_many(count: int, device: str) -> None:
    """States alike in one launch, of which each program changes its own."""
    states = [state(5, 20, device) for _ in range(count)]
    versions = [tensor._version for pair in states for tensor in pair]
    theirs = [(history.clone(), scale.clone()) for history, scale in states]
    histories, scales = zip(*states, strict=True)
    end_step_triton(histories, scales, LARGEST, False)
    for mine, other in zip(states, theirs, strict=True):
        end_step_ref(*other, LARGEST, "max")
        torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)
    assert [tensor._version for pair in states for tensor in pair] == [version + 1 for version in versions]


@pytest.mark.interpreter
@pytest.mark.parametrize("count", [2, 3, 7, STATES])
def test_states_alike_interpreted(count):
    check_many(count, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 3, 7, STATES])
def test_states_alike(count):
    check_many(count, "cuda")


@pytest.mark.gpu
def test_states_of_all_kinds_on_a_gpu():
    """More than a launch takes, of several shapes, formats and algorithms, and one that calls a function."""
    ends, theirs = [], []
    for at in range(50):
        history, scale = state(1 + 3 * (at % 2), 5 + at % 3, "cuda")
        about = (LARGEST * (1 + at % 2), "max" if at % 5 else "most_recent", (lambda a, s: s / 2) if at == 7 else None)
        ends.append(EndOfStep(history, scale, *about))
        theirs.append(EndOfStep(history.clone(), scale.clone(), *about))
    for _ in range(4):  # repeated from the third on
        end_steps(ends)
        for mine, other in zip(ends, theirs, strict=True):
            end_step_ref(*other)
            torch.testing.assert_close(mine[:2], other[:2], rtol=0, atol=0, equal_nan=True)
            mine.history[0] = other.history[0] = 1.5


@pytest.mark.launches("end_step_kernel")
@pytest.mark.interpreter
@pytest.mark.parametrize("most_recent", [False, True], ids=["max", "most_recent"])
@pytest.mark.parametrize("num_scales", [1, 16, 33])
@pytest.mark.parametrize("length", [1, 2, 3, 256, 257, 700])
def test_kernel_equals_the_reference_interpreted(length, num_scales, most_recent):
    check(length, num_scales, most_recent, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("most_recent", [False, True], ids=["max", "most_recent"])
@pytest.mark.parametrize("num_scales", [1, 16, 33, 256])
@pytest.mark.parametrize("length", [1, 2, 16, 257, 1024, 1500])
def test_kernel_equals_the_reference(length, num_scales, most_recent):
    for _ in range(5):
        check(length, num_scales, most_recent, "cuda")


NAN, INF = float("nan"), float("inf")
KEPT = 3.0  # the first scale, which an unusable amax leaves

# One column: the amaxes of steps, and the scales after them, for a largest number of 448.
SEQUENCES = [
    pytest.param("max", 2, [8.0, 0.25, 0.0], [56.0, 56.0, 56.0], id="a-step-of-0-changes-nothing"),
    pytest.param("max", 2, [8.0, 0.25, 0.0, 0.5], [56.0, 56.0, 56.0, 896.0], id="a-step-of-0-does-not-roll"),
    pytest.param("most_recent", 2, [8.0, 0.0, 4.0], [56.0, 56.0, 112.0], id="most-recent-a-step-of-0"),
    pytest.param("max", 2, [8.0, NAN, 2.0, 1.0], [56.0, 56.0, 224.0, 224.0], id="max-skips-NaN-which-rolls"),
    pytest.param("max", 2, [NAN, 4.0], [KEPT, 112.0], id="nothing-but-NaN-keeps"),
    pytest.param("most_recent", 2, [8.0, NAN, 4.0], [56.0, 56.0, 112.0], id="most-recent-NaN-keeps"),
    pytest.param("max", 2, [8.0, INF, 4.0, 2.0], [56.0, 56.0, 56.0, 112.0], id="Inf-keeps-until-it-has-left"),
    pytest.param("max", 2, [8.0, INF, 0.0, 4.0], [56.0, 56.0, 56.0, 56.0], id="Inf-does-not-leave-by-a-step-of-0"),
    pytest.param("max", 1, [8.0, 0.0, NAN, INF, 4.0], [56.0, 56.0, 56.0, 56.0, 112.0], id="max-of-1"),
    pytest.param("most_recent", 1, [8.0, 0.0, NAN, INF, 4.0], [56.0, 56.0, 56.0, 56.0, 112.0], id="most-recent-of-1"),
]


def scales_after(end, algorithm: str, length: int, amaxes: list[float], device: str) -> list[float]:
    """Of the middle one of three columns, whose neighbours have amaxes of their own."""
    history, scale = torch.zeros(length, 3, device=device), torch.full((3,), KEPT, device=device)
    scales = []
    for step, amax in enumerate(amaxes):
        history[0] = torch.tensor([1.0 + step, amax, 7.0], device=device)
        end(history, scale, 448.0, algorithm)
        scales.append(scale[1].item())
        assert history[0].tolist() == [0.0, 0.0, 0.0]
    return scales


def by_the_kernel(history, scale, largest, algorithm):
    end_step_triton((history,), (scale,), largest, algorithm == "most_recent")


@pytest.mark.parametrize("algorithm, length, amaxes, scales", SEQUENCES)
def test_scales_of_worked_sequences(algorithm, length, amaxes, scales):
    assert scales_after(end_step_ref, algorithm, length, amaxes, "cpu") == scales


@pytest.mark.interpreter
@pytest.mark.parametrize("algorithm, length, amaxes, scales", SEQUENCES)
def test_scales_of_worked_sequences_interpreted(algorithm, length, amaxes, scales):
    assert scales_after(by_the_kernel, algorithm, length, amaxes, "cpu") == scales


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm, length, amaxes, scales", SEQUENCES)
def test_scales_of_worked_sequences_by_the_kernel(algorithm, length, amaxes, scales):
    assert scales_after(by_the_kernel, algorithm, length, amaxes, "cuda") == scales


def test_algorithms_are_equal_for_a_history_of_one():
    for seed in range(20):
        torch.manual_seed(seed)
        history, scale = state(1, 64)
        other = history.clone(), scale.clone()
        end_step_ref(history, scale, LARGEST, "max")
        end_step_ref(*other, LARGEST, "most_recent")
        assert torch.equal(scale, other[1]) and torch.equal(history, other[0])


def test_a_function_decides_also_where_the_step_met_nothing():
    """As TransformerEngine calls a user's function: it sees the whole history, whatever this step's amax is."""
    history, scale = torch.tensor([[0.0], [4.0]]), torch.ones(1)
    end_steps([EndOfStep(history, scale, 448.0, lambda h: h.amax(0))])
    assert scale.item() == 112.0 and history.tolist() == [[0.0], [4.0]]


def test_a_function_decides_in_place_of_the_formulas():
    history, scale = torch.tensor([[2.0], [6.0]]), torch.ones(1)
    end_steps([EndOfStep(history, scale, LARGEST, lambda h: h.mean(0))])
    assert scale.item() == LARGEST / 4 and history.tolist() == [[0.0], [2.0]]
