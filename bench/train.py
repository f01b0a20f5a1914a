"""The training demo: train a byte-level mixture-of-experts language model under several recipes and compare them.

Every recipe starts from the same weights and uses the same batches, so curves differ only by the number formats.
Parameters and optimizer are fp32. The recipe belongs to the step, not to the model: switching it rebuilds nothing.
A killed run continues with `--resume`, and on the CPU its curve is bit for bit that of an uninterrupted run. Resuming
requires undamaged files and the same settings.

With `--ep` and `--dp` there are ep times dp ranks: ep of them divide the experts of each layer, and all divide each
batch. Weights and batches are those of one process, so curves differ by rounding alone. Rank 0 writes the files. A
checkpoint is that of one process, and any number of ranks resumes it. `--transport symmetric` is for GPUs: tokens go by
kernels that write into the memory of the other GPUs.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bench.controls import CONTROLS
from bench.corpus import Corpus, batch, read_corpus
from bench.language_model import LANGUAGE_MODELS, LanguageModel, LanguageModelConfig
from bench.progress import TrainingProgress
from bench.ranks import is_rank, joined, launch, require_gpus
from bench.report import complaints, write_report
from bench.run_files import Record, RunFiles, RunKey, open_run_files
from bench.schedule import BASELINE, RecipeSchedule, known_recipes, numerics
from bench.train_ranks import TrainRanks
from bench.usage import UsageError, on_disk, require_device
from fuser.distributed import TrainingState, clip_grad_norm_
from ops.kernels.routing.transports import TRANSPORTS

BALANCE_COEFFICIENT = 1e-2
WARMUP_STEPS = 10
MAX_GRAD_NORM = 1.0
VALIDATION_BATCHES = 16
VALIDATION_SEED = 2**31  # not used by any training run


@dataclass(frozen=True)
class TrainConfig:
    """What to train. The baseline (bf16) runs with seeds 0 .. seeds - 1, every other recipe with seed 0."""

    out: Path
    schedules: tuple[RecipeSchedule, ...]
    model: str = "tiny"
    steps: int = 100
    seeds: int = 1
    device: str = "cpu"
    checkpoint_every: int = 50
    validate_every: int = 100
    resume: bool = False
    ep: int = 1
    dp: int = 1
    transport: str = "alltoall"

    def runs(self) -> list[tuple[RecipeSchedule, int]]:
        return [
            (schedule, seed)
            for schedule in self.schedules
            for seed in range(self.seeds if schedule.label == BASELINE else 1)
        ]

    def run_keys(self) -> list[RunKey]:
        return [RunKey(schedule.label, seed) for schedule, seed in self.runs()]

    def settings(self, corpus: Corpus) -> dict[str, Any]:
        """All settings that determine a run's curve, except its recipe, seed and steps."""
        return {
            "model": self.model,
            "corpus": corpus.sha256,
            "device": self.device,
            **asdict(LANGUAGE_MODELS[self.model]),
            "balance_coefficient": BALANCE_COEFFICIENT,
            "warmup_steps": WARMUP_STEPS,
            "max_grad_norm": MAX_GRAD_NORM,
            "validation_batches": VALIDATION_BATCHES,
            "optimizer_state": "by parameter name",
        }


def train(
    config: TrainConfig,
    corpus: Corpus,
    files: RunFiles | None,
    ranks: TrainRanks,
    on_step: Callable[[str, int, int, float, float], None] | None = None,
) -> None:
    """Do all runs of `config`, one after the other, and write `files`' metrics and checkpoints.

    files: of the first rank; None on the others. `on_step(label, step, steps, loss, tokens per second)` is called after
    every step. Raises UsageError before any training if an existing checkpoint was written with other settings or is
    beyond `config.steps`.
    """
    for key in config.run_keys() if files is not None else ():
        _require_same_settings(config, corpus, files, key)
    for schedule, seed in config.runs():
        _Run(config, corpus, files, ranks, schedule, seed).go(on_step or (lambda *_: None))


def _require_same_settings(config: TrainConfig, corpus: Corpus, files: RunFiles, key: RunKey) -> None:
    state = files.load(key)
    if state is None:
        return
    path, theirs, ours = files.checkpoint_path(key), state["settings"], config.settings(corpus)
    for name in [*ours, *(theirs.keys() - ours.keys())]:
        if theirs.get(name) != ours.get(name):
            raise UsageError(
                f"{path} was made with {name} {theirs.get(name)}, this call has {ours.get(name)}. Resume with the same "
                "settings, or take another --out."
            )
    if state["step"] > config.steps:
        raise UsageError(
            f"{path} is of step {state['step']}, but this call ends at step {config.steps}. Give --steps "
            f"{state['step']} or more, or take another --out."
        )


