"""The error of Muon's update with the momentum in each signed format, behind Newton-Schulz,
beside float32 momentum.

    python -m bench.quality.muon_formats          # what bench/results/muon_formats.json does not
                                                    have yet: minutes on one core
    python -m bench.quality.muon_formats --table  # the tables of docs/loss/muon-formats.md, from
                                                    what is there

The gradients are those of a small GPT in training, and synthetic ones with spectra of a power law.
Momentum is requantized in every step, as Muon does: by lowbit.SGD, whose average is the same. The
update that a step takes is then orthogonalized and compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import lowbit
from bench import ROOT
from bench.measuring import machine
from bench.measuring.recipe import load_recipe
from bench.pages.page import table
from lowbit import ops, sharding
from lowbit.config import muon
from lowbit.state.quantize import dequantize_slot

recipe = load_recipe()
RESULTS = ROOT / "bench" / "results" / "muon_formats.json"
MODEL = {"width": 256, "depth": 2, "heads": 4, "context": 128}
WARM_UP, STEPS, AT = 40, 60, (2, 10, 60)  # of training before gradients are kept; kept; measured
REAL = ("blocks.1.qkv.weight", "blocks.1.proj.weight", "blocks.1.up.weight", "blocks.1.down.weight")
POWERS = (0.5, 1.0, 2.0)  # singular value i of a synthetic gradient is i to the minus this
SHAPE = (256, 512)  # of synthetic gradients
MOMENTUM = 0.95
FOUR = ("dynamic4", "linear4", "power1_4", "power2_4")
SCALES: tuple[dict[str, Any], ...] = (
    {"block": 32},
    {"block": 64},
    {"block": 128},
    {"scale": "row"},
    {"scale": "column"},
    {"scale": "rank1"},
    {"scale": "tensor"},
)

Matrices = dict[str, list[Tensor]]  # gradients of each step by name


def real() -> Matrices:
    """The gradients of hidden matrices while Muon with float32 momentum trains a GPT."""
    torch.manual_seed(0)
    text, model = recipe.Text([], MODEL["context"]), recipe.GPT(**MODEL)
    opt = lowbit.MuonWithAdamW(
        lowbit.muon_param_groups(model),
        lr=2e-3,
        adjust_lr_fn="match_rms_adamw",
        state_format="float32",
    )
    params, kept = dict(model.named_parameters()), {name: [] for name in REAL}
    for step in range(WARM_UP + STEPS):
        recipe.loss_of(model, text.batch(0, step, 8, 0, 1)).backward()
        for name in REAL if step >= WARM_UP else ():
            kept[name].append(params[name].grad.clone())
        opt.step()
        opt.zero_grad()
    return kept


def synthetic() -> Matrices:
    """A part that stays and one that changes in each step, of one size,
    each with a spectrum of a power law.
    """
    torch.manual_seed(1)

    def drawn(power: float) -> Tensor:
        n, m = SHAPE
        values = torch.arange(1, n + 1).pow(-power)
        left, right = (torch.linalg.qr(torch.randn(k, n))[0] for k in (n, m))
        return left * values @ right.T

    made = {}
    for power in POWERS:
        stays = drawn(power)
        made[f"power {power:g}"] = [stays + drawn(power) for _ in range(STEPS)]
    return made


def orthogonal(m: Tensor, g: Tensor) -> Tensor:
    """Muon's update by momentum `m` and gradient `g`."""
    x = g.lerp(m, MOMENTUM).bfloat16().contiguous()
    ops.newton_schulz(x, *muon.schedule(muon.QUINTIC, 5), 1e-7)
    return x.float()


