"""What a rank does in test_wrappers.py: the same global gradients under any wrapper, and all of weights and state as one process would hold them."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import pathlib
import zlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import lowbit
from lowbit import coding, fsdp1, shard
from lowbit.overrides import clean_name

# Rows are fewer than a real model's; columns are what blocks are cut by.
UNITS = {
    "a": {"square": (96, 896), "vector": (1000,)},
    "b": {"wide": (36, 1408), "odd": (100, 77)},
    "c": {"long": (7, 4096), "conv": (3, 3, 3, 5), "tied": (40, 128)},
    "d": {"never": (70, 70)},
    "e": {"frozen": (5, 33)},
}
FORMATS = {
    "8bit": lambda p: lowbit.AdamW(p, lr=1e-2, seed=5),
    "4bit": lambda p: lowbit.AdamW(p, lr=1e-2, seed=5, state_format="4bit"),
    "fp8": lambda p: lowbit.AdamW(p, lr=1e-2, seed=5, state_format="fp8"),
    "rank-1": lambda p: lowbit.AdamW(p, lr=1e-2, seed=5, state_format="lpmm4"),
    "Adafactor": lambda p: lowbit.Adafactor(p, lr=1e-2, seed=5, beta1=0.9),
}
# Beyond the table: scales of two numbers, scales that cover more, two factored moments, norms, and what is kept beside weights.
MORE = {
    "log8, Kahan": lambda p: lowbit.AdamW(p, lr=1e-2, seed=5, state_format="log8", param_format="bfloat16_kahan"),
    "LAMB, split16": lambda p: lowbit.LAMB(p, lr=1e-2, seed=5, param_format="bfloat16_split16"),
    "CAME": lambda p: lowbit.CAME(p, lr=1e-2, seed=5),
    "two lengths, by chance": lambda p: lowbit.AdamW(p, lr=1e-2, seed=5, state_format={
        "exp_avg": lowbit.scaled("dynamic8", block=2048, rounding="stochastic"), "exp_avg_sq": lowbit.scaled("power1_8_unsigned", block=64)}),
    "rows": lambda p: lowbit.Lion(p, lr=1e-2, seed=5, state_format=lowbit.scaled("linear8", scale="row")),
    "columns": lambda p: lowbit.Lion(p, lr=1e-2, seed=5, state_format=lowbit.scaled("linear8", scale="column")),
    "tensor": lambda p: lowbit.Lion(p, lr=1e-2, seed=5, state_format=lowbit.scaled("linear8", scale="tensor")),
}  # fmt: skip
# Wrapper: ranks.
WRAPPERS = {
    "single": 1, "DDP": 2, "FSDP1 orig": 4, "FSDP1 flat": 3, "FSDP2": 4, "HSDP 2x2": 4,
    "TP x FSDP 2x2 row": 4, "TP x FSDP 2x2 col": 4, "CPU offload": 2,
}  # fmt: skip


class Unit(nn.Module):
    def __init__(self, name: str, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        for key, shape in UNITS[name].items():
            generator = torch.Generator().manual_seed(zlib.crc32(key.encode()) + seed)
            value = torch.randn(shape, generator=generator).to(dtype)
            self.register_parameter(key, nn.Parameter(value, requires_grad=key != "frozen"))
        if name == "c":
            self.tied_again = self.tied


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        for name in UNITS:
            self.add_module(name, Unit(name, dtype, seed))

    def forward(self) -> torch.Tensor:
        return sum(p.float().square().sum() for p in self.parameters())  # type: ignore[return-value]


def build(wrapper: str, make, seed: int = 0, dtype: torch.dtype = torch.bfloat16, **binding):
    model: nn.Module = Model(dtype, seed)
    if wrapper == "DDP":
        model = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    elif wrapper.startswith("FSDP1"):
        options = {"use_orig_params": wrapper == "FSDP1 orig", "device_id": torch.device("cpu")}
        for name in UNITS:
            setattr(model, name, FullyShardedDataParallel(getattr(model, name), **options))
        model = FullyShardedDataParallel(model, **options)
    elif wrapper != "single":
        mesh, offload = _mesh(wrapper), None
        if wrapper.startswith("TP"):
            for unit in model.children():
                for key, p in list(unit.named_parameters()):
                    placement = Shard(1 if wrapper.endswith("row") and key in ("square", "wide", "long") else 0)  # fmt: skip
                    local = distribute_tensor(p.detach(), mesh["tp"], [placement])
                    setattr(unit, key, nn.Parameter(local, requires_grad=p.requires_grad))
                    if key == "tied":
                        unit.tied_again = unit.tied
            mesh = mesh["dp"]
        if wrapper == "CPU offload":
            offload = CPUOffloadPolicy(pin_memory=False)
        options = {"mesh": mesh, **({"offload_policy": offload} if offload else {})}
        for unit in model.children():
            fully_shard(unit, **options)
        fully_shard(model, **options)
    opt = make(model.named_parameters())
    if wrapper.startswith("FSDP1"):
        fsdp1.bind(model, opt, **binding)
    return model, opt


def _mesh(wrapper: str):
    ranks = dist.get_world_size()
    if wrapper == "HSDP 2x2":
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    if wrapper.startswith("TP"):
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return init_device_mesh("cpu", (ranks,))


def global_gradient(name: str, step: int, shape, dtype: torch.dtype) -> torch.Tensor:
    seed = zlib.crc32(f"{name} {step}".encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def set_grads(model: nn.Module, opt, step: int) -> None:
    """The gradient of a parameter depends on its name and the step alone."""
    for _, p, name, _ in opt._members():
        name = clean_name(p.name if isinstance(p, shard.Piece) else name)
        if name in ("d.never", "e.frozen"):
            continue
        grad = global_gradient(name, step, p.shape, p.dtype)
        if isinstance(p, shard.Piece):  # as FSDP1 leaves it, by its own records
            owner = p.owner
            if p.alone:
                begin, end = p.elements(p.flat.rank)
                owner.grad = grad.reshape(-1)[begin:end].clone() if end > begin else None
                continue
            if owner.grad is None:
                owner.grad = torch.zeros_like(owner)
            info = owner._shard_param_infos[owner._fqns.index(name.rpartition(".")[2])]
            if info.in_shard:
                begin, end = info.intra_param_start_idx, info.intra_param_end_idx + 1
                at = info.offset_in_shard
                owner.grad[at : at + end - begin] = grad.reshape(-1)[begin:end]
        elif isinstance(p, DTensor):
            p.grad = _placed(grad, p)
        else:
            p.grad = grad


def _placed(grad: torch.Tensor, p: DTensor) -> DTensor:
    """Cut as wrappers cut: by tensor parallelism first, which is the mesh's last dimension."""
    local = grad
    for i in reversed(range(p.device_mesh.ndim)):
        dim = getattr(p.placements[i], "dim", None)
        if dim is not None:
            chunks = torch.chunk(local, p.device_mesh.size(i), dim)
            at = p.device_mesh.get_local_rank(i)
            local = chunks[at] if at < len(chunks) else local.narrow(dim, 0, 0)
    return DTensor.from_local(
        local.contiguous(), p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=grad.stride()
    )  # fmt: skip


