"""Progress of a long study: a live bar on a terminal, plain lines (a log, a CI run) everywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

#: A line for a finished tenth comes no sooner than this after the last one.
TENTH_AFTER_S = 1.0


class Progress:
    """Counts finished steps of `total`, of which `done` were finished by an earlier run.

        with Progress("suite", total=2, console=console) as progress:
            progress.start("mlp")                   # shown while it runs
            progress.finish("mlp", "ratio 0.98")    # one lasting line

    Lasting lines are printed in both forms, so the log of a run holds what its terminal showed. With `tenths` a log has
    a line for each finished tenth of the steps that `advance` counts, too.
    """

    def __init__(
        self,
        title: str,
        total: int,
        console: Console,
        clock: Callable[[], float] = time.perf_counter,
        done: int = 0,
        tenths: bool = False,
    ):
        self._title = title
        self._total = total
        self._console = console
        self._clock = clock
        self._done = done
        self._tenths = tenths
        self._bar: RichProgress | None = None

    def __enter__(self) -> Progress:
        self._started_s = self._said_s = self._clock()
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = RichProgress(*columns, console=self._console, transient=True)
            self._bar.start()
            self._task = self._bar.add_task(escape(self._title), total=self._total, completed=self._done)
        return self

    def start(self, step: str) -> None:
        """Shows `step` as the one that runs now (terminal only: a log gets its line when there is a result)."""
        if self._bar is not None:
            self._bar.update(self._task, description=escape(f"{self._title}: {step}"))

    def finish(self, step: str, result: str) -> None:
        """Counts one step and prints its result."""
        self._done += 1
        elapsed_s = self._clock() - self._started_s
        self.note(f"{self._title} {self._done}/{self._total} {elapsed_s:5.0f} s  {step}: {result}")
        if self._bar is not None:
            self._bar.advance(self._task)

    def advance(self, step: str) -> None:
        """Counts one step of many without a line of its own, and shows `step` as the one that runs now."""
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=escape(f"{self._title}: {step}"))
        elif self._tenths and 10 * self._done // self._total > 10 * (self._done - 1) // self._total:
            now_s = self._clock()
            if now_s - self._said_s >= TENTH_AFTER_S:
                self._said_s = now_s
                self.note(f"{self._title} {self._done}/{self._total} {now_s - self._started_s:5.0f} s")

    def note(self, text: str) -> None:
        """Prints a lasting line that is no step: a file set aside, steps kept from an earlier run."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None):
        if self._bar is not None:
            self._bar.stop()
