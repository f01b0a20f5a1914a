"""The benchmark of expert parallelism: what it measures on two ranks, and that it checks before it times."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bench import bench_parallel
from bench.__main__ import main
from bench.bench_parallel import HAND, ONE, OURS, OVERLAPPED, PARTIAL_SUMS, TORCH, figures, measure
from bench.case import PASSES
from bench.exchange import Transfers
from tests.ranks import on_ranks

ROOT = Path(__file__).parent.parent
MODEL, TOKENS = "tiny-mixtral-8x7b", 48


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
    row = 2 * bench_parallel.MODELS[MODEL].hidden
    assert 2 * TOKENS * row < hand.bytes_sent < 2 * TOKENS * row + TOKENS * 64


def count_what_partial_sums_send(rank: int) -> None:
    """All 8 experts on 2 ranks: of each token 4 rows come back from the other, or 1, or 1 in float32."""
    model = "tiny-qwen3-30b-a3b"
    measured = measure(model, "cpu", TOKENS, 1, tuple(PARTIAL_SUMS.values()))
    row = 2 * bench_parallel.MODELS[model].hidden
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
    exchanged = bench_parallel.exchanged_layer
    bench_parallel.exchanged_layer = lambda *a, **k: exchanged(*a, **k) * 1.02
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
    more = ("--recipes", "fp8_block", "--capacity", 2 * 8 * 8192)  # twice what a rank receives on average
    done = run("--models", "olmoe-1b-7b", "--ranks", 2, "--rounds", 3, "--json", file, "--device", "cuda", *more)
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    assert record["backend"] == "nccl" and "symmetric" in {one["way"] for one in record["measured"]}
    assert all(one["host"]["median"] > 0 for one in record["measured"])


def test_wrong_arguments_are_sentences(capsys):
    for given, sentence in (
        (("--models", "gpt-5"), "--models gpt-5 is unknown. Take qwen3-30b-a3b, "),
        (("--ranks", "1"), "--ranks is 1, but must be at least 2."),
        (("--ranks", "3"), "--ranks is 3, but must divide the 8 experts of tiny-qwen3-30b-a3b."),
        (("--partial-sums", "bf16"), "--partial-sums bf16 is unknown. Take float32, rounded, or both."),
        (("--capacity", "64"), "--capacity 64 is for GPUs, and at least 1."),
        (("--recipes", "fp4"), "--recipes fp4 is unknown. Take "),
        (("--tokens", "0"), "--tokens is 0, but must be at least 1."),
    ):
        with pytest.raises(SystemExit):
            main(["parallel", "--device", "cpu", *given])
        assert sentence in capsys.readouterr().err