def whole(t):
    t = t.detach()
    return t.full_tensor() if isinstance(t, DTensor) else t


def _whole_weight(p) -> torch.Tensor:
    if not isinstance(p, shard.Piece):
        return whole(p)
    full = torch.zeros(p.numel, dtype=p.dtype)
    begin, end = p.elements(p.flat.rank)
    full[begin:end] = p.value
    bits = full.view(torch.uint8)
    if p.flat.ranks > 1:
        dist.all_reduce(bits, group=p.flat.group)  # each element from one
    return bits.view(p.dtype).reshape(p.shape)


def digest(opt, steps: int, without: tuple[str, ...] = ()) -> dict[str, str]:
    """Of each parameter's weight and state."""
    found = {}
    state = fsdp1.get_state_dict(opt)["state"]
    for _, p, name, _ in opt._members():
        name = clean_name(p.name if isinstance(p, shard.Piece) else name)
        h = hashlib.sha256()
        for key, t in [("", _whole_weight(p)), *sorted(state.get(name, {}).items())]:
            if key in without:
                continue
            t = whole(t).contiguous()
            h.update(f"{key} {t.dtype} {tuple(t.shape)}".encode())
            h.update(t.reshape(-1).view(torch.uint8).numpy().tobytes())
        found[name] = h.hexdigest()[:16]
        kept = opt._state_of(p)
        if kept and name != "d.never" and not name.startswith("unused"):
            assert kept["step"] == steps, f"{name} is at step {kept['step']} here, not {steps}"
    return found


def state_of(wrapper: str, model, opt) -> dict:
    if wrapper.startswith("FSDP1"):
        return {"model": get_model_state_dict(model), "optim": fsdp1.get_state_dict(opt)}
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, opt)}


def save(wrapper: str, model, opt, path: pathlib.Path) -> None:
    dcp.save(state_of(wrapper, model, opt), checkpoint_id=path)


