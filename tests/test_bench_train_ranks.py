"""The main job on several ranks: the curve of one process, and taking up after a rank was killed."""

import argparse
import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from bench import train
from bench.__main__ import main, make_parser
from bench.corpus import read_corpus
from bench.ranks import DIMENSIONS, launch, require_gpus
from bench.run_files import read_metrics
from bench.schedule import RecipeSchedule
from bench.train_ranks import TrainRanks
from bench.usage import UsageError
from tests.ranks import on_ranks, quietly
from tests.shared_memory import symmetric_on_cpu

ROOT = Path(__file__).parent.parent
REST = (pytest.mark.rest, pytest.mark.slow)
# Relative, for 12 steps of the micro model: in fp32 losses differ by 1e-7, in bf16 by 3e-4.
TOLERANCES = {"fp32": 1e-5, "bf16": 3e-3}
STEPS, EVERY = 12, 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    lines = (f"value_{line} = {line * line}  # the square of {line}\n" for line in range(400))
    (directory / "text.py").write_text("".join(lines))
    return str(directory)


def arguments(corpus, out, *more):
    every = ("--steps", STEPS, "--checkpoint-every", EVERY, "--validate-every", 6)
    return ["train", "--model", "micro", "--corpus", corpus, "--out", str(out), *map(str, (*every, *more))]


def run(program, *given):
    """A Python program in a process of its own: torch's launcher takes over the signals of the one it runs in."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *program, *given], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )


def curve(out):
    """The metrics without the clock."""
    return [{k: v for k, v in record.items() if k != "tokens_per_s"} for record in read_metrics(out / "metrics.jsonl")]


def assert_same_curve(found, expected, recipe):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        names = {"loss", "validation_loss"} | ({"grad_norm", "load_balancing_loss"} if recipe == "fp32" else set())
        for name in ours.keys() & names:
            assert ours[name] == pytest.approx(theirs[name], rel=TOLERANCES[recipe]), (name, ours["step"])


# Run by `python -c`: rank 1 kills itself in its step 7, behind the checkpoint of step 4.
KILLED = """
import sys
from tests.test_bench_train_ranks import launch_killed
if __name__ == "__main__":
    sys.exit(launch_killed(sys.argv[1:]))
"""


def launch_killed(given):
    return launch(train_killed, make_parser().parse_args(given), 2, "It was to be.")


def train_killed(parsed: argparse.Namespace) -> int:
    calls, sum_gradients = 0, TrainRanks.sum_gradients

    def sum_or_die(ranks, model):
        nonlocal calls
        calls += 1
        if ranks.rank == 1 and calls == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        sum_gradients(ranks, model)

    TrainRanks.sum_gradients = sum_or_die
    return train.main(parsed)


@pytest.mark.slow
def test_run_with_a_rank_killed_stops_and_resumes_with_the_curve_of_one_process(corpus, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    given = arguments(corpus, killed, "--recipe", "fp32", "--ep", 2)
    died = run(["-c", KILLED], *given)
    assert died.returncode == 1, died.stderr
    assert "rank 1 of 2 ended by SIGKILL, and the others were stopped. It was to be.\n" in died.stderr
    before = curve(killed)
    assert [record["step"] for record in before if "loss" in record] == [1, 2, 3, 4, 5, 6]

    resumed = run(["-m", "bench"], *given, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "fp32 seed 0 begins behind step 4" in resumed.stdout
    assert "2 ranks: experts divided by 2, batches by 2" in resumed.stdout
    assert curve(killed)[: len(before)] == before, "steps that are repeated have the same bits"
    main(arguments(corpus, whole, "--recipe", "fp32"))
    assert_same_curve(curve(killed), curve(whole), "fp32")


# Run by `python -c` as one of two ranks, without a launcher that would stop it.
RANK = """
import sys
from bench.__main__ import make_parser
from tests.test_bench_train_ranks import train_killed
if __name__ == "__main__":
    sys.exit(train_killed(make_parser().parse_args(sys.argv[1:])))
