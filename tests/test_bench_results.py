"""Where figures are written: below the directory of the call, never beside the package."""

import json
from pathlib import Path

import pytest

from bench import results
from bench.__main__ import main
from bench.results import DIRECTORY, write_results
from bench.usage import UsageError

TINY = ["recipes", "--model", "tiny-olmoe-1b-7b", "--tokens", "16", "--steps", "1", "--recipes", "bf16"]


def test_figures_are_written_below_the_directory_of_the_call(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*TINY, "--json"]) == 0
    written = tmp_path / "bench" / "results" / "recipes-cpu.json"
    assert json.loads(written.read_text())["benchmark"] == "recipes"
    assert f"written: {written.relative_to(tmp_path)}" in capsys.readouterr().out
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [written]


def test_the_default_is_no_part_of_the_package():
    package = Path(results.__file__).parent
    assert not DIRECTORY.is_absolute() and package not in DIRECTORY.parents


def test_a_directory_that_is_given_takes_a_file_of_the_benchmarks_name(tmp_path):
    assert write_results(tmp_path, "casts", "cpu", {}) == tmp_path / "casts-cpu.json"


def test_a_file_that_cannot_be_written_is_a_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="figures.json: File exists. Give --json another file."):
        write_results(tmp_path / "file" / "figures.json", "casts", "cpu", {})
