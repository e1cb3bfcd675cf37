"""What a rank does in test_fsdp1.py."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.utils.parametrizations import weight_norm

import lowbit
from tests.support.digests import digest

CPU = torch.device("cpu")


class Words(nn.Module):
    """An embedding, a layer, a head that is known by its name alone,
    or is the embedding once more.
    """

    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.layer = nn.Embedding(100, 64), nn.Linear(64, 96)
        self.lm_head, self.last = nn.Linear(96, 70), nn.Linear(70, 64)
        if tied:
            self.again = nn.Linear(64, 100, bias=False)
            self.again.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(self.lm_head(self.layer(self.words(ids))))


def wide(kind: str, tied: bool, normed: bool = False) -> list[str]:
    """The names of parameters with full-precision state; with weight norm of embedding and head."""
    model: nn.Module = Words(tied)
    if normed:
        weight_norm(model.words), weight_norm(model.lm_head)
    orig = kind == "orig"
    if kind == "checkpoint_wrapper":
        model.lm_head = checkpoint_wrapper(model.lm_head)
    elif kind != "plain":
        if kind != "one_flat":
            for name in ("layer", "lm_head"):
                part = getattr(model, name)
                setattr(
                    model, name, FullyShardedDataParallel(part, use_orig_params=orig, device_id=CPU)
                )
        model = FullyShardedDataParallel(model, use_orig_params=orig, device_id=CPU)
    opt = lowbit.AdamW(lowbit.param_groups(model, embeddings="float32", heads="float32", lr=1e-2))
    lowbit.fsdp1.bind(model, opt)
    laid_out = {p: lay for _, p, lay in opt.laid_out()}
    found = []
    for _, p, name, _ in opt.members():
        assert name is not None
        if not any(slot.coded for slot in laid_out[p].slots):
            found.append(lowbit.config.overrides.clean_name(name))
    return sorted(found)


def without_decay(kind: str) -> list[str] | str:
    """The names of parameters that do not decay, under FSDP1 with a unit for a layer."""
    model = nn.ModuleDict(
        {"words": nn.Embedding(100, 64), "plane": nn.LayerNorm((4, 64)), "layer": nn.Linear(64, 96)}
    )
    if kind != "plain":
        orig = kind == "orig"
        if kind == "frozen":
            model.requires_grad_(False)["plane"].requires_grad_(True)
        for name in ("words", "plane", *(("layer",) if orig else ())):
            model[name] = FullyShardedDataParallel(model[name], use_orig_params=orig, device_id=CPU)
        model = FullyShardedDataParallel(model, use_orig_params=orig, device_id=CPU)
    try:
        groups = lowbit.param_groups(
            model, weight_decay=0.1, no_decay=["plane.*"] if kind == "flat" else True
        )
    except ValueError as error:
        return str(error)
    return sorted(
        lowbit.config.overrides.clean_name(name)
        for group in groups
        for name in group["param_names"]
        if group["weight_decay"] == 0.0
    )


def wrapped_later(bound: bool, what: str) -> str:
    """A step, or the state dict, of an optimizer that was built before FSDP1 took its
    parameters.
    """
    model = Words(False)
    opt = lowbit.AdamW(lowbit.param_groups(model), lr=1e-2, seed=3)
    sharded = FullyShardedDataParallel(model, use_orig_params=True, device_id=CPU)
    try:
        if bound:
            lowbit.fsdp1.bind(sharded, opt)
        sharded(torch.arange(9)).square().sum().backward()
        opt.step() if what == "step" else opt.state_dict()
    except ValueError as error:
        return str(error)
    return "done"


def stepped_before() -> str:
    model = Words(False)
    opt = lowbit.AdamW(lowbit.param_groups(model), lr=1e-2, seed=3)
    model(torch.arange(9)).square().sum().backward()
    opt.step()
    sharded = FullyShardedDataParallel(model, use_orig_params=True, device_id=CPU)
    try:
        lowbit.fsdp1.bind(sharded, opt)
    except RuntimeError as error:
        return str(error)
    return "bound"


def not_sharded(orig: bool) -> bool:
    """FSDP1 on one rank leaves parameters whole,
    and torch's functions want moments of their shape.
    """
    torch.manual_seed(0)
    model = FullyShardedDataParallel(Words(False), use_orig_params=orig, device_id=CPU)
    opts = []
    for _ in range(2):
        opts.append(lowbit.AdamW(lowbit.param_groups(model), lr=1e-2))
        lowbit.fsdp1.bind(model, opts[-1], export="fp32")
    model(torch.arange(9)).square().sum().backward()
    opts[0].step()
    saved = FullyShardedDataParallel.optim_state_dict(model, opts[0])
    assert saved["state"]["layer.weight"]["exp_avg"].shape == (96, 64)
    opts[1].load_state_dict(
        FullyShardedDataParallel.optim_state_dict_to_load(model, opts[1], saved)
    )
    return digest(opts[0], 1) == digest(opts[1], 1)


def wrapped_otherwise(orig: bool) -> dict[str, bool]:
    """Torch's functions save where FSDP1 has one module of the model, and load where it has all of
    it: parameters that it left alone become parts of a flat shard, with the same next step.
    """

    def made(root: bool):
        model: nn.Module = Words(False)
        if not root:
            model.layer = FullyShardedDataParallel(model.layer, use_orig_params=orig, device_id=CPU)
        else:
            model = FullyShardedDataParallel(model, use_orig_params=orig, device_id=CPU)
        opt = lowbit.AdamW(model.named_parameters(), lr=1e-2, min_numel=1024)
        lowbit.fsdp1.bind(model, opt, export="fp32")
        return model, opt

    def advance(model, opt, number):
        opt.zero_grad()
        model(torch.arange(number, number + 9)).square().sum().backward()
        opt.step()

    def whole(model, opt):
        """What torch's functions gather on every rank."""
        saved = FullyShardedDataParallel.optim_state_dict(model, opt)["state"]
        return {name: {key: t.clone() for key, t in of.items()} for name, of in saved.items()}

    same = {}
    for there in (True, False):
        (source, opt), (target, again) = made(not there), made(there)
        advance(source, opt, 0)
        saved = FullyShardedDataParallel.optim_state_dict(source, opt)
        again.load_state_dict(
            FullyShardedDataParallel.optim_state_dict_to_load(target, again, saved)
        )
        with (
            FullyShardedDataParallel.summon_full_params(source),
            FullyShardedDataParallel.summon_full_params(target),
        ):
            for p, q in zip(target.parameters(), source.parameters(), strict=True):
                p.data.copy_(q.data)
        advance(source, opt, 1)
        advance(target, again, 1)
        ours, theirs = whole(source, opt), whole(target, again)
        key = "to the whole model" if there else "to a module of it"
        same[key] = ours.keys() == theirs.keys() and all(
            torch.equal(ours[name][slot], theirs[name][slot])
            for name in ours
            for slot in ("exp_avg", "exp_avg_sq", "step")
        )
    return same