class Measured:
    """The exact update of a matrix at some step, and how far another is from it."""

    def __init__(self, m: Tensor, g: Tensor) -> None:
        self.m, self.g, self.exact = m, g, orthogonal(m, g)
        self.update = g.lerp(m, MOMENTUM)
        left, _, right = torch.linalg.svd(self.update, full_matrices=False)
        half = left.shape[1] // 2
        self.small = left[:, half:].T, right[half:].T  # the half of least singular values

    def errors(self, m: Tensor) -> dict[str, float]:
        """Of momentum `m`: relative Frobenius errors, and the share of the descent <O,
        U> that is left.

        In the small directions the exact update may be nearly nothing, so the error there is
        relative to the size that a matrix has whose singular values are 1.
        """
        found = orthogonal(m, self.g)
        off = found - self.exact
        a, b = self.small
        return {
            "momentum": float((m - self.m).norm() / self.m.norm()),
            "update": float(off.norm() / self.exact.norm()),
            "small": float((a @ off @ b).norm() / len(a) ** 0.5),
            "descent": float((found * self.update).sum() / (self.exact * self.update).sum()),
        }


def references(gradients: Matrices) -> dict[str, dict[int, Measured]]:
    made: dict[str, dict[int, Measured]] = {}
    for name, several in gradients.items():
        m = torch.zeros_like(several[0])
        for step, g in enumerate(several, 1):
            m = m.lerp(g, 1 - MOMENTUM)
            if step in AT:
                made.setdefault(name, {})[step] = Measured(m, g)
    return made


def momentum(opt: lowbit.SGD) -> list[Tensor]:
    """The float32 values of each parameter's momentum."""
    return [
        dequantize_slot(
            [sharding.local(opt.state[p][e.key]) for e in lay.of_slots["momentum_buffer"]],
            lay,
            lay.slots[0],
        )
        for _, p, lay in opt.laid_out()
    ]


def measure(
    spec: Any, gradients: Matrices, exact: dict[str, dict[int, Measured]]
) -> dict[str, dict[str, dict[str, float]]]:
    """Errors by matrix and step: of the update that the step takes, by what was kept before it."""
    params = [(name, nn.Parameter(torch.zeros_like(g[0]))) for name, g in gradients.items()]
    opt = lowbit.SGD(
        params, lr=1e-3, momentum=MOMENTUM, dampening=MOMENTUM, dampen_first=True, state_format=spec
    )
    out: dict[str, dict[str, dict[str, float]]] = {name: {} for name in gradients}
    for step in range(1, STEPS + 1):
        for name, p in params:
            p.grad = gradients[name][step - 1]
        if step in AT:
            for (name, p), kept in zip(params, momentum(opt), strict=True):
                errors = exact[name][step].errors(kept.lerp(p.grad, 1 - MOMENTUM))
                out[name][str(step)] = {key: round(value, 4) for key, value in errors.items()}
        opt.step()
    return out


# ---- a low-rank part in 8 bits beside a remainder in 4, as GRASP (ICLR 2026) and MuonQ
# (arXiv:2605.11396) keep: nothing of it is in lowbit ----

REMAINDERS = ("blocks of 32", "blocks of 128", "rank 1")
SHARES = (0, 64, 32, 16, 8)  # rank: the shorter side by this; 0: no low-rank part


def in_8_bits(x: Tensor) -> Tensor:
    return by_blocks(x.T.contiguous(), "dynamic8", 256).T  # a factor's columns differ in size


def by_blocks(x: Tensor, format: str, block: int) -> Tensor:
    codes, scales = ops.quantize(x, format, block)
    return ops.dequantize(codes, scales, format, block, x.shape[1])


def remainder(x: Tensor, how: str) -> Tensor:
    """`x` in linear4. "rank 1": each value by the lesser of its row's and its column's absmax."""
    if how != "rank 1":
        return by_blocks(x, "linear4", int(how.split()[-1]))
    row, column = x.abs().amax(1, keepdim=True), x.abs().amax(0, keepdim=True)
    scale = torch.minimum(row, column)
    values = ops.dequantize(
        torch.arange(0, 256, 17, dtype=torch.uint8)[:, None], torch.ones(16, 1), "linear4", 128, 2
    )[:, 0]
    values = values.unique()
    z = torch.where(scale > 0, x / scale, 0.0)
    at = torch.bucketize(z, (values[1:] + values[:-1]) / 2)
    return values[at] * scale


