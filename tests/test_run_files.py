"""The files of a training run: nothing of others is touched, nothing damaged is taken up, what fails is a sentence."""

import dataclasses
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.__main__ import main
from bench.checkpoint_file import read_checkpoint, write_checkpoint
from bench.language_model import LANGUAGE_MODELS
from bench.run_files import RunKey, open_run_files, read_metrics
from bench.usage import UsageError

ROOT = Path(__file__).parent.parent
KEY = RunKey("bf16", 0)
CHECKPOINT = "checkpoints/bf16-seed0.pt"
FULL = Path("/dev/full")  # each write to it finds a full disk


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    (directory / "text.txt").write_text("".join(f"{line} squared is {line * line}\n" for line in range(500)))
    return directory


def arguments(corpus, out, *more):
    fixed = ["train", "--model", "micro", "--recipe", "bf16", "--steps", 2, "--checkpoint-every", 1]
    return [*map(str, fixed), "--corpus", str(corpus), "--out", str(out), *map(str, more)]


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    directory = tmp_path_factory.mktemp("trained")
    assert main(arguments(corpus, directory)) == 0
    return directory


@pytest.fixture
def out(trained, tmp_path):
    """A directory with a run of two steps."""
    return shutil.copytree(trained, tmp_path / "out")


def refusal(capsys, *argv):
    """The sentence with which a call is refused, on one line; no traceback."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        main(list(argv))
    assert exit_info.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    return line.split("error: ")[1]


def contents(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def losses(directory):
    return [(r["recipe"], r["step"], r["loss"]) for r in read_metrics(directory / "metrics.jsonl") if "loss" in r]


# --- what belongs to others

FOREIGN = [
    "checkpoints/other.pt", "checkpoints/other-seed0.pt", "checkpoints/best.pt.bak", "checkpoints/bf16-seed7.pt",
    "checkpoints/mxfp8-seed0.pt", "loss.part.png", "checkpoints/readme.txt", "metrics.csv", "notes.md", "model.pt",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--resume",)], ids=["new", "resume"])
def test_files_of_others_are_left_as_they_are(options, corpus, out):
    for name in FOREIGN:
        (out / name).write_text(f"others' {name}")
    assert main(arguments(corpus, out, *options)) == 0
    for name in FOREIGN:
        assert (out / name).read_text() == f"others' {name}"


@pytest.mark.parametrize("options", [(), ("--resume",)], ids=["new", "resume"])
@pytest.mark.parametrize("name", ["metrics.jsonl", "summary.md", "loss.png", CHECKPOINT, f"{CHECKPOINT}.part"])
def test_a_file_of_others_that_is_in_the_way_is_refused_and_kept(name, options, corpus, tmp_path, capsys):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("others'")
    sentence = refusal(capsys, *arguments(corpus, tmp_path, *options))
    assert f"{path} would be overwritten" in sentence and "Move it away, or take another --out." in sentence
    assert path.read_text() == "others'"


def test_a_link_of_others_is_refused(corpus, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "nowhere")
    assert "would be overwritten" in refusal(capsys, *arguments(corpus, tmp_path))
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.slow
def test_a_run_replaces_its_own_files_again_and_again(corpus, out):
    for _ in range(2):
        assert main(arguments(corpus, out, "--steps", 1)) == 0
        assert [step for _, step, _ in losses(out)] == [1]


def test_what_a_kill_left_half_written_is_removed(corpus, out):
    (out / f"{CHECKPOINT}.part").write_bytes(b"half")
    (out / "metrics.jsonl.part").write_bytes(b"half")
    assert main(arguments(corpus, out)) == 0
    assert not list(out.rglob("*.part"))


@pytest.mark.parametrize(
    "text",
    ["", "{", "[" * 100_000, "[]", "null", '"files"', "\xff", '{"files": ["metrics.jsonl"]}',
     '{"program": "another", "files": []}',
     json.dumps({"program": "python -m bench train", "files": ["../precious"]}),
     json.dumps({"program": "python -m bench train", "files": ["checkpoints/../../precious-seed0.pt"]}),
     json.dumps({"program": "python -m bench train", "files": ["precious"]}),
     json.dumps({"program": "python -m bench train", "files": [1]})],
)  # fmt: skip
def test_a_damaged_manifest_is_a_sentence_and_deletes_nothing(text, corpus, out, capsys):
    for path in (out.parent / "precious", out.parent / "precious-seed0.pt", out / "precious"):
        path.write_text("others'")
    (out / "run.json").write_bytes(text.encode("latin-1"))
    before = contents(out.parent)
    assert "run.json is damaged, or something else wrote it" in refusal(capsys, *arguments(corpus, out))
    assert contents(out.parent) == before


# --- two processes

HOLDS = """
import sys
from pathlib import Path
from bench.run_files import RunKey, open_run_files

