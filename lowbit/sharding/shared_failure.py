"""What ranks that load parts of the same parameters tell each other where one of them fails."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from lowbit.sharding.collective import device_of, host_device, rank, reduce_over
from lowbit.sharding.flat_shard import FlatShard, is_flat
from lowbit.sharding.tensor import is_dtensor, process_groups

CAUSES = ("", "damaged", "too large")  # of an error, by its `cause`


class SharedFailure:
    """One rank's view of a load that succeeds on all ranks or on none.

    Each exchange is a collective of one number. A rank that has failed goes on to the exchanges
    that the others wait in, and reads nothing more.

    Args:
        params: of the optimizer; the process groups are those of their meshes, and of flat shards.
        error: makes what is raised where another rank failed, from that rank and its cause.
        everywhere: whether all ranks take part, whatever the parameters are.
    """

    def __init__(
        self,
        params: Iterable[Any],
        error: Callable[[int, str], BaseException],
        *,
        everywhere: bool = False,
    ) -> None:
        self.failure: BaseException | None = None
        import torch.distributed as dist

        self._error, self._code, self._over = error, 0, False
        found = dict.fromkeys(group for p in params for group in _groups_of(p))
        if everywhere and dist.is_available() and dist.is_initialized():
            found[dist.group.WORLD] = None
        # In one order on all ranks, and there and back, so that all hear of it where a rank is in
        # some of the groups only: each is entered twice on each of its ranks.
        # torch without torch.distributed has no such function, and here no groups.
        groups = sorted(found, key=lambda group: dist.get_process_group_ranks(group))
        self._groups = [*groups, *reversed(groups)]

    @contextlib.contextmanager
    def together(self) -> Iterator[SharedFailure]:
        """A load, at whose end all ranks know whether it succeeded."""
        try:
            yield self
        except Exception as error:
            if self._over:
                raise
            self._fail(error)
        try:
            self.exchange(self._groups)
        except Exception as error:  # such as the time-out of ranks that have ended
            failure, self.failure = self.failure, None
            raise error from failure
        self.raise_failure()

    def check(self) -> None:
        """Raises on all ranks if one has failed so far."""
        self.exchange(self._groups)
        self._over = self.failure is not None
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raises what made this rank or another one fail, if one did. It is forgotten here: its
        frames hold this object, and all that was loaded.
        """
        failure, self.failure = self.failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure

    def attempt(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """What `work` returns; None where it fails, or this rank or another one has failed."""
        if self.failure is None:
            try:
                return work(*arguments)
            except Exception as error:
                self._fail(error)
        return None

    def exchange(self, groups: Iterable[Any]) -> None:
        """Tells the ranks of each group, and hears from them."""
        for group in groups:
            device = host_device([group], device_of(group))
            told = torch.tensor([self._code], dtype=torch.int64, device=device)
            reduce_over([(told, group, "max")])
            self._code = int(told)
            if self._code and self.failure is None:
                who, cause = divmod(self._code - 1, len(CAUSES))
                self.failure = self._error(who, CAUSES[cause])

    def _fail(self, error: BaseException) -> None:
        if self.failure is None:
            cause = getattr(error, "cause", "")
            self._code = 1 + rank() * len(CAUSES) + CAUSES.index(cause if cause in CAUSES else "")
        self.failure = self.failure or error


def _groups_of(p: Any) -> list[Any]:
    """The groups of a parameter's parts, and in a mesh those of its replicas; none where it is
    whole here, or lies in a vector of which nobody knows the parts.
    """
    if isinstance(p, FlatShard):
        return [group for _, group in p.part.cuts]
    if is_flat(p) or not (cut := process_groups(p)):
        return []
    if not is_dtensor(p):
        return list(cut)
    mesh = p.device_mesh
    return [mesh.get_group(i) for i in range(mesh.ndim) if mesh.size(i) > 1]
