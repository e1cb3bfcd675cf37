"""Parts of one parameter in one process: however rows and blocks are cut, the operator writes what
it writes for the whole, in every format.
"""

import itertools

import pytest
import torch

from lowbit import ops
from lowbit.optim.codes import unpack
from tests.support.plans import FORMATS, fresh_state, plan_row, run_step

ROWS, COLS = 5, 700
RULE = "adamw"
HYPER = [0.01, 0.9, 0.999, 1e-8, 0.1]
CUT_ENDS, CUT_ALL = map(ops.plan_names("cuts").index, ("ends", "all"))
ENDS = [ops.plan_columns()[name] for name in ("front", "back", "cut")]
ISAS = ops.catalog()["isas"]

pytestmark = pytest.mark.usefixtures("isa_restored")


def partner(entry):
    """Formats of the two moments: this one where it can hold the moment,
    for the other its nearest relative.
    """
    name = entry["name"]
    if entry["signed"]:
        return [name, name]
    return ["dynamic8", name]


def gradients(step):
    g = torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(step))
    g[0, :5] = 0.0
    if step == 2:
        g[1, 300] = float("inf")  # its block is NaN from here on, in every part of it
    return g.to(torch.bfloat16)


def weights():
    return torch.randn(ROWS, COLS, generator=torch.Generator().manual_seed(99)).to(torch.bfloat16)


def run_whole(formats, steps):
    p, state, count = weights(), fresh_state(RULE, (ROWS, COLS), formats), [torch.zeros(1)]
    plan = plan_row(ROWS, COLS, formats, "bfloat16_stochastic", stream=7)
    for step in range(steps):
        run_step(RULE, [p], [gradients(step)], state, count, plan, HYPER)
    return p, state


class Part:
    """A rectangle of rows and columns, ragged at its ends."""

    def __init__(self, rows, cols, front, back, cut, formats, device="cpu"):
        (self.r0, self.r1), (self.c0, self.c1) = rows, cols
        self.front, self.back, self.formats = front, back, formats
        n, m = self.r1 - self.r0, self.c1 - self.c0
        plan = plan_row(
            n,
            m,
            formats,
            "bfloat16_stochastic",
            first=self.r0 * COLS + self.c0,
            stream=7,
            global_cols=COLS,
        )
        plan[0, ENDS] = torch.tensor([front, back, cut])
        self.plan, self.p, self.device = plan, self.of(weights()).to(device), torch.device(device)
        self.count = [torch.zeros(1, device=device)]
        self.state = []
        for name in formats:
            entry = ops.state_format(name)
            zeros = torch.zeros(n, m)
            full_precision = COLS if cut == CUT_ALL else m
            codes, _ = ops.quantize(zeros, name, entry["block"])
            _, scales = ops.quantize(torch.zeros(n, full_precision), name, entry["block"])
            self.state += [codes.to(device), scales.to(device)]

    def of(self, whole):
        return self.held(whole[self.r0 : self.r1, self.c0 : self.c1])

    def held(self, here):
        """Without what lies elsewhere of the first and the last row."""
        flat = here.reshape(-1)
        return flat[self.front : flat.numel() - self.back].clone()

    def step(self, phase, grad, workspace):
        ops.step(
            RULE,
            [self.p],
            [self.of(grad).to(self.device)],
            self.state,
            self.count,
            self.plan,
            HYPER,
            phase=phase,
            workspace=workspace,
        )


def run_parts(parts, steps, share):
    for step in range(steps):
        grad = gradients(step)
        workspaces = [ops.workspace(RULE, part.plan, part.device) for part in parts]
        for part, own in zip(parts, workspaces, strict=True):
            part.step(0, grad, own)
        share(parts, [own["blocks"] for own in workspaces])
        for part, own in zip(parts, workspaces, strict=True):
            part.step(1, grad, own)


def check(parts, whole, formats):
    p, state = whole
    for part in parts:
        assert torch.equal(part.p.cpu().view(torch.int16), part.of(p).view(torch.int16))  # NaN too
        for k, name in enumerate(formats):
            bits = ops.state_format(name)["bits"]
            cols = part.c1 - part.c0
            got, want = (
                t.cpu().view(torch.int16)
                if bits > 8
                else unpack(t.cpu().view(torch.uint8), bits, n)
                for t, n in ((part.state[2 * k], cols), (state[2 * k], COLS))
            )
            assert torch.equal(part.held(got), part.of(want)), f"codes of {name}"
            scales, all_scales = part.state[2 * k + 1].cpu(), state[2 * k + 1][part.r0 : part.r1]
            assert scales.shape == all_scales.shape
            assert torch.equal(
                scales.view(torch.uint8), all_scales.contiguous().view(torch.uint8)
            ), f"scales of {name}"


CODED = [entry for entry in FORMATS if entry["scaled"]]


def share_largest(parts, blocks):
    assert all(len(b) == len(blocks[0]) for b in blocks)
    most = torch.stack(blocks).amax(0)
    for b in blocks:
        b.copy_(most)


def check_flat_shards(formats, whole, device="cpu"):
    """Three shards of the flattened matrix: the ends lie inside rows, blocks and bytes; one row,
    and no other cut one, is in all three.
    """
    ends = [0, 2 * COLS + 13, 2 * COLS + 429, ROWS * COLS]
    parts = []
    for begin, end in itertools.pairwise(ends):
        r0, r1 = begin // COLS, -(-end // COLS)
        parts.append(
            Part((r0, r1), (0, COLS), begin - r0 * COLS, r1 * COLS - end, CUT_ENDS, formats, device)
        )
    run_parts(parts, 4, share_largest)
    check(parts, whole, formats)


