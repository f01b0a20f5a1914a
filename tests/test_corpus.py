"""The corpus' facts, the held-out part, and batches that depend on (seed, step) alone."""

import hashlib
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.corpus import VALIDATION_EVERY, batch, entropies, read_corpus, split
from bench.usage import UsageError

ROOT = Path(__file__).parent.parent


@pytest.fixture
def directory(tmp_path):
    """b.txt, a/c.txt, and what does not count: tests, installed packages, hidden files."""
    for name, text in {
        "b.txt": b"b" * 1024,
        "a/c.txt": b"c" * 1024,
        "a/tests/d.txt": b"d",
        "test/e.txt": b"e",
        "site-packages/f.txt": b"f",
        "__pycache__/g.txt": b"g",
        ".hidden": b"h",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return tmp_path


def test_facts_of_a_directory(directory):
    corpus = read_corpus(directory)
    text = b"c" * 1024 + b"b" * 1024  # a/c.txt sorts before b.txt
    assert (corpus.num_files, corpus.num_bytes) == (2, 2048)
    assert corpus.sha256 == hashlib.sha256(text).hexdigest()
    assert corpus.unigram_entropy == pytest.approx(math.log(2))
    assert corpus.sha256 in corpus.facts() and "2 files, 2,048 bytes" in corpus.facts()


def test_standard_library_is_read_without_tests_and_packages():
    corpus = read_corpus()
    assert 300 < corpus.num_files < 1500
    assert 8e6 < corpus.num_bytes < 20e6
    assert 2.2 < corpus.bigram_entropy < 2.6 < 3.0 < corpus.unigram_entropy < 3.5


def test_entropies_of_known_texts():
    periodic = torch.tensor([0, 1, 2, 3] * 1000, dtype=torch.uint8)
    assert entropies(periodic) == pytest.approx((math.log(4), 0.0), abs=1e-3)
    fair = torch.randint(2, (200_000,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    assert entropies(fair) == pytest.approx((math.log(2), math.log(2)), abs=1e-3)


def test_split_loses_no_byte_and_holds_out_every_sixteenth_block():
    data = torch.arange(1600).remainder(256).to(torch.uint8)
    train, validation = split(data)
    assert torch.equal(validation, data[1500:])
    assert torch.equal(train, data[:1500])
    assert len(validation) * VALIDATION_EVERY == len(data)


def test_targets_are_the_next_bytes():
    data = torch.arange(200, dtype=torch.uint8)
    inputs, targets = batch(data, batch_size=5, context=16, seed=0, step=1)
    assert inputs.shape == targets.shape == (5, 16)
    assert torch.equal(inputs + 1, targets)


def test_batches_depend_on_seed_and_step_alone():
    data = torch.arange(200, dtype=torch.uint8)

    def inputs(seed, step):
        return batch(data, batch_size=5, context=16, seed=seed, step=step)[0]

    first = inputs(0, 1)
    torch.manual_seed(1234)
    assert torch.equal(first, inputs(0, 1))
    assert not torch.equal(first, inputs(0, 2))
    assert not torch.equal(first, inputs(1, 1))


def test_what_is_no_corpus_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(UsageError, match="is not a directory"):
        read_corpus(tmp_path / "missing")
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(UsageError, match="only 5 bytes of text in 1 files"):
        read_corpus(tmp_path)
    with pytest.raises(UsageError, match="a window needs 33"):
        batch(torch.zeros(32, dtype=torch.uint8), batch_size=1, context=32, seed=0, step=0)


def test_what_cannot_be_read_is_a_sentence(directory, monkeypatch):
    def refuse(path, mode):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UsageError, match="c.txt cannot be read: Permission denied. Make it readable"):
        read_corpus(directory)


# --- in pieces


@pytest.mark.parametrize("length", [1, 2, 99, 100, 101, 200, 201, 1000])
def test_entropies_in_pieces_are_those_of_the_whole(length, monkeypatch):
    data = torch.randint(4, (length,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    whole = entropies(data)
    monkeypatch.setattr("bench.corpus._PIECE", 100)
    assert entropies(data) == whole
    counts = torch.bincount(data[:-1].long() * 4 + data[1:].long(), minlength=16).double()
    share = counts / counts.sum().clamp(min=1)
    joint = -(share * share.clamp(min=1e-300).log()).sum().item()
    rows = share.view(4, 4).sum(1)
    assert whole[1] == pytest.approx(joint + (rows * rows.clamp(min=1e-300).log()).sum().item())


@pytest.mark.parametrize("length", [1024, 1600, 4099, 16 * 32 * 1024, 33 * 32 * 1024 + 5])
def test_every_16th_block_is_held_out_byte_by_byte(length):
    data = torch.randint(256, (length,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    block = min(32 * 1024, length // 16)
    held_out = torch.arange(length).div(block, rounding_mode="floor") % 16 == 15
    train, validation = split(data)
    assert torch.equal(train, data[~held_out]) and torch.equal(validation, data[held_out])


# --- memory

PEAK = """
import resource, sys, torch
from bench.corpus import read_corpus

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

read_corpus(sys.argv[1])
before = peak()
corpus = read_corpus(sys.argv[2])
assert corpus.train.dtype == corpus.validation.dtype == torch.uint8
assert corpus.train.nbytes + corpus.validation.nbytes == corpus.num_bytes
print((peak() - before) / corpus.num_bytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the unit of ru_maxrss is Linux's")
@pytest.mark.parametrize("num_files", [1, 64])
def test_a_corpus_takes_at_most_two_and_a_half_times_its_size(num_files, tmp_path):
    size = 64 << 20
    text = bytes(range(256)) * (size // 256 // num_files)
    for name, files in (("small", 1), ("large", num_files)):
        (tmp_path / name).mkdir()
        for index in range(files):
            (tmp_path / name / f"{index}.txt").write_bytes(text if name == "large" else text[: 1 << 20])
    command = [sys.executable, "-c", PEAK, str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2.5
