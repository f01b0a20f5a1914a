"""Progress of a training run: a bar on a terminal (if rich is installed), otherwise a line after every tenth."""

import sys
from types import TracebackType

try:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
except ImportError:
    Progress = None  # type: ignore[assignment,misc]


class TrainingProgress:
    """Context manager; call `step(...)` after each step. Prints to stdout."""

    def __init__(self) -> None:
        self._bar = None
        if Progress is not None and sys.stdout.isatty():
            self._bar = Progress(
                TextColumn("{task.description:24}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}"),
            )
        self._tasks: dict[str, int] = {}

    def __enter__(self) -> "TrainingProgress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def step(self, label: str, step: int, steps: int, loss: float, tokens_per_s: float) -> None:
        figures = f"loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s"
        if self._bar is None:
            if step == steps or step % max(1, steps // 10) == 0:
                print(f"{label:24} {step:5}/{steps}  {figures}", flush=True)
            return
        if label not in self._tasks:
            self._tasks[label] = self._bar.add_task(label, total=steps, figures=figures)
        self._bar.update(self._tasks[label], completed=step, figures=figures)  # type: ignore[arg-type]
