"""Hugging Face Transformers:
`Trainer(optimizer_cls_and_kwargs=lowbit.integrations.transformers.optimizer(args))`.
"""

from __future__ import annotations

import ast
import inspect
import weakref
from collections.abc import Callable
from typing import Any

from accelerate.state import GradientState
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.integrations import deepspeed_config
from transformers.trainer_callback import ExportableState

import lowbit
from lowbit import sharding
from lowbit.config.types import StateFormat
from lowbit.gradients.step_in_backward import InBackward
from lowbit.integrations.deepspeed import bind_when_initialized
from lowbit.optim.named import groups_for, no_optimizer, optimizer_named
from lowbit.optim.optimizer import LowbitOptimizer

# Optimizers of training runs that have ScheduleFreeCallback.
_with_callback: weakref.WeakSet[LowbitOptimizer] = weakref.WeakSet()

CONSTANT = ("constant", "constant_with_warmup")  # Trainer's schedules that do not decay


def optimizer(
    args: TrainingArguments, name: str = "AdamW", **options: Any
) -> tuple[Callable[[], Callable[..., LowbitOptimizer]], dict[str, Any]]:
    """The `optimizer_cls_and_kwargs` of `Trainer`: a factory,
    so that parameters come with their names.

    Groups are the Trainer's, without weight decay for biases and norms. `optimizer.pt` of a Trainer
    that trained with torch's optimizer loads too, by the Trainer or by `lowbit.load_optimizer`: its
    numbers are those of the Trainer's two groups. One of bitsandbytes or torchao loads once
    `lowbit-ckpt convert --to lowbit` has converted it. Embeddings and heads that differ from the
    rest, by a format of their own or because the optimizer has a `rank`, are groups of their own; a
    schedule in `scheduler.pt` was saved with as many groups, or does not load. MuonWithAdamW has
    groups of its own too, as `lowbit.muon_param_groups` makes them. Under FSDP1 the optimizer is
    bound to the model with `export="fp32"`, under DeepSpeed to the engine with the `export` of
    `options`.

    Args:
        args: gives the learning rate and weight decay, and for Adam, AdamW and ScheduleFreeAdamW
            the betas and epsilon, as they are when `Trainer` makes the optimizer: trials of
            `hyperparameter_search` change them. With ScheduleFreeAdamW, `Trainer` needs the
            callback `ScheduleFreeCallback`, without which the first step raises, and
            `lr_scheduler_type="constant"`.
        name: a class of lowbit; "AdamW" by default.
        options: further arguments of that class (`state_format="4bit"`, `seed=1`), which replace
            those of `args`; `embeddings` and `heads` of `lowbit.param_groups`; and under DeepSpeed
            `export` of `lowbit.integrations.deepspeed.bind`.

    Returns:
        (factory, arguments), as `Trainer` takes them.

    Raises:
        ValueError: lowbit has no such class;
            or the schedule of `args` decays the learning rate of ScheduleFreeAdamW.
    """
    cls = optimizer_named(name)
    if cls is None:
        raise ValueError(f"lowbit has no optimizer {name!r}{no_optimizer(name)}")
    _of_arguments(cls, args)  # which raises here too, before a model is loaded
    return lambda: build, {"cls": cls, "args": args, **options}


def _of_arguments(cls: Any, args: TrainingArguments) -> dict[str, Any]:
    """What an optimizer of this class takes from `TrainingArguments`."""
    schedule = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    if issubclass(cls, lowbit.ScheduleFreeAdamW) and schedule not in CONSTANT:
        raise ValueError(
            "ScheduleFreeAdamW averages in place of a schedule, and lr_scheduler_type is "
            f"{schedule!r}: set it to 'constant' in TrainingArguments, "
            "with warmup_steps= of the optimizer"
        )
    given: dict[str, Any] = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
    if issubclass(cls, lowbit.Adam | lowbit.ScheduleFreeAdamW):
        given |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    return given


def from_optim_args(
    args: TrainingArguments,
) -> tuple[Callable[[], Callable[..., LowbitOptimizer]], dict[str, Any]]:
    """`optimizer` with what `args.optim_args` says,
    for launchers whose configuration is all there is.

    Args:
        args: with `optim_args` such as "name=AdamW,state_format=4bit,seed=1". Values are Python's
            literals, true, false, none, or else text.

    Returns:
        As `optimizer`.

    Raises:
        ValueError: an entry is not NAME=VALUE, or its name is not an optimizer's option;
            or as in `optimizer`.
    """
    options: dict[str, Any] = {}
    for entry in filter(None, (part.strip() for part in (args.optim_args or "").split(","))):
        key, found, value = (part.strip() for part in entry.partition("="))
        if not (key and found and value):
            raise ValueError(
                f"optim_args has {entry!r}; its entries are NAME=VALUE, such as "
                "name=AdamW,state_format=4bit; a value has no comma"
            )
        if key in ("args", "cls", "model"):  # arguments of the functions on the way
            raise ValueError(
                f"optim_args has {entry!r}, which is not an option of an "
                "optimizer; name= chooses the class"
            )
        options[key] = _literal(value)
    return optimizer(args, **options)


