"""A progress bar on a terminal's standard error, and nothing elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress as Bar
    from rich.progress import TaskID


class Progress:
    """``update(done, total)`` as often as one likes; shown only where stderr is a terminal."""

    def __init__(self, title: str, *, is_shown: bool = True) -> None:
        self._title = title
        self._is_shown = is_shown and sys.stderr.isatty()
        self._bar: Bar | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Progress:
        if self._is_shown:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,
                # What goes to stdout is the answer: it must not be moved to the bar's stderr.
                redirect_stdout=False,
            )
            self._bar.start()
        return self

    def update(self, done: int, total: int) -> None:
        if self._bar is None:
            return
        if self._task is None:
            self._task = self._bar.add_task(self._title, total=total)
        self._bar.update(self._task, completed=done, total=total)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