with open_run_files(Path(sys.argv[1]), [RunKey("bf16", 0)], resume=True):
    print("holds", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_a_second_run_in_a_directory_is_refused_until_the_first_is_dead(corpus, out, capsys):
    command = [sys.executable, "-c", HOLDS, str(out)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "holds\n"
            before = contents(out)
            for options in ((), ("--resume",)):
                sentence = refusal(capsys, *arguments(corpus, out, *options))
                assert sentence.startswith(f"Another `bench train` is writing to {out}. Wait until it has ended")
            assert contents(out) == before
        finally:
            process.send_signal(signal.SIGKILL)
    assert main(arguments(corpus, out, "--steps", 1)) == 0, "a lock ends with its process"


def test_a_directory_is_free_again_after_a_failure(out):
    with pytest.raises(RuntimeError), open_run_files(out, [KEY], resume=True):
        raise RuntimeError
    with (
        open_run_files(out, [KEY], resume=True),
        pytest.raises(UsageError, match="Another `bench train`"),
        open_run_files(out, [KEY], resume=True),
    ):
        pass


# --- damaged checkpoints


def test_a_checkpoint_is_read_back_and_is_torchs_own_file(tmp_path):
    state = {"step": 3, "weights": torch.arange(5.0)}
    write_checkpoint(tmp_path / "a.pt", state)
    for read in (read_checkpoint(tmp_path / "a.pt"), torch.load(tmp_path / "a.pt", weights_only=True)):
        assert read["step"] == 3 and torch.equal(read["weights"], state["weights"])
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_any_flipped_bit_of_a_checkpoint_is_found(tmp_path):
    path = tmp_path / "a.pt"
    write_checkpoint(path, {"step": 3, "weights": torch.arange(5.0)})
    data = path.read_bytes()
    for position in [*range(0, len(data), 37), *range(len(data) - 80, len(data))]:
        path.write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
        with pytest.raises(UsageError, match="a.pt (is damaged|does not end with a checksum)"):
            read_checkpoint(path)


@pytest.mark.parametrize("part", [0.0, 0.001, 0.5, 0.999, 1.001])
def test_a_checkpoint_of_another_length_is_a_sentence(part, corpus, out, capsys):
    path = out / CHECKPOINT
    data = path.read_bytes()
    path.write_bytes((data + data)[: int(part * len(data))])
    sentence = refusal(capsys, *arguments(corpus, out, "--steps", 3, "--resume"))
    assert f"{path} does not end with a checksum: it was cut off" in sentence and "delete it to train" in sentence


def test_a_flipped_byte_is_a_sentence(corpus, out, capsys):
    path = out / CHECKPOINT
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert f"{path} is damaged" in refusal(capsys, *arguments(corpus, out, "--steps", 3, "--resume"))


def test_a_deleted_checkpoint_trains_its_run_from_the_first_step(corpus, out, capsys):
    before = losses(out)
    (out / CHECKPOINT).unlink()
    assert main(arguments(corpus, out, "--resume")) == 0
    assert losses(out) == before
    assert "bf16 seed 0 begins behind step 0" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("other", ["mxfp8-seed0", "bf16-seed1"])
def test_the_checkpoint_of_another_run_is_refused(other, corpus, tmp_path, capsys):
    options = ("--recipe", "bf16,mxfp8", "--seeds", 2)
    assert main(arguments(corpus, tmp_path, *options)) == 0
    shutil.copy(tmp_path / "checkpoints" / f"{other}.pt", tmp_path / CHECKPOINT)
    sentence = refusal(capsys, *arguments(corpus, tmp_path, *options, "--steps", 3, "--resume"))
    recipe, seed = other.split("-seed")
    assert f"{CHECKPOINT} has the checkpoint of another run, {recipe} with seed {seed}." in sentence


# --- damaged metrics


def without(line):
    return lambda lines: lines[:line] + lines[line + 1 :]


def another_digit(lines):
    return [re.sub(rb'("loss": \d\.)(\d)', lambda m: m[1] + (b"1" if m[2] == b"0" else b"0"), line) for line in lines]


@pytest.mark.parametrize(
    "change",
    [None, lambda lines: [], without(0), without(1), lambda lines: [lines[0], *lines], lambda lines: lines[::-1],
     another_digit],
    ids=["missing", "empty", "first", "second", "doubled", "reversed", "another digit"],
)  # fmt: skip
def test_metrics_that_are_not_those_of_the_checkpoint_are_refused(change, corpus, out, capsys):
    path = out / "metrics.jsonl"
    if change is None:
        path.unlink()
    else:
        changed = b"".join(change(path.read_bytes().splitlines(keepends=True)))
        assert changed != path.read_bytes()
        path.write_bytes(changed)
    before = contents(out)
    sentence = refusal(capsys, *arguments(corpus, out, "--steps", 3, "--resume"))
    assert f"{path} does not have the lines that {out / CHECKPOINT} was written with, up to step 2." in sentence
    assert {k: v for k, v in contents(out).items() if k.name != "run.json"} == {
        k: v for k, v in before.items() if k.name != "run.json"
    }


@pytest.mark.parametrize(
    "line",
    [
        b"\x00\xff\n",
        b"{\n",
        b"[]\n",
        b"{}\n",
        b"1\n",
        b'{"recipe": "bf16", "seed": {}}\n',
        b'{"recipe": ["bf16"], "seed": 0, "step": 1}\n',
        b'{"recipe": "bf16", "seed": 0, "step": 1e999}\n',
        b'{"recipe": "bf16", "seed": 0, "step": "1"}\n',
        b"[" * 100_000 + b"\n",
    ],
)
def test_a_damaged_line_is_named(line, corpus, out, capsys):
    path = out / "metrics.jsonl"
    first, *rest = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([first, line, *rest]))
    sentence = refusal(capsys, *arguments(corpus, out, "--steps", 3, "--resume"))
    assert f"Line 2 of {path} is no record of a run" in sentence


# --- other settings


@pytest.mark.parametrize(
    ("change", "says"),
    [({"learning_rate": 0.5}, "learning_rate 0.001, this call has 0.5"), ({"batch_size": 8}, "batch_size 4"),
     ({"context": 16}, "context 32")],
    ids=["learning rate", "batch size", "context"],
)  # fmt: skip
def test_other_settings_are_refused(change, says, corpus, out, monkeypatch, capsys):
    monkeypatch.setitem(LANGUAGE_MODELS, "micro", dataclasses.replace(LANGUAGE_MODELS["micro"], **change))
    before = losses(out)
    sentence = refusal(capsys, *arguments(corpus, out, "--steps", 3, "--resume"))
    assert f"{out / CHECKPOINT} was made with {says}" in sentence and "Resume with the same settings" in sentence
    assert losses(out) == before


@pytest.mark.parametrize("name", ["BALANCE_COEFFICIENT", "WARMUP_STEPS", "MAX_GRAD_NORM", "VALIDATION_BATCHES"])
def test_another_constant_of_the_training_is_refused(name, corpus, out, monkeypatch, capsys):
    monkeypatch.setattr(f"bench.train.{name}", 7)
    assert f"was made with {name.lower()} " in refusal(capsys, *arguments(corpus, out, "--steps", 3, "--resume"))


def test_another_model_is_refused(corpus, out, capsys):
    sentence = refusal(capsys, *arguments(corpus, out, "--steps", 3, "--resume", "--model", "tiny"))
    assert "was made with model micro, this call has tiny" in sentence


def test_fewer_steps_than_the_checkpoint_has_are_refused(corpus, out, capsys):
    sentence = refusal(capsys, *arguments(corpus, out, "--steps", 1, "--resume"))
    assert "is of step 2, but this call ends at step 1. Give --steps 2 or more" in sentence


def test_settings_are_compared_before_anything_is_trained(corpus, out, capsys):
    before = losses(out)
    refusal(capsys, *arguments(corpus, out, "--recipe", "mxfp8,bf16", "--steps", 1, "--resume"))
    assert losses(out) == before


# --- disks

LIMITED = """
import resource, sys
from bench.__main__ import main

resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2)
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
def test_a_disk_that_is_full_in_the_middle_is_a_sentence_and_the_run_goes_on_later(corpus, trained, tmp_path):
    """A limit on the size of files stands for the disk: lines fit, checkpoints do not."""
    command = [sys.executable, "-c", LIMITED, "10000", *arguments(corpus, tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert (
        f"{CHECKPOINT}.part: File too large. Make room, or make it writable, then go on with --resume." in done.stderr
    )
    assert not list(tmp_path.rglob("*.pt*"))
    assert main(arguments(corpus, tmp_path, "--resume")) == 0
    assert losses(tmp_path) == losses(trained)


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("name", ["metrics.jsonl", f"{CHECKPOINT}.part"])
def test_what_does_not_fit_on_the_disk_is_a_sentence(name, out):
    with open_run_files(out, [KEY], resume=True) as files:
        before = (out / CHECKPOINT).read_bytes()
        (out / name).unlink(missing_ok=True)
        (out / name).symlink_to(FULL)
        with pytest.raises(UsageError, match=f"{name}: No space left on device. Make room"):
            files.append({"recipe": "bf16", "seed": 0, "step": 3})
            files.save(KEY, {"step": 3})
        assert (out / CHECKPOINT).read_bytes() == before


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")
def test_a_report_that_does_not_fit_on_the_disk_is_a_sentence(corpus, out, capsys):
    (out / "summary.md").unlink()
    (out / "summary.md").symlink_to(FULL)
    assert "No space left on device. Make room" in refusal(capsys, *arguments(corpus, out, "--resume"))


@pytest.mark.parametrize("method", ["mkdir", "open", "write_text", "replace", "unlink"])
def test_a_read_only_disk_is_a_sentence(method, corpus, out, monkeypatch, capsys):
    real = getattr(Path, method)

    def refuse(path, *args, **kwargs):
        if out not in (path, *path.parents):
            return real(path, *args, **kwargs)
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, method, refuse)
    sentence = refusal(capsys, *arguments(corpus, out))
    assert "Read-only file system. " in sentence and str(out) in sentence


@pytest.mark.parametrize("below", ["file", "file/below"])
def test_an_out_that_is_a_file_is_a_sentence(below, corpus, tmp_path, capsys):
    (tmp_path / "file").write_text("others'")
    assert "Take an --out that can be written." in refusal(capsys, *arguments(corpus, tmp_path / below))
    assert (tmp_path / "file").read_text() == "others'"


def test_a_disk_without_locks_is_a_sentence(out, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("bench.run_lock.fcntl.flock", refuse)
    says = "run.lock cannot be locked: No locks available. Take an --out on a disk"
    with pytest.raises(UsageError, match=says), open_run_files(out, [KEY], resume=True):
        pass
