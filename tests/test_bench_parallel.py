"""The benchmark of expert parallelism: what it measures on two ranks, and that it checks before it times."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bench import bench_parallel, parallel_ways
from bench.__main__ import main
from bench.bench_parallel import measure, rows_of_capacity
from bench.captured import ROUTINGS, require_same_bits
from bench.case import PASSES
from bench.device_events import DeviceEvent, seconds_of_steps
from bench.exchange import Transfers
from bench.link import BLOCK, LinkRates, copy, link_figures, link_line
from bench.models import SHAPES
from bench.parallel_report import Measured, figures, show, target_figures, targets
from bench.parallel_ways import CAPTURED, HAND, ONE, OURS, OVERLAP, OVERLAPPED, PARTIAL_SUMS, SYMMETRIC, TORCH
from bench.symmetric_transfers import BARRIER_KERNEL, bytes_over_link, slowest
from bench.timing import Timing
from bench.usage import UsageError
from tests.ranks import on_ranks, quietly
from tests.shared_memory import symmetric_on_cpu

ROOT = Path(__file__).parent.parent
MODEL, TOKENS = "tiny-mixtral-8x7b", 48
RATES = LinkRates(write=400e9, read=200e9, all_to_all_single=300e9)


def measure_on_a_rank(rank: int) -> None:
    torch.set_num_threads(1)
    found = measure(MODEL, "cpu", TOKENS, 2)
    ways = (ONE, OURS, OVERLAPPED, HAND, TORCH)
    assert [(one.passes, one.way) for one in found] == [(p, way) for p in PASSES for way in ways]
    records = figures(found)
    assert json.loads(json.dumps(records, allow_nan=False)) == json.loads(json.dumps(records))
    everywhere: list = [None, None]
    dist.all_gather_object(everywhere, [one.times.median for one in found])
    assert everywhere[0] == everywhere[1], "the times are those of the slowest rank, on all ranks"
    for one in found:
        assert one.tokens_per_s == pytest.approx(TOKENS / one.times.median)
        if one.way == ONE:
            assert one.share_in_transfer is None and one.of_one_rank == 1 and not one.sqnr
        else:
            assert one.share_in_transfer > 0 and one.bytes_sent > 0
            assert one.sqnr.keys() == {"y", "dx", "drouter", "dw1", "dw2"}
    ours, hand = (next(one for one in found if one.way == way) for way in (OURS, HAND))
    assert ours.sqnr["y"] == float("inf"), "the unsharded layer's bits"
    # each token has both experts, of which the other rank owns one: a row there, and one back
    row = 2 * SHAPES[MODEL].hidden
    assert 2 * TOKENS * row < hand.bytes_sent < 2 * TOKENS * row + TOKENS * 64


def count_what_partial_sums_send(rank: int) -> None:
    """All 8 experts on 2 ranks: of each token 4 rows come back from the other, or 1, or 1 in float32."""
    model = "tiny-qwen3-30b-a3b"
    measured = measure(model, "cpu", TOKENS, 1, tuple(PARTIAL_SUMS.values()))
    row = 2 * SHAPES[model].hidden
    for passes, transfers in zip(PASSES, (1, 2), strict=True):  # in backward the gradients of the rows
        found = {one.way: one.bytes_sent for one in measured if one.passes == passes}
        assert list(found)[-2:] == list(PARTIAL_SUMS)
        apart, wide, rounded = (found[way] for way in (OURS, *PARTIAL_SUMS))
        assert (apart - rounded, wide - rounded) == (3 * transfers * TOKENS * row, transfers * TOKENS * row)


def measure_recipes(rank: int) -> None:
    measured = measure(MODEL, "cpu", TOKENS, 1, recipes=("fp8_block", "mxfp8"))
    under = [f"{way}, {recipe}" for recipe in ("fp8_block", "mxfp8") for way in (ONE, OURS, OVERLAPPED)]
    for passes in PASSES:
        found = {one.way: one for one in measured if one.passes == passes}
        assert list(found) == [ONE, OURS, OVERLAPPED, HAND, TORCH, *under]
        for way in under:
            one = found[way]
            assert one.recipe == way.split(", ")[1]
            base = found[f"{ONE}, {one.recipe}"]
            assert one.of_one_rank == pytest.approx(base.times.median / one.times.median)
            if one is not base:
                assert 20 < one.sqnr["y"] < 45
                # forward sends codes where nobody needs gradients
                sent = found[way.split(", ")[0]].bytes_sent
                sends_codes = way.startswith(OURS) and passes == PASSES[0]
                assert one.bytes_sent < sent if sends_codes else one.bytes_sent == sent


def refuse_a_wrong_candidate(rank: int) -> None:
    exchanged = parallel_ways.exchanged_layer
    parallel_ways.exchanged_layer = lambda *a, **k: exchanged(*a, **k) * 1.02
    with pytest.raises(AssertionError, match=r"hand-written: y has 33\.\d dB against one rank, but must have 40"):
        measure(MODEL, "cpu", TOKENS, 1)


def repeat_transfers(rank: int) -> None:
    given, arrived = torch.arange(6.0).view(3, 2) + 10 * rank, torch.empty(3, 2)
    counts = [1, 2] if rank == 0 else [2, 1]  # of both, since each sends what the other receives

    def step() -> None:
        dist.all_to_all_single(arrived, given, counts, counts)

    transfers = Transfers.of(step)
    assert transfers.bytes_sent == 2 * 2 * 4
    expected: Tensor = arrived.clone()
    (exchange,) = transfers.exchanges
    transfers()
    assert torch.equal(exchange.output, expected) and dist.all_to_all_single.__module__.startswith("torch")


def all_on_a_rank(rank: int) -> None:
    measure_on_a_rank(rank)
    count_what_partial_sums_send(rank)
    measure_recipes(rank)
    repeat_transfers(rank)
    refuse_a_wrong_candidate(rank)


@pytest.mark.rest
def test_two_ranks_are_measured_and_checked(tmp_path):
    on_ranks(all_on_a_rank, folder=tmp_path)


def launched(step, repeats: int) -> list[DeviceEvent]:
    """What a profiler would see of `step`, which is run once."""
    step()
    names = ("push_kernel", BARRIER_KERNEL, "pull_kernel", "pull_sums_kernel")
    return [DeviceEvent(name, float(turn), 1e-3) for turn in range(repeats) for name in names]


def measure_symmetric(rank: int, folder: Path) -> None:
    """As on GPUs, but for captured steps, the profiler, and steps to warm up."""
    tokens, sums = 24, "partial sums, rounded"
    profiled = patch("bench.symmetric_transfers.device_events", launched)
    with quietly(), symmetric_on_cpu(folder), profiled, patch.object(bench_parallel, "WARMUP", 0):
        found = measure(MODEL, "cpu", tokens, 1, ("rounded",), ("mxfp8",), capacity="1.5x", rates=RATES)
    row = 2 * SHAPES[MODEL].hidden
    for passes, sent in zip(PASSES, (2 * tokens * row + 16 * tokens, 4 * tokens * row + 20 * tokens), strict=True):
        ways = {one.way: one for one in found if one.passes == passes}
        assert [use.name for use in ways[f"{SYMMETRIC}, {sums}"].symmetric.kernels][:2] == [
            "push_kernel", "pull_sums_kernel",
        ]  # fmt: skip
        for way in (SYMMETRIC, f"{SYMMETRIC}, mxfp8"):
            # without gradients codes are sent, with a scale for each 32 of them, in multiples of 16 bytes
            saved = tokens * (row - (row // 2 + 16)) if way != SYMMETRIC and passes == PASSES[0] else 0
            assert ways[way].bytes_sent == sent - saved, "each token has an expert on the other rank"
            assert ways[way].transfers.median == pytest.approx(2e-3)
            assert ways[way].sqnr["y"] > (40 if way == SYMMETRIC else 20)
        assert ways[OVERLAP].bytes_sent == sent and ways[OURS].symmetric is None and ways[OURS].bytes_sent > 0
    assert len(targets(found)) == 6


@pytest.mark.interpreter
@pytest.mark.exhaustive
@pytest.mark.slow
def test_symmetric_is_measured_with_its_transfers_and_under_recipes(tmp_path):
    on_ranks(measure_symmetric, tmp_path, folder=tmp_path)


@pytest.mark.interpreter
def test_a_plain_copy_copies():
    given, to = torch.arange(2.0 * BLOCK).bfloat16(), torch.zeros(2 * BLOCK, dtype=torch.bfloat16)
    copy(given, to)
    assert torch.equal(given, to)


def test_a_token_crosses_the_link_once_a_rank_and_its_rows_return_apart():
    # 3 ranks of 2 experts; of rank 1's tokens the first has experts on ranks 0, 0, 2, the second on 1, 1, 1
    indices = torch.tensor([[0, 1, 4], [2, 3, 2], [5, 2, 4]])
    x = torch.zeros(16, dtype=torch.bfloat16)
    tokens, pairs, row = 3, 5, 32

    def sent(passes: str, sums: str | None = None) -> tuple[int, ...]:
        return tuple(bytes_over_link(indices, 1, 3, 6, x, passes, pushed[passes], sums).values())

    forward, both = PASSES
    pushed = {forward: [row], both: [row, row]}
    assert list(bytes_over_link(indices, 1, 3, 6, x, forward, [row])) == ["push_kernel", "pull_kernel"]
    # with the first row of a token go its three slots
    assert sent(forward) == (tokens * (row + 12) + pairs * 8, pairs * row)
    assert sent(both) == (tokens * (2 * row + 12) + pairs * 8, 2 * pairs * row + pairs * 4)
    # with sums the gradients of scales go by a kernel of their own
    assert sent(forward, "rounded") == (tokens * (row + 12) + pairs * 8, tokens * row)
    assert sent(both, "rounded") == (tokens * (2 * row + 12) + pairs * 8, 2 * tokens * row, pairs * 4)
    assert sent(both, "float32") == (tokens * (2 * row + 12) + pairs * 8, 4 * tokens * row, pairs * 4)
    assert list(bytes_over_link(indices, 1, 3, 6, x, both, [row] * 2, "rounded")) == [
        "push_kernel", "pull_sums_kernel", "pull_kernel",
    ]  # fmt: skip
    assert tuple(bytes_over_link(torch.tensor([[2, 3], [0, 2]]), 1, 2, 4, x, forward, [row]).values()) == (
        row + 16,
        row,
    )


def test_a_capacity_is_rows_or_a_factor():
    for text, rows in (("5000", 5000), ("1.0625x", 4352), ("1.1x", 4608), ("1x", 4096), ("0.001x", 128)):
        assert rows_of_capacity(text, 4096) == rows
    assert rows_of_capacity("1.1x", 1280) == 1408, "no rounding of the factor"
    for text in ("0", "-1x", "x", "1.5", "1/0x"):
        with pytest.raises(UsageError, match=f"--capacity {text} is neither a number of rows nor a factor"):
            rows_of_capacity(text, 4096)


def test_the_times_of_a_kernel_are_summed_by_step():
    names = ("push_kernel", "other", "push_kernel", "void c10d::barrier_kernel(int)", "push_kernel", "push_kernel")
    events = [DeviceEvent(name, start, start + 1.0) for start, name in enumerate(names)]
    assert seconds_of_steps(events, "push_kernel", 2) == [4, 11]
    assert seconds_of_steps(events, "barrier_kernel", 1) == [4]
    for name, steps, seen in (("push_kernel", 3, 4), ("pull_kernel", 2, 0)):
        with pytest.raises(RuntimeError, match=f"The profiler saw {seen} launches of {name} in {steps} steps"):
            seconds_of_steps(events, name, steps)


def transfers(push_bytes: int, pull_bytes: int):
    """A rank whose kernels take 1 and 2 ms, and one that is faster, but waits."""
    one = {"push_kernel": [1e-3] * 3, "pull_kernel": [2e-3] * 3, BARRIER_KERNEL: [1e-6] * 3}
    other = {"push_kernel": [9e-4] * 3, "pull_kernel": [1e-3] * 3, BARRIER_KERNEL: [1e-3] * 3}
    num_bytes = {"push_kernel": push_bytes, "pull_kernel": pull_bytes}
    return slowest([(one, num_bytes), (other, num_bytes)], RATES)


def test_transfers_are_those_of_the_slowest_rank():
    found = transfers(360 * 10**6, 320 * 10**6)
    assert [(use.name, use.direction, use.seconds) for use in found.kernels] == [
        ("push_kernel", "write", 1e-3), ("pull_kernel", "read", 2e-3),
    ]  # fmt: skip
    assert [use.of_peer_rate for use in found.kernels] == pytest.approx([0.9, 0.8])
    assert (found.times.median, found.barriers.median) == pytest.approx((3e-3, 1e-3))
    assert json.loads(json.dumps(found.figures()))["kernels"][0]["rate"] == pytest.approx(360e9)


def measured(way: str, milliseconds: float, **changed) -> Measured:
    times = Timing(*[milliseconds * 1e-3] * 3)
    given = dict(
        model="m", ranks=2, tokens=8, passes=PASSES[-1], way=way, recipe="bf16", flop=1, times=times, host=None,
        transfers=None, bytes_sent=None, symmetric=None, sqnr={}, of_one_rank=8.5 / milliseconds,
    )  # fmt: skip
    return Measured(**given | changed)


def test_the_targets_are_said_to_be_met_or_missed(capsys):
    found = [measured(ONE, 8.5), measured(OURS, 11), measured(OVERLAPPED, 9.5)]
    assert not targets(found)
    found.append(measured(OVERLAP, 9.5))
    found.append(measured(SYMMETRIC, 10, symmetric=transfers(360 * 10**6, 320 * 10**6)))
    assert not targets([measured(SYMMETRIC, 10, passes=PASSES[0], symmetric=found[-1].symmetric)])
    expected = [
        "rate against one rank 0.850 (>= 0.80: met)",
        "the same, overlap 0.895 (>= 0.90: missed)",
        "push_kernel of the peer's write rate 0.900 (>= 0.85: met)",
        "pull_kernel of the peer's read rate 0.800 (>= 0.85: missed)",
        "time against ours 0.909 (<= 1.00: met)",
        "time against overlapped 1.053 (<= 1.00: missed)",
    ]
    assert list(map(str, targets(found))) == expected
    show(found)
    out = capsys.readouterr().out
    assert f"m, targets of symmetric, forward + backward: {'; '.join(expected)}\n" in out
    assert "barriers, with waiting" in out and "360.0" in out
    assert [(one["model"], one["is_met"]) for one in target_figures(found)] == [
        ("m", met) for met in (True, False, True, False, True, False)
    ]
    assert json.loads(json.dumps(figures(found)))[-1]["symmetric"]["barriers"]["median"] == 1e-3


def test_a_replay_with_other_bits_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    x = torch.randn(4, 8, requires_grad=True)
    given, seen = x.detach().clone(), []

    def eager() -> list[Tensor]:
        seen.append(x.detach().clone())
        return [2 * x.detach(), x.detach()]

    require_same_bits(eager, eager, x, ("y", "dx"))
    assert torch.equal(x, given) and len(seen) == 2 * ROUTINGS
    assert not torch.equal(seen[0], seen[2]) and torch.equal(seen[0][:, 0], given[:, 0])
    with pytest.raises(AssertionError, match="dx of replay 0 has not the bits of the eager step"):
        require_same_bits(lambda: [2 * x.detach(), given], eager, x, ("y", "dx"))


def test_the_rates_of_the_link_are_in_the_report():
    assert link_line(RATES, 2) == (
        "link between 2 GPUs, 128 MiB a rank, all ranks at once: write 400.0 GB/s, read 200.0 GB/s, "
        "all_to_all_single 300.0 GB/s"
    )
    assert link_figures(RATES) == {"bytes": 2**27, "write": 400e9, "read": 200e9, "all_to_all_single": 300e9}
    assert link_figures(None) == {}


def run(*given):
    command = [sys.executable, "-m", "bench", "parallel", *map(str, given)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)


@pytest.mark.rest
@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_json(tmp_path):
    file = tmp_path / "figures.json"
    done = run("--models", MODEL, "--tokens", TOKENS, "--rounds", 1, "--json", file, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert f"{MODEL}, {TOKENS} tokens a rank, forward + backward" in done.stdout
    record = json.loads(file.read_text())
    assert (record["benchmark"], record["ranks"], record["backend"], len(record["measured"])) == (
        "parallel", 2, "gloo", 10,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.gpu2
@pytest.mark.slow
def test_two_gpus_are_measured(tmp_path):
    file = tmp_path / "figures.json"
    more = ("--recipes", "fp8_block", "--capacity", "1.25x")
    done = run("--models", "olmoe-1b-7b", "--ranks", 2, "--rounds", 3, "--json", file, "--device", "cuda", *more)
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    assert record["backend"] == "nccl" and all(one["host"]["median"] > 0 for one in record["measured"])
    assert all(record["link"][way] > 1e9 for way in LinkRates._fields)
    over_symmetric = [one for one in record["measured"] if one["way"].startswith(SYMMETRIC)]
    names = [SYMMETRIC, OVERLAP, CAPTURED[SYMMETRIC], CAPTURED[OVERLAP], f"{SYMMETRIC}, fp8_block"]
    assert [one["way"] for one in over_symmetric] == 2 * names
    for one in over_symmetric:
        assert one["share_in_transfer"] > 0 and one["symmetric"]["barriers"]["median"] > 0
        assert [0.1 < use["of_peer_rate"] < 1.2 for use in one["symmetric"]["kernels"]] == [True, True]
    assert len(record["targets"]) == 7
    for said in ("no host synchronization in a step of: symmetric", "replays with 50 other routings have the bits"):
        assert said in done.stdout
    assert "olmoe-1b-7b, targets of symmetric, forward + backward: " in done.stdout


def test_wrong_arguments_are_sentences(capsys):
    for given, sentence in (
        (("--models", "gpt-5"), "--models gpt-5 is unknown. Take qwen3-30b-a3b, "),
        (("--ranks", "1"), "--ranks is 1, but must be at least 2."),
        (("--ranks", "3"), "--ranks is 3, but must divide the 8 experts of tiny-qwen3-30b-a3b."),
        (("--partial-sums", "bf16"), "--partial-sums bf16 is unknown. Take float32, rounded, or both."),
        (("--capacity", "64"), "--capacity 64 is for GPUs. Leave it out on a CPU."),
        (("--recipes", "fp4"), "--recipes fp4 is unknown. Take "),
        (("--tokens", "0"), "--tokens is 0, but must be at least 1."),
    ):
        with pytest.raises(SystemExit):
            main(["parallel", "--device", "cpu", *given])
        assert sentence in capsys.readouterr().err
