"""A text corpus as bytes, its statistics, and batches that depend only on (seed, step).

The default text is the source code of the Python standard library: about 12.6 MB (Python 3.11) of real text, available
on every machine with Python, in the order of the sorted relative paths, without installed packages and without
directories named `test` or `tests`.

    unigram entropy   H(b_t)            nats per byte: the loss of a model that uses only the frequency of each byte
    bigram entropy    H(b_t | b_{t-1})  nats per byte: the loss of a model that also uses the preceding byte

Every `VALIDATION_EVERY`-th block of the text is held out for validation, so that both parts have the same kinds of
text.

Memory: the bytes, and a second copy while they are split into the two parts.
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.usage import UsageError

SKIPPED_DIRECTORIES = frozenset({"test", "tests", "site-packages", "dist-packages", "__pycache__"})
VALIDATION_EVERY = 16
VALIDATION_BLOCK = 32 * 1024  # bytes; smaller texts use smaller blocks

_NUM_BYTES = 256
_PIECE = 1 << 18  # bytes read or counted at a time


@dataclass(frozen=True)
class Corpus:
    """The bytes of a text, split into a training and a validation part.

    `train` and `validation` are uint8 tensors [bytes] on the CPU. `sha256` and the entropies (in nats per byte) are
    those of the complete text (files concatenated in sorted order).
    """

    source: str
    num_files: int
    num_bytes: int
    sha256: str
    unigram_entropy: float
    bigram_entropy: float
    train: Tensor
    validation: Tensor

    def facts(self) -> str:
        """A description of the corpus in one paragraph."""
        return (
            f"corpus: {self.source}, {self.num_files} files, {self.num_bytes:,} bytes, sha256 {self.sha256}\n"
            f"entropy: {self.unigram_entropy:.3f} (unigram), {self.bigram_entropy:.3f} (bigram) nats/byte; "
            f"validation: every {VALIDATION_EVERY}th block, {len(self.validation):,} bytes"
        )


def read_corpus(directory: str | os.PathLike[str] | None = None) -> Corpus:
    """Read a corpus: the standard library's `*.py` files (None), or every regular file below `directory`.

    Files are read in the order of their relative paths, written with "/". Hidden files and `SKIPPED_DIRECTORIES` are
    skipped. Raises UsageError if the directory does not exist or has less than 1024 bytes of text.
    """
    if directory is None:
        root, suffix, source = Path(sysconfig.get_path("stdlib")), ".py", "Python standard library sources"
    else:
        root, suffix, source = Path(directory), "", f"files of {Path(directory).name}"
    if not root.is_dir():
        raise UsageError(f"{root} is not a directory. Pass one that holds the text as files.")

    paths = sorted(_walk(root, suffix), key=lambda path: path.relative_to(root).as_posix())
    text, sha256 = _read(paths)
    if len(text) < 1024:
        raise UsageError(
            f"{root} holds only {len(text)} bytes of text in {len(paths)} files. Give at least 1024 bytes."
        )

    data = torch.frombuffer(text, dtype=torch.uint8)
    unigram, bigram = entropies(data)
    train, validation = split(data)
    return Corpus(source, len(paths), len(text), sha256, unigram, bigram, train, validation)


def entropies(data: Tensor) -> tuple[float, float]:
    """H(b_t) and H(b_t | b_{t-1}) of uint8 [bytes], in nats per byte."""
    counts = torch.zeros(_NUM_BYTES, dtype=torch.int64)
    pairs = torch.zeros(_NUM_BYTES**2, dtype=torch.int64)
    for start in range(0, len(data), _PIECE):
        codes = data[start : start + _PIECE + 1].to(torch.int32)  # and the first byte of the next piece, for the pair
        counts += torch.bincount(codes[:_PIECE], minlength=_NUM_BYTES)
        pairs += torch.bincount(codes[:-1] * _NUM_BYTES + codes[1:], minlength=_NUM_BYTES**2)
    befores = pairs.view(_NUM_BYTES, _NUM_BYTES).sum(1)
    return _entropy(counts), _entropy(pairs) - _entropy(befores)


def split(data: Tensor) -> tuple[Tensor, Tensor]:
    """Split [bytes] into (train, validation): every `VALIDATION_EVERY`-th block is held out."""
    blocks = data.split(min(VALIDATION_BLOCK, len(data) // VALIDATION_EVERY))
    last = VALIDATION_EVERY - 1
    train = [block for index, block in enumerate(blocks) if index % VALIDATION_EVERY != last]
    return torch.cat(train), torch.cat(blocks[last::VALIDATION_EVERY])


def batch(data: Tensor, *, batch_size: int, context: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Random windows of `data` [bytes] as (inputs, targets), each [batch_size, context] int64.

    targets[b, t] is the byte after inputs[b, t]. The windows depend only on (seed, step), so a resumed run sees the
    same ones.
    """
    if len(data) <= context:
        raise UsageError(f"The text has {len(data)} bytes, but a window needs {context + 1}. Give more text.")
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(data) - context, (batch_size, 1), generator=generator)
    windows = data[starts + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def _walk(root: Path, suffix: str) -> Iterator[Path]:
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [name for name in subdirectories if name not in SKIPPED_DIRECTORIES and name[0] != "."]
        for name in names:
            path = Path(directory, name)
            if name.endswith(suffix) and name[0] != "." and path.is_file():
                yield path


def _read(paths: Sequence[Path]) -> tuple[bytearray, str]:
    """The concatenated files, and their SHA-256."""
    text, digest = bytearray(), hashlib.sha256()
    for path in paths:
        try:
            with path.open("rb") as file:
                while piece := file.read(_PIECE):
                    text += piece
                    digest.update(piece)
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}. Make it readable, or leave it out.") from None
    return text, digest.hexdigest()


def _entropy(counts: Tensor) -> float:
    shares = counts[counts > 0].double() / counts.sum()
    return -(shares * shares.log()).sum().item()