class _Run:
    """One model, one seed, one schedule of recipes."""

    def __init__(
        self,
        config: TrainConfig,
        corpus: Corpus,
        files: RunFiles | None,
        ranks: TrainRanks,
        schedule: RecipeSchedule,
        seed: int,
    ) -> None:
        self.config, self.corpus, self.files, self.ranks = config, corpus, files, ranks
        self.schedule, self.seed = schedule, seed
        self.key = RunKey(schedule.label, seed)
        self.size: LanguageModelConfig = LANGUAGE_MODELS[config.model]
        self.device = torch.device(config.device)
        torch.manual_seed(seed)
        whole = LanguageModel(self.size)
        if ranks.mesh is None:
            self.model = whole.to(self.device)
        else:
            self.model = LanguageModel(self.size, ranks.mesh, config.transport).to(self.device)
            TrainingState(self.model).load_state_dict(TrainingState(whole).state_dict())
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def go(self, on_step: Callable[[str, int, int, float, float], None]) -> None:
        config = self.config
        label = f"{self.key.recipe} seed {self.seed}"
        for step in range(self._take_up() + 1, config.steps + 1):
            record = self._train_step(step)
            self._append(record)
            on_step(label, step, config.steps, record["loss"], record["tokens_per_s"])
            if step % config.validate_every == 0 or step == config.steps:
                self._append(self._validate(step))
            if step % config.checkpoint_every == 0 or step == config.steps:
                state = self._state(step)
                if self.files is not None:
                    self.files.save(self.key, state)

    def _append(self, record: Record) -> None:
        if self.files is not None:
            self.files.append(record)

    def _train_step(self, step: int) -> Record:
        start = time.perf_counter()
        inputs, targets = self._batch(self.corpus.train, self.seed, step)
        learning_rate = self.size.learning_rate * min(1.0, step / WARMUP_STEPS)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

        loss, balance = self._losses(inputs, targets, step)
        self.optimizer.zero_grad()
        ((loss + BALANCE_COEFFICIENT * balance) / self.ranks.count).backward()
        self.ranks.sum_gradients(self.model)
        grad_norm = clip_grad_norm_(self.model, MAX_GRAD_NORM)
        self.optimizer.step()

        figures = {"loss": self.ranks.mean(loss), "load_balancing_loss": self.ranks.mean(balance)}
        figures["grad_norm"] = grad_norm.item()
        seconds = time.perf_counter() - start
        tokens = self.ranks.count * inputs.numel()
        return self._record(step, **figures, lr=learning_rate, tokens_per_s=tokens / seconds)

    @torch.no_grad()
    def _validate(self, step: int) -> Record:
        losses = []
        for index in range(VALIDATION_BATCHES):
            inputs, targets = self._batch(self.corpus.validation, VALIDATION_SEED, index)
            losses.append(self._losses(inputs, targets, step)[0])
        return self._record(step, validation_loss=self.ranks.mean(torch.stack(losses).mean()))

    def _batch(self, data: Tensor, seed: int, step: int) -> tuple[Tensor, Tensor]:
        size = self.size
        inputs, targets = batch(data, batch_size=size.batch_size, context=size.context, seed=seed, step=step)
        return self.ranks.share(inputs).to(self.device), self.ranks.share(targets).to(self.device)

    def _losses(self, inputs: Tensor, targets: Tensor, step: int) -> tuple[Tensor, Tensor]:
        with numerics(self.schedule.at(step), self.device):
            logits, balance = self.model(inputs)
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten()), balance

    def _record(self, step: int, **figures: float) -> Record:
        return {"recipe": self.key.recipe, "seed": self.seed, "step": step, "active": self.schedule.at(step), **figures}

    def _state(self, step: int) -> dict[str, Any]:
        """That of all ranks, as one process has it."""
        state = {
            "step": step,
            "settings": self.config.settings(self.corpus),
            **TrainingState(self.model, self.optimizer).whole_state_dict(),
            "rng": torch.get_rng_state(),
        }
        if self.device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state(self.device)
        return state

    def _take_up(self) -> int:
        """Load the run's checkpoint, if there is one, and return its step (0 if there is none)."""
        files, key = self.files, self.key
        state = self.ranks.from_first(lambda: None if files is None else files.load(key))
        if state is None:
            return 0
        TrainingState(self.model, self.optimizer).load_state_dict(state)
        torch.set_rng_state(state["rng"])
        if "cuda_rng" in state and self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"], self.device)
        return state["step"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--recipe",
        default="bf16,fp8_current,mxfp8",
        help=f"recipes, separated by commas: {', '.join(known_recipes())}, fp32; "
        "bf16+50:mxfp8 changes over at step 50 (default: %(default)s)",
    )
    parser.add_argument(
        "--controls",
        action="store_true",
        help=f"train the negative controls too, drawn dashed: {', '.join(CONTROLS)}; --recipe takes them one by one",
    )
    parser.add_argument(
        "--switch",
        action="append",
        default=[],
        metavar="STEP:RECIPE",
        help="from this step on, every run goes on with this recipe, without a rebuild; may be given several times",
    )
    parser.add_argument(
        "--steps", type=_positive, default=100, help="training steps of each run (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds", type=_positive, default=1, help="bf16 runs, for the band behind the curves (default: %(default)s)"
    )
    parser.add_argument("--model", choices=LANGUAGE_MODELS, default="tiny", help="size (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    parser.add_argument(
        "--ep", type=_positive, default=1, help="ranks that divide the experts of each layer (default: %(default)s)"
    )
    parser.add_argument(
        "--dp", type=_positive, default=1, help="groups of such ranks: --ep times --dp processes (default: %(default)s)"
    )
    parser.add_argument(
        "--transport",
        choices=TRANSPORTS,
        default="alltoall",
        help="of tokens between the ranks of --ep; symmetric: on GPUs with peer access (default: %(default)s)",
    )
    parser.add_argument(
        "--threads", type=_positive, help="CPU threads of torch (default: 1 for micro and tiny, otherwise torch's own)"
    )
    parser.add_argument("--corpus", metavar="DIR", help="text to learn from (default: the standard library's sources)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/train"),
        help="directory of all results; what an earlier call wrote there is replaced unless --resume, other files are "
        "left as they are (default: %(default)s)",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the checkpoints in --out, with the same settings"
    )
    parser.add_argument(
        "--checkpoint-every", type=_positive, default=50, metavar="STEPS", help="(default: %(default)s)"
    )
    parser.add_argument("--validate-every", type=_positive, default=100, metavar="STEPS", help="(default: %(default)s)")
    parser.add_argument(
        "--check", action="store_true", help="exit with 1 if a recipe's validation loss is over 2 %% above that of bf16"
    )


