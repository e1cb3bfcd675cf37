"""The step of all parameters under DistributedDataParallel, once its reducer has finished."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lowbit import sharding


class AfterReducer:
    """A step that hooks on gradients queue, for when the reducer of a model has finished.

    Gradients that are still in p.grad after the backward pass are left to `opt.step()`: those of
    the first pass under static_graph=True, and those whose last bucket no hook saw.
    """

    def __init__(self, model: Any, step: Callable[[], None]) -> None:
        self._model, self._step = model, step
        self._queued = -1  # the backward pass that has a queued step

    def queue(self) -> None:
        """Queues the step for the end of the running backward pass, after the reducer's own
        callbacks.
        """
        task = torch._C._current_graph_task_id()
        if self._queued == task or not self._model.require_backward_grad_sync:
            return
        self._queued = task
        queue = torch.autograd.Variable._execution_engine.queue_callback
        # The reducer queues its end when the last bucket is ready.
        queue(lambda: queue(self._reduced))

    def _reduced(self) -> None:
        """Steps if the reducer has finished. Under checkpoint(use_reentrant=True) a callback runs
        when the nested pass of its layer ends, and other layers are still to come.
        """
        self._queued = -1  # a hook that comes later queues again
        if sharding.reducer_finished(self._model):
            self._step()