class LowRank:
    """A matrix of momentum: the factors of its largest directions in 8 bits,
    what is left of it in 4.
    """

    def __init__(self, g: Tensor, share: int, how: str) -> None:
        self.how, self.rank = how, min(g.shape) // share if share else 0
        self.right = torch.randn(g.shape[1], self.rank, generator=torch.Generator().manual_seed(0))
        self.kept = torch.zeros_like(g)

    def keep(self, m: Tensor) -> None:
        large = torch.zeros_like(m)
        if self.rank:
            # a power iteration from the directions of the step before
            left = torch.linalg.qr(m @ self.right)[0]
            self.right = in_8_bits(m.T @ left)
            large = in_8_bits(left) @ self.right.T
        self.kept = large + remainder(m - large, self.how)

    def bytes(self) -> float:
        """Of a parameter."""
        rows, cols = self.kept.shape
        scales = {"rank 1": (rows + cols) / (rows * cols)}.get(
            self.how, 1 / int(self.how.split()[-1])
        )
        return 0.5 + 4 * scales + self.rank * (rows + cols) / (rows * cols) * (1 + 4 / 256)


def measure_low_rank(
    share: int, how: str, gradients: Matrices, exact: dict[str, dict[int, Measured]]
) -> dict[str, Any]:
    out: dict[str, dict[str, dict[str, float]]] = {name: {} for name in gradients}
    sizes = []
    for name, several in gradients.items():
        state = LowRank(several[0], share, how)
        for step, g in enumerate(several, 1):
            m = state.kept.lerp(g, 1 - MOMENTUM)
            if step in AT:
                out[name][str(step)] = {
                    key: round(value, 4) for key, value in exact[name][step].errors(m).items()
                }
            state.keep(m)
        sizes.append(state.bytes())
    return {"bytes": round(statistics.fmean(sizes), 3), "errors": out}


