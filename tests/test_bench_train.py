"""The main job on a micro model: its files, taking up after a kill, switching recipes on a live model."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.__main__ import main
from bench.controls import CONTROLS
from bench.corpus import batch
from bench.language_model import LANGUAGE_MODELS, LanguageModel
from bench.plots import save
from bench.report import complaints, outcomes
from bench.run_files import read_metrics
from bench.schedule import RecipeSchedule, numerics
from bench.usage import UsageError
from recipes import Float8CurrentScaling, Format

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("corpus")
    for index in range(4):
        lines = (f"value_{index}_{line} = {line * line}  # the square of {line}\n" for line in range(200))
        (directory / f"text{index}.py").write_text("".join(lines))
    return str(directory)


def arguments(corpus, out, *more):
    return ["train", "--model", "micro", "--corpus", corpus, "--out", str(out), *map(str, more)]


def curve(out):
    """The metrics without the clock."""
    return [{k: v for k, v in record.items() if k != "tokens_per_s"} for record in read_metrics(out / "metrics.jsonl")]


# --- what a run leaves behind


@pytest.mark.slow
def test_all_files_are_written(corpus, tmp_path, capsys):
    code = main(arguments(corpus, tmp_path, "--recipe", "bf16,fp8_current,mxfp8", "--steps", 3, "--seeds", 2))
    assert code == 0
    records = read_metrics(tmp_path / "metrics.jsonl")
    runs = [("bf16", 0), ("bf16", 1), ("fp8_current", 0), ("mxfp8", 0)]
    assert [(r["recipe"], r["seed"], r["step"]) for r in records if "loss" in r] == [
        (recipe, seed, step) for recipe, seed in runs for step in (1, 2, 3)
    ]
    assert [(r["recipe"], r["seed"]) for r in records if "validation_loss" in r] == runs
    assert {"lr", "grad_norm", "tokens_per_s", "load_balancing_loss"} <= records[0].keys()
    assert len(list((tmp_path / "checkpoints").iterdir())) == len(runs)

    summary = (tmp_path / "summary.md").read_text()
    printed = capsys.readouterr().out
    assert summary in printed
    for needed in ("| bf16 |", "| fp8_current |", "| mxfp8 |", "emulated", "native", "sha256", torch.__version__):
        assert needed in summary
    assert "the noise between seeds" in summary
    pytest.importorskip("matplotlib")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_summary_says_so(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("bench.plots.find_spec", lambda name: None)
    assert main(arguments(corpus, tmp_path, "--recipe", "bf16", "--steps", 1)) == 0
    assert "matplotlib is not installed" in (tmp_path / "summary.md").read_text()
    assert not (tmp_path / "loss.png").exists()


@pytest.mark.slow
def test_a_new_run_replaces_the_old_one(corpus, tmp_path):
    main(arguments(corpus, tmp_path, "--recipe", "bf16,mxfp8", "--steps", 2))
    main(arguments(corpus, tmp_path, "--recipe", "bf16", "--steps", 1))
    assert [(r["recipe"], r["step"]) for r in curve(tmp_path)] == [("bf16", 1), ("bf16", 1)]


def test_check_fails_where_a_recipe_falls_behind_or_is_not_finite(tmp_path):
    def write(**losses):
        records = [
            {"recipe": recipe, "seed": 0, "step": 1, **figures}
            for recipe, loss in losses.items()
            for figures in ({"loss": loss, "tokens_per_s": 1.0}, {"validation_loss": loss})
        ]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return complaints(tmp_path)

    assert write(bf16=2.0, mxfp8=2.039) == []
    assert write(bf16=2.0, mxfp8=2.05) == [
        "the validation loss of mxfp8 is 2.0500, 2.5% above that of bf16; 2% are allowed."
    ]
    assert write(bf16=2.0, mxfp8=1.9) == [
        "the validation loss of mxfp8 is 1.9000, 5.0% below that of bf16; 2% are allowed."
    ]
    assert write(bf16=2.0, mxfp8=float("nan")) == ["the validation loss of mxfp8 is nan."]
    assert write(bf16=float("nan"), mxfp8=2.0) == ["the validation loss of bf16 is nan."]


def test_check_fails_where_300_steps_did_not_beat_the_bigram_entropy(tmp_path):
    records = [{"recipe": "bf16", "seed": 0, "step": i, "loss": 2.5, "tokens_per_s": 1.0} for i in range(1, 301)]
    records.append({"recipe": "bf16", "seed": 0, "step": 300, "validation_loss": 2.5})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert complaints(tmp_path, 2.6) == []
    assert complaints(tmp_path, 2.43) == [
        "the validation loss of bf16 is 2.5000 after 300 steps, not below the corpus' bigram entropy of 2.4300."
    ]


def test_a_run_without_validation_is_left_out_of_the_report(tmp_path):
    lines = [
        {"recipe": "bf16", "seed": 0, "step": 1, "loss": 2.0, "tokens_per_s": 1.0},
        {"recipe": "bf16", "seed": 0, "step": 1, "validation_loss": 2.0},
        {"recipe": "mxfp8", "seed": 0, "step": 1, "loss": 2.0, "tokens_per_s": 1.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(outcomes(tmp_path)) == ["bf16"]


# --- taking up again


# Kills itself after a number of lines, in the middle of a line: what a machine that fails leaves behind.
DIES = """
import os, signal, sys, torch
from bench.__main__ import main
from bench.run_files import RunFiles

