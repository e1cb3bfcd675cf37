"""How far a piece of work is: what the commands, Writer and Reader tell their callers."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], bool | None]


class Shown:
    """A progress callback out of what callers give;
    for True a bar that goes when the work is done.
    """

    def __init__(self, progress: Progress | bool | None, label: str) -> None:
        self.progress, self.label, self.bar = progress, label, None

    def __enter__(self) -> Progress | None:
        if self.progress is None or self.progress is False:
            return None
        if self.progress is not True:
            return self.progress
        try:
            from tqdm.auto import tqdm
        except ImportError as error:
            raise ImportError(
                "progress=True draws with tqdm: pip install tqdm, or give a callback"
            ) from error
        self.bar = tqdm(desc=self.label, unit="B", unit_scale=True, disable=None, leave=False)
        return self._update

    def _update(self, done: int, total: int) -> None:
        assert self.bar is not None
        self.bar.total = total
        self.bar.update(done - self.bar.n)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()


class Steps:
    """Work of several calls as one: each tells its own bytes, and `progress` hears of all."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def next(self, size: int) -> Progress | None:
        """What a call is given that does `size` bytes of the total,
        by whatever bytes it counts itself.
        """
        progress, before = self.progress, self.done
        self.done += size
        if progress is None:
            return None
        return lambda done, of: progress(before + (size * done // of if of else size), self.total)