"""


@pytest.mark.rest
@pytest.mark.slow
def test_a_rank_whose_peer_is_killed_raises_by_itself(corpus, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", RANK, *arguments(corpus, tmp_path, "--recipe", "fp32", "--ep", 2)]
    common = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | common | {"TORCHELASTIC_RUN_ID": "by hand", "RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=150)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, -signal.SIGKILL], said
    assert "RuntimeError" in said[0] and "Connection" in said[0]
    assert [record["step"] for record in curve(tmp_path)][-1] == 6


@pytest.mark.rest
@pytest.mark.slow
def test_every_division_has_the_curve_of_one_process_and_resumes_every_other(corpus, tmp_path):
    """Experts over 2 and over 4 ranks, batches over groups; a checkpoint of 4 ranks goes on in one process."""
    whole = tmp_path / "whole"
    options = ("--recipe", "bf16+4:fp8_delayed+8:mxfp8")
    main(arguments(corpus, whole, *options))
    for ep, dp in ((4, 1), (1, 2)):
        out = tmp_path / f"{ep}-{dp}"
        done = run(["-m", "bench"], *arguments(corpus, out, *options, "--ep", ep, "--dp", dp))
        assert done.returncode == 0, done.stderr
        assert_same_curve(curve(out), curve(whole), "bf16")

    parts, again = tmp_path / "parts", tmp_path / "again"
    first = arguments(corpus, parts, "--recipe", "fp32", "--steps", 8)
    assert run(["-m", "bench"], *first, "--ep", "2", "--dp", "2").returncode == 0
    main(arguments(corpus, parts, "--recipe", "fp32", "--resume"))
    main(arguments(corpus, again, "--recipe", "fp32"))
    steps = [[record for record in curve(out) if "loss" in record] for out in (parts, again)]
    assert_same_curve(*steps, "fp32")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_resumed_run_on_ranks_has_the_bits_of_an_uninterrupted_one(corpus, tmp_path):
    """Also where gradients are rounded stochastically, by each rank's own random numbers."""
    for name, steps in (("whole", (STEPS,)), ("parts", (8, STEPS))):
        for number, last in enumerate(steps):
            given = arguments(corpus, tmp_path / name, "--recipe", "nvfp4", "--ep", 2, "--steps", last)
            done = run(["-m", "bench"], *given, *(["--resume"] if number else []))
            assert done.returncode == 0, done.stderr
    found, expected = ([r for r in curve(tmp_path / name) if "loss" in r] for name in ("parts", "whole"))
    assert found == expected


@pytest.mark.rest
@pytest.mark.slow
def test_a_refusal_on_the_first_rank_ends_all_with_its_sentence(corpus, tmp_path):
    main(arguments(corpus, tmp_path, "--recipe", "bf16"))
    refused = run(
        ["-m", "bench"], *arguments(corpus, tmp_path, "--ep", 2, "--recipe", "bf16", "--resume", "--steps", 8)
    )
    assert refused.returncode == 2, refused.stderr
    assert f"is of step {STEPS}, but this call ends at step 8. Give --steps {STEPS} or more" in refused.stderr


def train_over_both_transports(rank, corpus, out):
    """As on GPUs, in the processes of a test."""
    mesh, curves = init_device_mesh("cpu", (1, 2), mesh_dim_names=DIMENSIONS), []
    schedules = (RecipeSchedule.parse("bf16+2:mxfp8", ()),)
    with quietly(), symmetric_on_cpu(out), patch.object(train, "VALIDATION_BATCHES", 1):
        for transport in ("alltoall", "symmetric"):
            config = train.TrainConfig(out, schedules, model="micro", steps=2, ep=2, transport=transport)
            losses = []
            report = partial(lambda losses, *given: losses.append(given[3]), losses)
            train.train(config, read_corpus(corpus), None, TrainRanks(mesh), report)
            curves.append(losses)
    assert len(curves[0]) == 2 and curves[0] == curves[1]


@pytest.mark.interpreter
@pytest.mark.rest
@pytest.mark.slow
def test_both_transports_have_the_same_curve(corpus, tmp_path):
    on_ranks(train_over_both_transports, corpus, tmp_path, folder=tmp_path)


def test_symmetric_is_for_several_gpus(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "require_device", lambda device: None)
    for more in (("--ep", 2, "--device", "cpu"), ("--ep", 1, "--device", "cuda")):
        with pytest.raises(UsageError, match=r"--transport symmetric is between the ranks of --ep 2 or more, with"):
            train.main(make_parser().parse_args(arguments(corpus, tmp_path, "--transport", "symmetric", *more)))


@pytest.mark.gpu
@pytest.mark.gpu2
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["alltoall", "symmetric"])
def test_two_gpus_have_the_curve_of_one_and_resume(corpus, tmp_path, transport):
    given = ("--device", "cuda", "--recipe", "bf16")
    ranks = ("--ep", 2, "--transport", transport)
    for name, more in (("whole", ()), ("parts", (*ranks, "--steps", 8)), ("parts", (*ranks, "--resume"))):
        done = run(["-m", "bench"], *arguments(corpus, tmp_path / name, *given, *more))
        assert done.returncode == 0, done.stderr
    losses = [[record for record in curve(tmp_path / name) if "loss" in record] for name in ("parts", "whole")]
    assert_same_curve(*losses, "bf16")


def test_ranks_that_do_not_divide_the_model_are_refused(corpus, tmp_path, capsys):
    for given, sentence in (
        (("--ep", 3), "--ep is 3, but must divide the 4 experts of the model micro."),
        (("--ep", 2, "--dp", 4), "--ep times --dp is 8, but must divide the 4 texts a batch of the model micro."),
    ):
        with pytest.raises(SystemExit):
            main(arguments(corpus, tmp_path, *given))
        assert sentence in capsys.readouterr().err


def test_ranks_need_a_gpu_each(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UsageError, match="2 ranks need a GPU each, but torch finds 1. Take fewer ranks"):
        require_gpus(2, "cuda")