def main(arguments: argparse.Namespace) -> int:
    """`python -m bench train`: train, write summary.md and loss.png, print the summary. Returns the exit code."""
    require_device(arguments.device)
    names = arguments.recipe.split(",")
    if arguments.controls:
        names += [label for label in CONTROLS if label not in names]
    schedules = tuple(RecipeSchedule.parse(name, tuple(arguments.switch)) for name in names)
    if arguments.check and BASELINE not in [schedule.label for schedule in schedules]:
        raise UsageError(f"--check compares with {BASELINE}, which is not among the runs. Add it to --recipe.")
    config = TrainConfig(
        out=arguments.out,
        schedules=schedules,
        model=arguments.model,
        steps=arguments.steps,
        seeds=arguments.seeds,
        device=arguments.device,
        checkpoint_every=arguments.checkpoint_every,
        validate_every=arguments.validate_every,
        resume=arguments.resume,
        ep=arguments.ep,
        dp=arguments.dp,
        transport=arguments.transport,
    )
    if config.transport == "symmetric" and (config.ep == 1 or config.device == "cpu"):
        raise UsageError("--transport symmetric is between the ranks of --ep 2 or more, with --device cuda.")
    ranks = config.ep * config.dp
    if ranks > 1:
        _require_divisible(config)
        require_gpus(ranks, config.device)
        if not is_rank():
            return launch(main, arguments, ranks, "--resume goes on from the last checkpoint.")
    threads = arguments.threads or LANGUAGE_MODELS[config.model].cpu_threads
    if threads:
        torch.set_num_threads(threads)
    corpus = read_corpus(arguments.corpus)
    with joined(config.device, dp=config.dp, ep=config.ep) as mesh:
        if mesh is not None and dist.get_rank() > 0:
            train(config, corpus, None, TrainRanks(mesh))
            return 0
        return _train_and_report(config, corpus, TrainRanks(mesh), check=arguments.check)


def _require_divisible(config: TrainConfig) -> None:
    size = LANGUAGE_MODELS[config.model]
    for name, has, by, divisor in (
        ("experts", size.num_experts, "--ep", config.ep),
        ("texts a batch", size.batch_size, "--ep times --dp", config.ep * config.dp),
    ):
        if has % divisor:
            raise UsageError(f"{by} is {divisor}, but must divide the {has} {name} of the model {config.model}.")


def _train_and_report(config: TrainConfig, corpus: Corpus, ranks: TrainRanks, *, check: bool) -> int:
    print(corpus.facts(), flush=True)
    if ranks.mesh is not None:
        divided = f"experts divided by {config.ep}, batches by {ranks.count}"
        print(f"{ranks.count} ranks: {divided}, transport {config.transport}", flush=True)
    with open_run_files(config.out, config.run_keys(), resume=config.resume) as files:
        if config.resume:
            for key in config.run_keys():
                print(f"{key.recipe} seed {key.seed} begins behind step {files.reached.get(key, 0)}", flush=True)
        start = time.perf_counter()
        with TrainingProgress() as progress:
            train(config, corpus, files, ranks, progress.step)
        print(f"trained in {time.perf_counter() - start:.0f} s\n")

        with on_disk(config.out, "Make room, or make it writable, then go on with --resume."):
            summary = write_report(config.out, corpus, model=config.model, device=config.device)
        print(summary)
        print(f"written: {', '.join(path.as_posix() for path in files.written())}")
        problems = complaints(config.out, corpus.bigram_entropy) if check else []
    for problem in problems:
        print(f"check failed: {problem}")
    return 1 if problems else 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value