def _literal(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


class ScheduleFreeCallback(TrainerCallback):
    """Saves the average of `ScheduleFreeAdamW`, as
    `Trainer(..., callbacks=[ScheduleFreeCallback()])`.

    Trainer calls `optimizer.train()` before it trains and `optimizer.eval()` before it evaluates,
    but not before it saves. This does so, and at the end of each epoch, so that the model has the
    average when training ends.

    Raises:
        ValueError: when training begins, with enable_jit_checkpoint=True, which saves in the middle
            of a step.
    """

    def on_train_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any
    ) -> None:
        _check_saves(self, args, "the weights are not the average then")
        if (opt := _unwrapped(optimizer)) is not None:
            _with_callback.add(opt)

    def on_train_end(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any
    ) -> None:
        if (opt := _unwrapped(optimizer)) is not None:
            _with_callback.discard(opt)

    def on_step_end(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any
    ) -> None:
        if control.should_save:
            optimizer.eval()

    def on_epoch_end(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any
    ) -> None:
        # Not at the end of training: by then the weights may be those of the best checkpoint.
        optimizer.eval()


class StepInBackwardCallback(TrainerCallback, ExportableState):
    """Steps inside the backward pass, as `Trainer(..., callbacks=[StepInBackwardCallback()])`, so
    that one gradient exists at a time (`lowbit.step_in_backward`).

    For one process. `args.max_grad_norm` clips by the norm of the *previous* step's gradients, 0
    does not clip; the Trainer's own norm in its log counts what is left and is 0. A checkpoint has
    that norm in trainer_state.json, so that a resumed run is the uninterrupted one. With
    `gradient_accumulation_steps` the gradients of a step's micro-batches have to wait for each
    other, so all of them exist until its last backward pass.

    Args:
        overlap, waiting: of `lowbit.step_in_backward`: steps run beside the backward pass, and so
            many bytes of gradients may wait for them; False and None by default.

    Attributes:
        released: the `InBackward` while training runs; None before and after.
        clipping: its `state_dict()` when the Trainer saved last.

    Raises:
        TypeError: when training begins, if the optimizer belongs to another library.
        ValueError: when training begins, with fp16=True, whose GradScaler has to look at all
            gradients before any step, on several processes, or with enable_jit_checkpoint=True,
            which saves between a backward pass and the end of its step.
    """

    def __init__(self, overlap: bool = False, waiting: int | str | None = None) -> None:
        self.overlap, self.waiting = overlap, waiting
        self.released: InBackward | None = None
        self.clipping: dict[str, Any] = {"norm": None}
        self._handle: Any = None

    def state(self) -> dict[str, Any]:
        """What transformers writes into trainer_state.json."""
        if self.released is not None:
            self.clipping = self.released.state_dict()
        options = {"overlap": self.overlap, "waiting": self.waiting}
        return {"args": options, "attributes": {"clipping": self.clipping}}

    def on_train_begin(
        self,
        args: Any,
        state: Any,
        control: Any,
        model: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        if self.released is not None:  # of a training that raised and did not come to its end
            self.released.reset()
            self.on_train_end(args, state, control)
        if args.fp16:
            raise ValueError(
                "StepInBackwardCallback cannot look for infinities first: train in bf16"
            )
        if args.world_size > 1:
            raise ValueError(
                f"StepInBackwardCallback is for one process, and these are {args.world_size}; call "
                "lowbit.step_in_backward in a loop of your own"
            )
        _check_saves(
            self, args, "the weights are stepped then and the step not counted: resuming repeats it"
        )
        opt = getattr(optimizer, "optimizer", optimizer)  # inside accelerate's
        norm = args.max_grad_norm or None
        self.released = lowbit.step_in_backward(
            model, opt, max_norm=norm, overlap=self.overlap, waiting=self.waiting
        )
        # transformers gives it back only if restore_callback_states_from_checkpoint is set, and
        # expects that a checkpoint has the state of every callback.
        name = type(self).__name__
        saved = state.stateful_callbacks.setdefault(name, self.state())
        if state.global_step > 0 and isinstance(saved, dict):
            self.released.load_state_dict(saved["attributes"]["clipping"])
        self._handle = model.register_forward_pre_hook(self._held_unless_last)

    def _held_unless_last(self, model: nn.Module, inputs: Any) -> None:
        assert self.released is not None
        self.released.held = not GradientState().sync_gradients

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.released is not None:
            self.released.remove()
            self._handle.remove()
        self.released = None


def _check_saves(callback: TrainerCallback, args: Any, why: str) -> None:
    """Raises ValueError if the Trainer saves in the middle of a step when it is terminated."""
    if getattr(args, "enable_jit_checkpoint", False):
        raise ValueError(
            f"{type(callback).__name__} does not work with enable_jit_checkpoint=True, which saves "
            f"in the middle of a step at SIGTERM: {why}. Set it to False in TrainingArguments, and "
            "save by save_steps"
        )


def _unwrapped(optimizer: Any) -> LowbitOptimizer | None:
    """The optimizer inside the wrappers of accelerate and DeepSpeed; None if it is another's."""
    while optimizer is not None and not isinstance(optimizer, LowbitOptimizer):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer


def _check_callback(opt: LowbitOptimizer, *_: Any) -> None:
    """A hook before steps: raises RuntimeError in a training without ScheduleFreeCallback."""
    if opt not in _with_callback:
        raise RuntimeError(
            "ScheduleFreeAdamW trains without its callback, and Trainer would save the weights of "
            "the last step in place of their average: pass Trainer(..., "
            "callbacks=[ScheduleFreeCallback()]), of lowbit.integrations.transformers. A loop of "
            "your own builds lowbit.ScheduleFreeAdamW itself, and calls opt.eval() before it saves"
        )


def build(
    model: nn.Module,
    *,
    cls: Callable[..., LowbitOptimizer],
    args: TrainingArguments,
    embeddings: StateFormat | None = None,
    heads: StateFormat | None = None,
    export: str | None = None,
    **options: Any,
) -> LowbitOptimizer:
    """The optimizer of a model, with the groups of `Trainer`, which its schedule counts, plus
    groups for embeddings and heads that differ from the rest, and for matrices that Muon steps.
    """
    options = _of_arguments(cls, args) | options
    weight_decay = options.pop("weight_decay")
    under_deepspeed = deepspeed_config() is not None
    if export is not None and not under_deepspeed:
        raise ValueError(
            f"export={export!r} needs DeepSpeed, and no DeepSpeed configuration is active: leave "
            "it out. FSDP1 always saves float32 moments"
        )
    parts_of = groups_for(cls)
    muon = parts_of is lowbit.muon_param_groups
    adamw_decay = options.get("adamw_weight_decay") if muon else None
    decayed = set(Trainer.get_decay_parameter_names(None, model))  # type: ignore[arg-type]
    parts = parts_of(model, embeddings=embeddings, heads=heads)
    if "rank" not in inspect.signature(cls).parameters:
        for part in parts:
            part.pop("rank", None)
    kinds: list[dict[str, Any]] = []  # options that differ
    kind_of: dict[str, int] = {}
    for part in parts:
        own = {key: part[key] for key in part.keys() - {"params", "param_names"}}
        if own not in kinds:
            kinds.append(own)
        kind_of |= dict.fromkeys(part["param_names"], kinds.index(own))
    groups = []
    for kind, own in enumerate(kinds):
        decay = weight_decay if adamw_decay is None or own["use_muon"] else adamw_decay
        for decays in (True, False):
            members = [
                (name, p)
                for name, p in model.named_parameters()
                if kind_of.get(name) == kind and (name in decayed) == decays
            ]
            if members:
                names, params = zip(*members, strict=True)
                made = {"params": list(params), "param_names": list(names)}
                groups.append({**own, **made, "weight_decay": decay if decays else 0.0})
    opt = cls(groups, weight_decay=weight_decay, **options)
    if isinstance(opt, lowbit.ScheduleFreeAdamW):
        opt.register_step_pre_hook(_check_callback)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    opt.numbered_groups = [
        [name for name in trained if (name in decayed) == decays] for decays in (True, False)
    ]
    if under_deepspeed:
        bind_when_initialized(opt, export=export)
    if any(sharding.is_flat(p) for group in groups for p in group["params"]):
        lowbit.fsdp1.bind(model, opt, export="fp32")  # Trainer saves by FSDP.optim_state_dict
    return opt