def load(wrapper: str, model, opt, path: pathlib.Path) -> None:
    state = state_of(wrapper, model, opt)
    # One by one: an FSDP1 model's ShardedTensor without a local shard makes torch 2.13 look for 2.3's names of everything loaded beside it.
    for part in state:
        dcp.load({part: state[part]}, checkpoint_id=path)
    if wrapper == "DDP":  # set_model_state_dict does not find tied parameters there
        model.module.load_state_dict(state["model"])
    else:
        set_model_state_dict(model, state["model"])
    if wrapper.startswith("FSDP1"):
        fsdp1.set_state_dict(opt, state["optim"])
    else:
        set_optimizer_state_dict(model, opt, state["optim"])


def train(wrapper: str, formats: list[str], folder: str, steps: int = 10) -> dict:
    """Digests after so many steps, by format; saves."""
    made = {}
    for name in formats:
        model, opt = build(wrapper, {**FORMATS, **MORE}[name])
        torch.manual_seed(dist.get_rank())  # must not matter
        for step in range(steps):
            set_grads(model, opt, step)
            opt.step()
            opt.zero_grad()
        made[name] = digest(opt, steps)
        save(wrapper, model, opt, pathlib.Path(folder) / f"{wrapper} {name}")
    return made


def resume(wrapper: str, jobs: list[tuple[str, str]], folder: str, steps: int = 10) -> dict:
    """Digests after so many steps more from what another wrapper saved, by (format, that wrapper)."""
    made = {}
    for name, source in jobs:
        model, opt = build(wrapper, {**FORMATS, **MORE}[name], seed=1)
        load(wrapper, model, opt, pathlib.Path(folder) / f"{source} {name}")
        for step in range(steps, 2 * steps):
            set_grads(model, opt, step)
            opt.step()
            opt.zero_grad()
        made[name, source] = digest(opt, 2 * steps)
    return made


def off_by_one_gradient() -> dict:
    """As train, with one element of one gradient of the last step changed."""
    model, opt = build("DDP", FORMATS["8bit"])
    for step in range(10):
        set_grads(model, opt, step)
        if step == 9:
            model.module.a.square.grad[50, 700] *= -1
        opt.step()
        opt.zero_grad()
    return digest(opt, 10)


# What torch itself refuses, and what it says.
REFUSED_BY_TORCH = {
    "a scalar under FSDP2": "fully_shard doesn't support scalar parameters",
    "channels_last under FSDP2": "FSDP does not support non-contiguous parameters yet",
    "columns that do not divide under FSDP2 on dimension 1": "FSDP does not support uneven sharding on dim 1",
}


def refused_by_torch(what: str) -> str:
    module = nn.Module()
    value = torch.zeros(6, 4, 5, 5) if "channels_last" in what else torch.zeros(4, 77) if "columns" in what else torch.zeros(())  # fmt: skip
    if "channels_last" in what:
        value = value.to(memory_format=torch.channels_last)
    module.p = nn.Parameter(value)
    options = {"shard_placement_fn": lambda p: Shard(1)} if "columns" in what else {}
    try:
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)), **options)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return "nothing"


# Real training


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(101, 48)
        self.first = nn.Linear(48, 300)
        self.norm = nn.LayerNorm(300)
        self.second = nn.Linear(300, 77)
        self.unused = nn.Linear(64, 80)  # an expert that never gets a token
        self.head = nn.Linear(77, 101, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.first(self.embed(ids))))
        return self.head(torch.tanh(self.second(x)))