def check_columns_inside_blocks(formats, whole, device="cpu"):
    """Three shards of columns whose first blocks begin elsewhere; one holds less than a block."""
    ends = [0, 56, 360, COLS]  # of codes of any width on a byte
    parts = [
        Part((0, ROWS), ends, 0, 0, CUT_ALL, formats, device) for ends in itertools.pairwise(ends)
    ]
    run_parts(parts, 4, share_largest)
    check(parts, whole, formats)


@pytest.mark.parametrize("entry", CODED, ids=lambda e: e["name"])
def test_flat_shards(entry):
    formats = partner(entry)
    whole = run_whole(formats, 4)
    for isa in ISAS if entry["name"] in ("dynamic8", "dynamic4") else ISAS[-1:]:
        ops.set_isa(isa)
        check_flat_shards(formats, whole)


@pytest.mark.parametrize("entry", CODED, ids=lambda e: e["name"])
def test_columns_inside_blocks(entry):
    formats = partner(entry)
    check_columns_inside_blocks(formats, run_whole(formats, 4))


def run_rows(rows, cols, formats, param, isa, apart):
    """Some steps of a matrix, whole or each row by itself; the bytes of parameter and state,
    row by row.
    """
    ops.set_isa(isa)
    ranges = [(r, r + 1) for r in range(rows)] if apart else [(0, rows)]
    whole = torch.randn(rows, cols, generator=torch.Generator().manual_seed(1))
    held = []
    for begin, end in ranges:
        n = end - begin
        p = whole[begin:end].to(torch.bfloat16)
        plan = plan_row(n, cols, formats, param, first=begin * cols, stream=7)
        held.append((p, fresh_state(RULE, (n, cols), formats, param), [torch.zeros(1)], plan))
    for step in range(3):
        grad = torch.randn(rows, cols, generator=torch.Generator().manual_seed(step + 2))
        grad *= 10.0 ** torch.randint(-4, 2, (rows, 1), generator=torch.Generator().manual_seed(5))
        grad[rows // 2] = 0.0
        if step == 2:
            grad[rows - 2, cols // 2] = float("nan")
        for (begin, end), (p, state, count, plan) in zip(ranges, held, strict=True):
            run_step(RULE, [p], [grad[begin:end].contiguous()], state, count, plan, HYPER, seed=3)
    parts = zip(*([p, *state] for p, state, _, _ in held), strict=True)
    return [torch.cat(part).contiguous().view(torch.uint8) for part in parts]


def stochastic(format, block):
    return {"format": format, "block": block, "stochastic": True}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "formats, param",
    [
        ([("dynamic8", 64), ("dynamic8_unsigned", 2048)], "bfloat16_stochastic"),
        ([("linear4", 2048), ("dynamic8_unsigned", 32)], "bfloat16_kahan"),
        ([stochastic("dynamic4", 128), stochastic("dynamic8_unsigned", 512)], "bfloat16"),
        ([("dynamic3", 32), "bfloat16"], "bfloat16_split8_stochastic"),
        (["log8_signed", "companded8_unsigned"], "bfloat16"),
        (["float32", "float32"], "bfloat16_stochastic"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_rows_that_are_walked_as_one(formats, param, isa):
    """Rows of whole blocks are one row to the CPU's walk: shorter than a block, some blocks long,
    longer than a tile, and where they may not be.
    """
    shapes = [
        (90, 1), (70, 2), (67, 3), (40, 8), (41, 24), (30, 64), (22, 96), (9, 600), (7, 640),
        (5, 1000), (4, 2048), (3, 2080),
    ]  # fmt: skip
    for rows, cols in shapes:
        whole = run_rows(rows, cols, formats, param, isa, apart=False)
        apart = run_rows(rows, cols, formats, param, "baseline", apart=True)
        assert all(map(torch.equal, whole, apart)), (rows, cols)


def test_a_cut_that_nobody_shares_is_seen():
    """The test can fail: without the agreement the scales differ."""
    formats = ["dynamic8", "dynamic8_unsigned"]
    parts = [Part((0, ROWS), ends, 0, 0, CUT_ALL, formats) for ends in ((0, 56), (56, COLS))]
    run_parts(parts, 4, lambda parts, blocks: None)
    with pytest.raises(AssertionError):
        check(parts, run_whole(formats, 4), formats)


@pytest.mark.parametrize(
    "ends, message",
    [
        ([-1, 0, 1], "impossible size"),
        ([0, 0, 3], "impossible size"),
        ([701, 0, 1], "impossible size"),
    ],
)
def test_impossible_ends_are_refused(ends, message):
    part = Part((0, ROWS), (0, COLS), 0, 0, CUT_ENDS, ["dynamic8", "dynamic8_unsigned"])
    part.plan[0, ENDS] = torch.tensor(ends)
    with pytest.raises(RuntimeError, match=message):
        part.step(
            0,
            gradients(0),
            ops.workspace(RULE, plan_row(1, 1, ["float32", "float32"]), torch.device("cpu")),
        )


def test_columns_inside_a_byte_are_refused():
    part = Part((0, ROWS), (56, COLS - 8), 0, 0, CUT_ALL, ["dynamic4", "power1_4_unsigned"])
    part.plan[0, ops.plan_columns()["first"]] += 1
    with pytest.raises(RuntimeError, match="inside a byte"):
        part.step(0, gradients(0), ops.workspace(RULE, part.plan, torch.device("cpu")))