def specs() -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and `lowbit.scaled(...)`: those of 4 bits with every scale, then those of 8,
    then all others; each rounding.
    """
    signed = [e for e in ops.entries("state") if e["signed"] and e["name"] != "float32"]
    for rounding in ("nearest", "stochastic"):
        for entry in sorted(signed, key=lambda e: (e["name"] not in FOUR, e["bits"] != 8)):
            scales: Sequence[dict[str, Any]] = SCALES if entry["name"] in FOUR else [{}]
            for scale in scales:
                spec = lowbit.scaled(entry["name"], rounding=rounding, **scale)
                cover = {"block": f"blocks of {spec['block']}", "none": "none"}.get(
                    spec["scale"], spec["scale"]
                )
                yield f"{entry['name']}, {cover}, {rounding}", spec


def mean(found: dict[str, Any], key: str, names: Sequence[str]) -> float:
    """Of an error after all steps, over some matrices."""
    return statistics.fmean(found["errors"][name][str(STEPS)][key] for name in names)


def tables(results: dict[str, Any]) -> str:
    """Markdown: all formats with blocks of their own length, those of 4 bits with every scale, and
    low-rank parts.
    """
    about = (
        f"float32 momentum, {len(REAL)} matrices of a GPT, and {len(POWERS)} synthetic ones, "
        f"{STEPS} steps; {results['cpu']}, {results['date'][:10]}."
    )
    formats = results["formats"]
    made = [about, by_format(formats), by_scale(formats), by_rank(results["low_rank"])]
    return "\n\n".join(made)


def by_format(found: dict[str, Any]) -> str:
    """A row for each format with blocks of its own length, those of most bits first."""
    entries = {e["name"]: e for e in ops.entries("state")}
    own = {
        name: one
        for name, one in found.items()
        if name.endswith("nearest")
        and one["spec"]["scale"] in ("block", "none")
        and one["spec"]["block"] in (0, entries[one["spec"]["format"]]["block"])
    }
    order = sorted(
        own,
        key=lambda n: (-entries[own[n]["spec"]["format"]]["bits"], -mean(own[n], "descent", REAL)),
    )
    drawn = [f"power {power:g}" for power in POWERS]
    rows = []
    for name in order:
        one, by_chance = own[name], found.get(name.replace("nearest", "stochastic"))
        format, block = one["spec"]["format"], one["spec"]["block"]
        rows.append(
            [
                f"`{format}`{f', blocks of {block}' if block else ''}",
                entries[format]["bits"],
                *(f"{mean(one, key, REAL):.2f}" for key in ("momentum", "update", "small")),
                f"{mean(one, 'descent', REAL):.3f}",
                f"{mean(by_chance, 'descent', REAL):.3f}" if by_chance else "",
                f"{mean(one, 'update', drawn):.2f}",
                f"{mean(one, 'descent', drawn):.3f}",
            ]
        )
    head = ["state", "bits", "momentum", "update", "small directions", "descent"]
    return table([*head, "descent, stochastic", "synthetic: update", "descent"], rows)


def update_and_descent(one: dict[str, Any]) -> str:
    return f"{mean(one, 'update', REAL):.2f}, {mean(one, 'descent', REAL):.3f}"


def by_scale(found: dict[str, Any]) -> str:
    """A row for each scale, a column for each format of 4 bits."""
    rows = []
    for scale in SCALES:
        specs = [lowbit.scaled(format, **scale) for format in FOUR]
        size = 0.5 + (4 / scale["block"] if "block" in scale else 0)
        covers = (
            f"blocks of {scale['block']}"
            if "block" in scale
            else {"rank1": "rank 1"}.get(scale["scale"], f"a {scale['scale']}")
        )
        cells = [
            update_and_descent(next(x for x in found.values() if x["spec"] == spec))
            for spec in specs
        ]
        rows.append([covers, f"{size:.2f}", *cells])
    return table(["4 bits, scales of", "bytes", *(f"`{f}`" for f in FOUR)], rows)


def by_rank(found: dict[str, Any]) -> str:
    """A row for each rank of the part in 8 bits, a column for each format of the remainder."""
    rows = []
    for share in SHARES:
        several = [found[f"{share}, {how}"] for how in REMAINDERS]
        rank = f"1/{share} of the shorter side" if share else "none"
        rows.append([rank, *(f"{update_and_descent(x)}; {x['bytes']:.2f}" for x in several)])
    return table(["rank of the part in 8 bits", *(f"remainder in {x}" for x in REMAINDERS)], rows)


def write(results: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps(results).replace('}, "', '},\n"') + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="print Markdown, measure nothing")
    parser.add_argument("--again", action="store_true", help="forget what was measured")
    args = parser.parse_args()
    results: dict[str, Any] = {"formats": {}}
    if RESULTS.exists() and not args.again:
        results = json.loads(RESULTS.read_text())
    if args.table:
        print(tables(results))
        return
    missing = {n: spec for n, spec in specs() if n not in results["formats"]}
    low_rank = results.setdefault("low_rank", {})
    pairs = [
        (share, how) for share in SHARES for how in REMAINDERS if f"{share}, {how}" not in low_rank
    ]
    if missing or pairs:
        torch.set_num_threads(1)
        gradients = {**real(), **synthetic()}
        exact = references(gradients)
        facts = machine.describe("cpu")
        if missing:
            results |= {key: facts[key] for key in ("cpu", "isa", "date")}
            versions: Any = facts["versions"]
            results["versions"] = {package: versions[package] for package in ("torch", "lowbit")}
        for name, spec in missing.items():
            found = measure(spec, gradients, exact)
            results["formats"][name] = {"spec": spec, "errors": found}
            write(results)
            last = found[REAL[2]][str(STEPS)]
            print(f"{name:42} {last}", flush=True)
        for share, how in pairs:
            low_rank[f"{share}, {how}"] = one = measure_low_rank(share, how, gradients, exact)
            write(results)
            print(
                f"rank 1/{share}, remainder in {how}: descent {mean(one, 'descent', REAL):.3f}, "
                f"{one['bytes']} bytes",
                flush=True,
            )


if __name__ == "__main__":
    main()