def real(wrapper: str, steps: int = 6) -> dict[str, str]:
    """Digests after training on the same batches on all ranks; the streams of random bits apart, which ZeroRedundancyOptimizer numbers anew."""
    model: nn.Module = Small()
    mixed, kind, options = "mixed" in wrapper, wrapper.partition(",")[0], {}
    if kind in ("FSDP1 orig", "FSDP1 flat"):
        options = {"use_orig_params": kind == "FSDP1 orig", "device_id": torch.device("cpu")}
        if "no shard" in wrapper:
            options["sharding_strategy"] = ShardingStrategy.NO_SHARD
        if "hybrid" in wrapper:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
            options |= {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
        if mixed:
            options["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)  # fmt: skip
        for name in ("first", "unused"):
            setattr(model, name, FullyShardedDataParallel(getattr(model, name), **options))
        model = FullyShardedDataParallel(model, **options)
    elif kind in ("FSDP2", "HSDP 2x2"):
        options = {"mesh": _mesh(kind)}
        if mixed:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)  # fmt: skip
        for name in ("first", "unused"):
            fully_shard(getattr(model, name), **options)
        fully_shard(model, **options)
    elif kind.startswith(("DDP", "Zero")):
        static = {"gradient_as_bucket_view": True, "static_graph": True} if "views" in wrapper else {"find_unused_parameters": True}  # fmt: skip
        model = nn.parallel.DistributedDataParallel(model, **static)
    if kind == "ZeroRedundancyOptimizer":
        outer: torch.optim.Optimizer = ZeroRedundancyOptimizer(model.parameters(), lowbit.AdamW, lr=1e-2)  # fmt: skip
    else:
        outer = lowbit.AdamW(model.named_parameters(), lr=1e-2)
    if kind.startswith("FSDP1"):
        fsdp1.bind(model, outer)
    alone = kind in ("plain", "mixed", "no_sync")
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for micro in range(2 if "no_sync" in wrapper else 1):
            ids = torch.randint(0, 101, (8, 16), generator=generator)
            waits = micro == 0 and "no_sync" in wrapper and not alone
            computed = copy.deepcopy(model).to(torch.bfloat16) if mixed and alone else model
            with model.no_sync() if waits else contextlib.nullcontext():  # type: ignore[operator]
                logits = computed(ids)
                nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten()).backward()
        if mixed and alone:
            for p, q in zip(model.parameters(), computed.parameters(), strict=True):
                p.grad = None if q.grad is None else q.grad.float()
        outer.step()
        outer.zero_grad()
    if kind == "ZeroRedundancyOptimizer":
        return _zero_digest(model, outer)
    return digest(outer, steps, without=("stream",))


def _zero_digest(model, outer) -> dict[str, str]:
    """The same of ZeroRedundancyOptimizer, whose state each rank has a part of."""
    states: list = [None] * dist.get_world_size()
    mine = {i: {k: t for k, t in outer.optim.state[p].items()} for i, p in enumerate(model.parameters()) if p in outer.optim.state}  # fmt: skip
    dist.all_gather_object(states, mine)
    state = {i: kept for part in states for i, kept in part.items()}
    found = {}
    for i, (name, p) in enumerate(model.named_parameters()):
        h = hashlib.sha256()
        for key, t in [("", p.detach()), *sorted(state[i].items())]:
            if key != "stream":
                h.update(f"{key} {t.dtype} {tuple(t.shape)}".encode())
                h.update(t.reshape(-1).view(torch.uint8).numpy().tobytes())
        found[clean_name(name)] = h.hexdigest()[:16]
    return found


# FSDP1


def float32_view(wrapper: str, name: str, kind: str) -> dict:
    model, opt = build(wrapper, FORMATS[name], export="fp32")
    for step in range(10):
        set_grads(model, opt, step)
        opt.step()
        opt.zero_grad()
    again = FORMATS[name](model.named_parameters())
    fsdp1.bind(model, again, export="fp32")
    saved, excused = _through(kind, model, opt)
    again.load_state_dict(_back(kind, model, again, saved))
    same = digest(again, 10) == digest(opt, 10)
    for step in range(10, 20):
        set_grads(model, again, step)
        again.step()
        again.zero_grad()
    return {"same state": same, "excused": excused, "continued": digest(again, 20)}


def read_directly(wrapper: str, folder: str) -> bool:
    """load_optimizer reads the rows that are touched here, by itself."""
    good = True
    for name in ("8bit", "4bit", "Adafactor"):
        path = pathlib.Path(folder) / f"single {name}"
        model, opt = build(wrapper, FORMATS[name])
        load(wrapper, model, opt, path)
        again = FORMATS[name](model.named_parameters())
        fsdp1.bind(model, again)
        lowbit.load_optimizer(again, path)
        good &= digest(opt, 10) == digest(again, 10)
    return good


def infinite_gradients(wrapper: str) -> bool:
    """A step that a scaler calls off changes and counts nothing, on no rank; stats() and a second bind change nothing either."""
    model, opt = build(wrapper, FORMATS["8bit"])
    for step in range(3):
        set_grads(model, opt, step)
        opt.step()
    before = digest(opt, 3)
    set_grads(model, opt, 4)
    opt.grad_scale, opt.found_inf = torch.tensor(2.0), torch.tensor(1.0)
    opt.step()
    del opt.grad_scale, opt.found_inf
    assert str(opt.stats())
    fsdp1.bind(model, opt)
    return before == digest(opt, 3)


def _through(kind: str, model, opt) -> tuple[dict, bool]:
    """The optimizer's state by torch's functions, and whether torch confused its two moments, as it does with its own AdamW."""
    if kind == "own":
        return copy.deepcopy(opt.state_dict()), False
    with _state_dict_type(kind, model):
        saved = FullyShardedDataParallel.optim_state_dict(model, opt)
    one = next(value for value in saved["state"].values() if "exp_avg" in value)
    aliased = kind == "full" and one["exp_avg"].data_ptr() == one["exp_avg_sq"].data_ptr()
    return saved, aliased