lines_left, append = {lines}, RunFiles.append

def append_or_die(files, record):
    global lines_left
    if lines_left == 0:
        with files.metrics_path.open("a") as file:
            file.write('{{"recipe": "mxf')
        os.kill(os.getpid(), signal.SIGKILL)
    lines_left -= 1
    append(files, record)

RunFiles.append = append_or_die
torch.set_num_threads({threads})
torch.use_deterministic_algorithms({deterministic})
main({arguments})
"""


@pytest.mark.slow
def test_run_killed_in_the_middle_gives_the_same_curve(corpus, tmp_path):
    options = ("--recipe", "bf16,mxfp8", "--steps", 20, "--checkpoint-every", 7, "--validate-every", 10)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    main(arguments(corpus, whole, *options))

    program = DIES.format(
        lines=34,  # the second recipe's step 12, behind its checkpoint of step 7
        threads=torch.get_num_threads(),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        arguments=arguments(corpus, killed, *options),
    )
    process = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.DEVNULL, timeout=300)
    assert process.returncode == -signal.SIGKILL
    assert curve(killed) == curve(whole)[:34]

    main(arguments(corpus, killed, *options, "--resume"))
    assert curve(killed) == curve(whole)


@pytest.mark.slow
def test_resume_goes_on_to_more_steps(corpus, tmp_path):
    options = ("--recipe", "bf16", "--validate-every", 3)
    main(arguments(corpus, tmp_path / "whole", *options, "--steps", 6))
    main(arguments(corpus, tmp_path / "parts", *options, "--steps", 3))
    main(arguments(corpus, tmp_path / "parts", *options, "--steps", 6, "--resume"))
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")


@pytest.mark.slow
def test_resume_adds_a_recipe_to_a_finished_comparison(corpus, tmp_path):
    main(arguments(corpus, tmp_path, "--recipe", "bf16", "--steps", 2))
    before = curve(tmp_path)
    main(arguments(corpus, tmp_path, "--recipe", "bf16,mxfp8", "--steps", 2, "--resume"))
    after = curve(tmp_path)
    assert after[: len(before)] == before
    assert {record["recipe"] for record in after[len(before) :]} == {"mxfp8"}


def test_resume_refuses_another_corpus(corpus, tmp_path, capsys):
    main(arguments(corpus, tmp_path / "out", "--recipe", "bf16", "--steps", 1))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "text.txt").write_text("another text\n" * 500)
    with pytest.raises(SystemExit) as exit_info:
        main(arguments(str(tmp_path / "other"), tmp_path / "out", "--recipe", "bf16", "--steps", 2, "--resume"))
    assert exit_info.value.code == 2
    assert "was made with corpus" in capsys.readouterr().err


# --- negative controls


@pytest.mark.slow
def test_controls_are_trained_drawn_dashed_and_not_asked_to_keep_up(corpus, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    for label in list(CONTROLS):
        monkeypatch.delitem(CONTROLS, label)
    monkeypatch.setitem(CONTROLS, "e5m2-test", lambda: Float8CurrentScaling(fp8_format=Format.E5M2))
    styles = {}

    def take_styles(figure, path):
        styles.update({line.get_label().split()[0]: line.get_linestyle() for line in figure.axes[0].lines})
        save(figure, path)

    monkeypatch.setattr("bench.report.save", take_styles)
    assert main(arguments(corpus, tmp_path, "--recipe", "bf16,mxfp8", "--controls", "--steps", 2)) == 0
    assert [record["recipe"] for record in curve(tmp_path) if record["step"] == 1] == ["bf16", "mxfp8", "e5m2-test"]
    assert (styles["bf16"], styles["mxfp8"], styles["e5m2-test"]) == ("-", "-", "--")
    assert "Negative controls, drawn dashed and not compared: e5m2-test." in capsys.readouterr().out

    records = [
        {"recipe": recipe, "seed": 0, "step": 1, **figures}
        for recipe, loss in (("bf16", 2.0), ("e5m2-test", 3.0), ("bf16+2:e5m2-test", 3.0))
        for figures in ({"loss": loss, "tokens_per_s": 1.0}, {"validation_loss": loss})
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert complaints(tmp_path) == []


# --- switching recipes


def test_schedule_names_the_recipe_of_each_step():
    schedule = RecipeSchedule.parse("bf16", ("50:mxfp8", "80:bf16"))
    assert schedule.label == "bf16+50:mxfp8+80:bf16"
    assert RecipeSchedule.parse(schedule.label) == schedule
    assert [schedule.at(step) for step in (1, 49, 50, 79, 80, 300)] == [
        "bf16",
        "bf16",
        "mxfp8",
        "mxfp8",
        "bf16",
        "bf16",
    ]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("bf17", "no recipe named 'bf17'"),
        ("bf16+mxfp8", "'mxfp8' is no switch. Write STEP:RECIPE"),
        ("bf16+50:mxfp8+50:bf16", "Give rising steps"),
        ("bf16+1:mxfp8", "Give rising steps above 1"),
    ],
)
def test_bad_schedule_is_refused_in_a_sentence(text, sentence):
    with pytest.raises(UsageError, match=sentence):
        RecipeSchedule.parse(text)


@pytest.mark.slow
def test_switched_run_equals_the_first_recipe_up_to_the_switch(corpus, tmp_path):
    main(arguments(corpus, tmp_path / "plain", "--recipe", "bf16", "--steps", 6))
    main(arguments(corpus, tmp_path / "switched", "--recipe", "bf16", "--switch", "4:mxfp8", "--steps", 6))
    plain, switched = ([r["loss"] for r in curve(tmp_path / name) if "loss" in r] for name in ("plain", "switched"))
    assert switched[:3] == plain[:3]
    assert switched[3:] != plain[3:]
    assert [r["active"] for r in curve(tmp_path / "switched")][2:4] == ["bf16", "mxfp8"]


@pytest.mark.parametrize(
    ("first", "second"), [("bf16", "mxfp8"), ("mxfp8", "bf16"), ("fp8_current", "mxfp8"), ("fp32", "fp8_current")]
)
def test_first_recipe_again_equals_itself_bit_for_bit(first, second):
    config = LANGUAGE_MODELS["micro"]
    torch.manual_seed(0)
    model = LanguageModel(config)
    data = torch.randint(256, (4096,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    inputs, targets = batch(data, batch_size=config.batch_size, context=config.context, seed=0, step=1)

    def step(recipe):
        model.zero_grad()
        with numerics(recipe, CPU):
            logits, balance = model(inputs)
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        (loss + balance).backward()
        return [logits.detach().clone(), *[parameter.grad.clone() for parameter in model.parameters()]]

    before, between, after = step(first), step(second), step(first)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before, between, strict=True))


# --- the model


def test_every_parameter_learns():
    config = LANGUAGE_MODELS["micro"]
    torch.manual_seed(0)
    model = LanguageModel(config)
    inputs = torch.randint(256, (config.batch_size, config.context))
    logits, balance = model(inputs)
    assert logits.shape == (*inputs.shape, 256)
    (logits.square().mean() + balance).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_model_sees_no_later_byte():
    config = LANGUAGE_MODELS["micro"]
    torch.manual_seed(0)
    model = LanguageModel(config).double()
    inputs = torch.randint(256, (config.batch_size, config.context))
    changed = inputs.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 256
    with torch.no_grad():
        before, after = model(inputs)[0], model(changed)[0]
    torch.testing.assert_close(before[:, :20], after[:, :20], rtol=0, atol=1e-12)
    assert not torch.allclose(before[:, 20:], after[:, 20:])


def test_tiny_model_has_a_million_parameters():
    with torch.device("meta"):
        model = LanguageModel(LANGUAGE_MODELS["tiny"])
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(1.0e6, rel=0.01)
