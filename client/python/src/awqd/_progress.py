"""A progress bar for rows that arrive."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Union

# True: a bar on stderr or in a notebook. A function is called with (rows so far, rows in all).
Progress = Union[bool, Callable[[int, int], None]]


class Bar:
    """Shows or passes on how far a transfer is. Does nothing for progress=False."""

    def __init__(self, progress: Progress, title: str) -> None:
        self._progress = progress
        self._title = title
        self._bar: Any = None

    def update(self, done: int, total: int, row_bytes: int) -> None:
        if callable(self._progress):
            self._progress(done, total)
        elif self._progress:
            if self._bar is None:
                from tqdm.auto import tqdm
                self._bar = tqdm(total=total * row_bytes, desc=self._title, unit="B", unit_scale=True, unit_divisor=1024)
            self._bar.update(done * row_bytes - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