def stepped_by_torch(path: str) -> None:
    """Writes what torch's AdamW has after a step, with names."""
    model = Words(False)
    opt = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    model(torch.arange(9)).square().sum().backward()
    opt.step()
    saved = opt.state_dict()
    names = saved["param_groups"][0]["param_names"]
    state = {names[number]: value for number, value in saved["state"].items()}
    groups = [{**saved["param_groups"][0], "params": names}]
    torch.save({"state": state, "param_groups": groups}, path)


def loaded_from_torch(path: str, wrapper: str, export: str | None, way: str) -> dict[str, str]:
    """The digests of what whole moments of torch's AdamW become."""
    model: nn.Module = Words(False)
    if wrapper != "plain":
        orig = wrapper == "orig"
        model = FullyShardedDataParallel(model, use_orig_params=orig, device_id=CPU)
    opt = lowbit.AdamW(model.named_parameters(), lr=1e-2, min_numel=1024)
    if wrapper != "plain":
        lowbit.fsdp1.bind(model, opt, export=export)
    if way == "file":
        lowbit.load_optimizer(opt, path)
    else:
        lowbit.fsdp1.set_state_dict(opt, torch.load(path))
    return digest(opt, 1)


def bound_twice() -> list[str]:
    """A second `bind` replaces the first: exported state is loaded, and what other groups get is
    said.
    """
    model = FullyShardedDataParallel(Words(False), use_orig_params=True, device_id=CPU)
    opt = lowbit.AdamW(lowbit.param_groups(model), lr=1e-2)
    for _ in range(2):
        lowbit.fsdp1.bind(model, opt, export="fp32")
    model(torch.arange(9)).square().sum().backward()
    opt.step()
    before = digest(opt, 1)
    opt.load_state_dict(opt.state_dict())
    assert digest(opt, 1) == before
    lowbit.fsdp1.bind(model, opt)
    assert any("stream" in value for value in opt.state_dict()["state"].values())
    said = []
    state = lowbit.fsdp1.get_state_dict(opt)
    state["param_groups"].append(state["param_groups"][0])
    try:
        lowbit.fsdp1.set_state_dict(opt, state)
    except ValueError as error:
        said.append(str(error))
    return said


def flattened_away() -> str:
    model = Words(False)
    opt = lowbit.AdamW(model.named_parameters())
    sharded = FullyShardedDataParallel(model, use_orig_params=False, device_id=CPU)
    try:
        lowbit.fsdp1.bind(sharded, opt)
    except ValueError as error:
        return str(error)
    return "bound"


def muon(when: str, orig: bool) -> str:
    """What Muon says of FSDP1's flat shards: to its groups, when it is built,
    or in the first step of one that is older.
    """
    model = Words(False)
    opt = lowbit.MuonWithAdamW(lowbit.muon_param_groups(model)) if when == "step" else None
    sharded = FullyShardedDataParallel(model, use_orig_params=orig, device_id=CPU)
    try:
        if when == "groups":
            lowbit.muon_param_groups(sharded)
        elif when == "built":
            lowbit.Muon(sharded.parameters())
        elif when == "added":
            weight = nn.Parameter(torch.zeros(8, 8))
            opt = lowbit.Muon([weight])
            opt.add_param_group({"params": list(sharded.parameters())})
        else:
            sharded(torch.arange(9)).square().sum().backward()
            assert opt is not None
            opt.step()
    except ValueError as error:
        return str(error)
    return "done"