def _back(kind: str, model, opt, saved: dict) -> dict:
    if kind == "own":
        return saved
    with _state_dict_type(kind, model):
        return FullyShardedDataParallel.optim_state_dict_to_load(model, opt, saved)


def _state_dict_type(kind: str, model):
    if kind == "full":
        return FullyShardedDataParallel.state_dict_type(
            model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
        )
    return FullyShardedDataParallel.state_dict_type(
        model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    )  # fmt: skip


def torch_adamw_aliases() -> bool:
    """Whether torch's own AdamW comes out of FULL optim_state_dict with one buffer for both moments."""
    model = FullyShardedDataParallel(Model(torch.float32, 0).a, use_orig_params=True, device_id=torch.device("cpu"))  # fmt: skip
    opt = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p) if p.numel() else None
    opt.step()
    return _through("full", model, opt)[1]


def torch_adamw_takes_it() -> bool:
    model, opt = build("FSDP1 orig", FORMATS["8bit"], export="fp32", dtype=torch.float32)
    for step in range(3):
        set_grads(model, opt, step)
        opt.step()
    saved = opt.state_dict()
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(saved)
    return all(
        torch.equal(other.state[p]["exp_avg"], saved["state"][i]["exp_avg"])
        and other.state[p]["exp_avg"].numel() == p.numel()
        for i, p in enumerate(model.parameters())
        if i in saved["state"] and p in other.state
    ) and any(other.state[p]["exp_avg"].any() for p in other.state)


def unbound() -> list[str]:
    said = []
    for orig in (True, False):
        model = FullyShardedDataParallel(
            nn.Linear(64, 80), use_orig_params=orig, device_id=torch.device("cpu")
        )
        opt = lowbit.AdamW(model.named_parameters())
        model(torch.ones(2, 64)).sum().backward()
        for act in (opt.step, lambda o=opt: o.load_state_dict(o.state_dict())):
            try:
                act()
            except ValueError as error:
                said.append(str(error))
            else:
                said.append("nothing was refused")
    return said


def bind_refuses() -> dict[str, str]:
    def message(make, model=None, **binding) -> str:
        own = FullyShardedDataParallel(nn.Linear(96, 80), use_orig_params=True, device_id=torch.device("cpu"))  # fmt: skip
        try:
            fsdp1.bind(model or own, make(own.named_parameters()), **binding)
        except ValueError as error:
            return str(error)
        return "nothing was refused"

    return {
        "another model": message(lowbit.AdamW, nn.Linear(4, 4)),
        "factored": message(lowbit.Adafactor, export="fp32"),
        "APOLLO": message(lambda p: lowbit.APOLLO(p, rank=8)),
    }


# Placements


def cut_inside_a_byte() -> str:
    p = nn.Parameter(distribute_tensor(torch.zeros(100, 77), init_device_mesh("cpu", (2,)), [Shard(1)]))  # fmt: skip
    try:
        lowbit.AdamW([("w", p)], state_format="4bit")
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def recode_columns() -> bool:
    torch.manual_seed(0)
    value, moments = torch.randn(64, 1000), {"exp_avg": torch.randn(64, 1000), "exp_avg_sq": torch.rand(64, 1000)}  # fmt: skip
    mesh, good = init_device_mesh("cpu", (dist.get_world_size(),)), True
    for state_format in ("8bit", "4bit", "log8", "fp8", "lpmm4"):
        made = []
        for p in (nn.Parameter(value.clone()), nn.Parameter(distribute_tensor(value, mesh, [Shard(1)]))):  # fmt: skip
            opt = lowbit.AdamW([("w", p)], state_format=state_format)
            saved = opt.state_dict()
            saved["state"] = {0: {"step": torch.tensor(3.0), **moments}}
            opt.load_state_dict(saved)
            ((_, _, lay),) = opt._laid_out()
            values = [
                coding.decode_slot([shard.local(opt.state[p][e.key]) for e in slot.entries(lay.part)], lay, slot)
                for slot in lay.slots
            ]  # fmt: skip
            made.append(({k: whole(t) for k, t in opt.state[p].items()}, values, lay.part))
        (plain, all_values, _), (cut, here, part) = made
        good &= plain.keys() == cut.keys() and all(torch.equal(plain[k], cut[k]) for k in plain)
        columns = slice(part.col_offset, part.col_offset + part.cols)
        good &= all(torch.equal(a[:, columns], b) for a, b in zip(all_values, here, strict=True))
    return good
