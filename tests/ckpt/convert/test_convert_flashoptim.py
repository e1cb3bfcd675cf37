"""FlashOptim's files, of 0.1.3 and of 0.1.4, into others and back. FlashOptim needs CUDA to be
installed, so the files are put together here (tests/support/peers/files.py) around the arrays that
its own kernels left."""

import pickle

import numpy as np
import pytest
import torch

import lowbit
from lowbit import ops
from tests.support.peers.files import (
    ADAM,
    adam_file,
    companded,
    convert,
    expanded,
    flash_file,
    flash_state,
    need_tool,
    run,
    same,
    scaled_normal,
)
from tests.support.peers.golden import arrays

pytestmark = pytest.mark.slow

need_tool()
FLASH = arrays("flashoptim_golden")
SHAPES = [(128, 64), (70, 33), (45,)]  # blocks end with rows; go over them; a vector with a rest


def golden_scales(name):
    return torch.from_numpy(FLASH[name].view(np.float16).copy())


def entries(new, bits16=True, seed=0):
    made = []
    for i, shape in enumerate(SHAPES):
        m, v = scaled_normal(shape, seed + i), scaled_normal(shape, seed + 9 + i).square()
        error = torch.randint(-127, 128, shape).to(torch.bfloat16) if bits16 else None
        moments = {"exp_avg": companded(m, True), "exp_avg_sq": companded(v, False)}
        made.append(flash_state(moments, new=new, bits16=bits16, error=error))
    return made


def named(file):
    for group in file["param_groups"]:
        group["param_names"] = [f"p{i}" for i in group["params"]]
    return file


def weights(tmp_path, shapes=SHAPES):
    """lowbit's codes are matrices: other shapes are those of the weights."""
    torch.save({f"p{i}": torch.zeros(s) for i, s in enumerate(shapes)}, tmp_path / "model.pt")
    return "--model", tmp_path / "model.pt"


@pytest.mark.parametrize("new", [False, True])
def test_golden_moments_are_read_as_flashoptim_reads_them(tmp_path, new):
    moments = {
        "exp_avg": (
            torch.from_numpy(FLASH["q_m_codes"].copy()),
            golden_scales("q_m_scales_f16bits"),
        ),
        "exp_avg_sq": (
            torch.from_numpy(FLASH["q_v_codes"].copy()),
            golden_scales("q_v_scales_f16bits"),
        ),
    }
    file = flash_file([flash_state(moments, new=new, bits16=True)], width=0)
    state = convert(tmp_path, file, "torch")["state"][0]
    np.testing.assert_array_equal(state["exp_avg"].numpy(), FLASH["q_m_deq"])
    np.testing.assert_array_equal(state["exp_avg_sq"].numpy(), FLASH["q_v_deq"])
    assert state["step"] == 3


def test_codes_are_written_as_flashoptim_writes_them(tmp_path):
    m, v = torch.from_numpy(FLASH["q_m_in"].copy()), torch.from_numpy(FLASH["q_v_in"].copy())
    content = {
        "model": {"w": torch.zeros(100, dtype=torch.bfloat16)},
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": m, "exp_avg_sq": v}},
            "param_groups": [{**ADAM, "params": [0], "param_names": ["w"]}],
        },
    }
    state = convert(tmp_path, content, "flashoptim")["optimizer"]["state"][0]
    assert state["step"].dtype == torch.int64
    for name, golden in (("exp_avg", "q_m"), ("exp_avg_sq", "q_v")):
        codes, scales = state[f"{name}::quantized"].numpy(), state[f"{name}::scales"]
        assert scales.dtype == torch.bfloat16  # of a bfloat16 weight: the bits of float16
        bits = scales.view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(codes, FLASH[f"{golden}_codes"])
        np.testing.assert_array_equal(bits, FLASH[f"{golden}_scales_f16bits"])
    old = convert(tmp_path, content, "flashoptim", "--state-format", "0.1.3")
    state = old["optimizer"]["state"][0]
    assert state["step"].dtype == torch.float32 and state["exp_avg::scales"].dtype == torch.float16


@pytest.mark.parametrize("new", [False, True])
def test_either_generation_becomes_the_other_and_comes_back(tmp_path, new):
    versions = ["0.1.3", "0.1.4"]
    ours, other = flash_file(entries(new)), flash_file(entries(not new))
    torch.manual_seed(0)  # the corrections differ only where they were drawn apart
    for a, b in zip(ours["state"].values(), other["state"].values(), strict=True):
        b["error_bits"] = a["error_bits"]
    there = convert(tmp_path, ours, "flashoptim", "--state-format", versions[not new])
    same(there, other)
    same(convert(tmp_path, there, "flashoptim", "--state-format", versions[new]), ours)


@pytest.mark.parametrize("new", [False, True])
def test_through_lowbit_and_back(tmp_path, new):
    """Codes of the matrix are relabelled; those of the others are read as numbers, whose codes come
    out the same: every block has its largest value.
    """
    file = named(flash_file(entries(new)))
    ours = convert(tmp_path, file, "lowbit")
    state = ours["state"][0]
    assert torch.equal(
        state["exp_avg_companded8"].int() - 127, file["state"][0]["exp_avg::quantized"].int()
    )
    assert state["param_bfloat16_split8"].dtype == torch.int8
    name = ["0.1.3", "0.1.4"][new]
    back = convert(tmp_path, ours, "flashoptim", "--state-format", name, *weights(tmp_path))
    for i, entry in file["state"].items():
        got = back["state"][i]
        assert list(sorted(got)) == list(sorted(entry))
        for key in entry if i == 0 else ["error_bits", "step"]:
            same(got[key], entry[key])
        for name in ("exp_avg", "exp_avg_sq"):
            values = [
                expanded(e[f"{name}::quantized"], e[f"{name}::scales"].view(torch.float16))
                for e in (entry, got)
            ]
            torch.testing.assert_close(*values, rtol=2e-3, atol=0 if i == 0 else 1e-9)


def test_lowbit_goes_on_with_it(tmp_path):
    """Moments, corrections and the weights they make, loaded into a live optimizer."""
    weights = [torch.randn(s) for s in SHAPES]
    parts = [ops.split(w, "bfloat16_split8") for w in weights]
    file = flash_file(entries(True))
    for (_, extra), entry in zip(parts, file["state"].values(), strict=True):
        entry["error_bits"] = extra.reshape(entry["error_bits"].shape).to(torch.bfloat16)
    ours = convert(tmp_path, file, "lowbit")
    params = [torch.nn.Parameter(p.reshape(s)) for (p, _), s in zip(parts, SHAPES, strict=True)]
    formats = {
        "exp_avg": lowbit.scaled("companded8", block=32),
        "exp_avg_sq": lowbit.scaled("companded8_unsigned", block=32),
    }
    opt = lowbit.AdamW(params, state_format=formats, param_format="bfloat16_split8")
    opt.load_state_dict(ours)
    live = opt.state[params[0]]
    assert torch.equal(live["exp_avg_companded8"], ours["state"][0]["exp_avg_companded8"])
    assert live["step"] == 3
    for w, p, entry in zip(weights, params, file["state"].values(), strict=True):
        full = ops.join(p.detach(), opt.state[p]["param_bfloat16_split8"], "bfloat16_split8")
        assert (full - w).abs().max() <= w.abs().max() * 2e-5
        assert torch.equal(
            opt.state[p]["param_bfloat16_split8"].float(), entry["error_bits"].float()
        )
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    assert opt.state[params[0]]["step"] == 4


def test_corrections_of_16_bits_are_bits(tmp_path):
    """Some of them look like NaN and infinities of bfloat16,
    which no conversion of numbers keeps.
    """
    bits = torch.arange(-32767, 32768, 7, dtype=torch.int16)[:8192].reshape(128, 64)
    m = companded(scaled_normal((128, 64), 0), True)
    v = companded(scaled_normal((128, 64), 1).square(), False)
    entry = flash_state(
        {"exp_avg": m, "exp_avg_sq": v}, new=True, bits16=True, error=bits.view(torch.bfloat16)
    )
    ours = convert(tmp_path, named(flash_file([entry], width=4)), "lowbit")
    extra = ours["state"][0]["param_bfloat16_split16"]
    assert extra.shape == (128, 64, 2) and torch.equal(extra.view(torch.int16).squeeze(-1), bits)
    back = convert(tmp_path, ours, "flashoptim", *weights(tmp_path, SHAPES[:1]))
    same(back["state"], {0: entry})


def test_plain_states(tmp_path):
    m, v = scaled_normal((70, 33), 0), scaled_normal((70, 33), 1).square()
    for new, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        file = flash_file([flash_state({}, new=new, bits16=True)])
        file["state"][0] |= {"exp_avg": m.to(dtype), "exp_avg_sq": v.to(dtype)}
        state = convert(tmp_path, file, "torch")["state"][0]
        assert torch.equal(state["exp_avg"], m.to(dtype).float())
        kind = str(dtype).removeprefix("torch.")
        same(convert(tmp_path, file, "flashoptim", "--state-format", kind), file)


def broken(change):
    file = flash_file(entries(True))
    change(file)
    return file


def old_scales(file):
    file["state"][0]["exp_avg::scales"] = file["state"][0]["exp_avg::scales"].view(torch.float16)


def cast_scales(file):
    """What 0.1.4 makes of a file of 0.1.3: the numbers as bfloat16, taken for bits,
    and the float32 step.
    """
    entry = file["state"][0]
    numbers = entry["exp_avg::scales"].view(torch.float16).float().clamp(min=1e-6)
    entry["exp_avg::scales"] = numbers.to(torch.bfloat16)
    entry["step"] = entry["step"].float()


def both_forms(file):
    file["state"][0]["exp_avg"] = torch.zeros(SHAPES[0])


def no_width(file):
    del file["param_groups"][0]["master_bytewidth"]


def no_scales(file):
    del file["state"][0]["exp_avg::scales"]


def few_scales(file):
    file["state"][0]["exp_avg::scales"] = file["state"][0]["exp_avg::scales"][1:]


def cast_codes(file):
    entry = file["state"][0]
    entry["exp_avg::quantized"] = entry["exp_avg::quantized"].to(torch.bfloat16)


@pytest.mark.parametrize(
    "change, message",
    [
        (old_scales, "which of the two wrote them cannot be told"),
        (cast_scales, "taken them for other numbers"),
        (both_forms, "both plain and compressed"),
        (no_width, "may be of 8 or of 16 bits"),
        (no_scales, "codes without scales"),
        (few_scales, "go with 256 scales"),
        (cast_codes, "a program has cast them"),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(tmp_path, change, message):
    error = convert(tmp_path, broken(change), "lowbit", code=3)
    assert message in error and "parameter 0" in error


def test_numbers_that_are_no_corrections_are_found_while_they_are_written(tmp_path):
    file = flash_file(entries(True))
    file["state"][0]["error_bits"][3, 4] = 0.5
    assert "is not a whole number of 8 bits" in convert(tmp_path, file, "lowbit", code=3)


def test_what_flashoptim_cannot_keep(tmp_path):
    state = {
        "step": torch.tensor(1.0),
        "exp_avg": torch.ones(64, 64),
        "exp_avg_sq": torch.ones(64, 64),
    }
    content = {"state": {0: dict(state)}, "param_groups": [{**ADAM, "params": [0]}]}
    assert "in the weight's type" in convert(tmp_path, content, "flashoptim", code=3)
    plain = convert(tmp_path, content, "flashoptim", "--state-format", "float32")
    assert torch.equal(plain["state"][0]["exp_avg"], state["exp_avg"])
    assert plain["param_groups"][0]["quantize"] is True
    content["state"][0]["max_exp_avg_sq"] = torch.ones(64, 64)
    error = convert(tmp_path, content, "flashoptim", "--state-format", "float32", code=3)
    assert "keeps no max_exp_avg_sq" in error
    assert "keeps no state as" in convert(
        tmp_path, content, "flashoptim", "--state-format", "4bit", code=2
    )


def test_scales_are_in_the_dtype_of_the_one_weight(tmp_path):
    ones = torch.ones(64, 64)
    content = {"optim": adam_file(ones, ones.clone())}
    narrow, wide = torch.ones(64, 64, dtype=torch.bfloat16), torch.ones(64, 64)
    content |= {"model": {"w": narrow}, "ema": {"w": wide}}
    error = convert(tmp_path, content, "flashoptim", code=3)
    assert "may be any of model.w, ema.w" in error and "--exclude 'ema.*'" in error
    convert(tmp_path, content, "flashoptim", "--state-format", "float32")
    torch.save({"w": narrow}, tmp_path / "model.pt")
    same_dtype = {**content, "ema": {"w": narrow + 1}}
    for case, options in (
        (content, ["--exclude", "ema.*"]),
        (content, ["--model", tmp_path / "model.pt"]),
        (same_dtype, []),
    ):
        got = convert(tmp_path, case, "flashoptim", *options)["optim"]["state"][0]
        assert got["exp_avg::scales"].dtype == torch.bfloat16


def test_scales_are_of_the_weights_dtype_after_rounding(tmp_path):
    """0.1.4 keeps float16 scales as bits of bfloat16 where the weight is bfloat16, and would take
    float16 numbers for such bits once torch has cast them. Batch norms stay float32.
    """
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.BatchNorm1d(128))
    opt = torch.optim.AdamW(net.named_parameters())
    net(torch.randn(16, 64)).square().sum().backward()
    opt.step()
    content = {"model": net.state_dict(), "optimizer": opt.state_dict()}
    plain = convert(tmp_path, content, "flashoptim")["optimizer"]["state"]
    made = convert(tmp_path, content, "flashoptim", "--weights", "bfloat16")
    assert made["model"]["0.weight"].dtype == torch.bfloat16
    assert made["model"]["1.weight"].dtype == torch.float32
    for number, name in enumerate(dict(net.named_parameters())):
        for moment in ("exp_avg", "exp_avg_sq"):
            scales = made["optimizer"]["state"][number][f"{moment}::scales"]
            assert scales.dtype == (torch.bfloat16 if name.startswith("0.") else torch.float16)
            want = plain[number][f"{moment}::scales"]
            assert torch.equal(scales.view(torch.int16), want.view(torch.int16))


def saved_by_ranks(folder):
    """Makes a directory of lowbit-ckpt one that torch saved, which has an id."""
    index = folder / ".metadata"
    metadata = pickle.loads(index.read_bytes())
    assert metadata.storage_meta.save_id is None
    metadata.storage_meta.save_id = "d4a6"
    index.write_bytes(pickle.dumps(metadata))
    (folder / "lowbit.json").unlink()


CUT = [(80, 3, "whole"), (16, 2, "shards"), (48, 2, "whole"), (48, 2, "as saved")]


@pytest.mark.parametrize("count, shards, read", CUT)
def test_blocks_of_shards_under_fsdp2(tmp_path, count, shards, read):
    """Each of two ranks has blocks from the beginning of its shard on, so that 16 values have two
    scales. A whole tensor of 48 has as many as two shards of 24: those are as the ranks saved them,
    unless lowbit-ckpt wrote the directory, which has blocks of the whole tensor.
    """
    x = scaled_normal((count,), 0)
    if read == "whole":
        codes, scales = companded(x, True)
        values = expanded(codes, scales)
    else:
        halves = [companded(half, True) for half in x.chunk(2)]
        values = torch.cat([expanded(*half) for half in halves])
        codes, scales = (torch.cat(part) for part in zip(*halves, strict=True))
    assert scales.numel() == shards
    state = flash_state({"exp_avg": (codes, scales)}, new=True, bits16=True)
    del state["step"]
    group = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0, "quantize": True}
    group |= {"master_bytewidth": 0, "params": ["bias"]}
    torch.save({"state": {"bias": state}, "param_groups": [group]}, tmp_path / "whole.pt")
    run("convert", tmp_path / "whole.pt", tmp_path / "whole", "--container", "dcp")
    run("reshard", tmp_path / "whole", tmp_path / "on-2", "--world-size", "2")
    if read == "as saved":
        saved_by_ranks(tmp_path / "on-2")
    run("convert", tmp_path / "on-2", tmp_path / "out.pt", "--to", "lowbit")
    got = torch.load(tmp_path / "out.pt")["state"]["bias"]["exp_avg"]
    assert torch.equal(got, values)
    torch.save({"bias": torch.zeros(count)}, tmp_path / "model.pt")
    again = (tmp_path / "again.pt", "--to", "flashoptim", "--model", tmp_path / "model.pt")
    run("convert", tmp_path / "on-2", *again)
    if read in ("shards", "as saved"):  # a new cut would lose where the shards began
        for verb in (("reshard", "--world-size", "3"), ("convert",)):
            said = run(verb[0], tmp_path / "on-2", tmp_path / "on-3", *verb[1:], code=3).stderr
            assert "FlashOptim's blocks begin anew in each rank's shard" in said
            assert not (tmp_path / "on-3").exists()
    anew = torch.load(tmp_path / "again.pt")["state"]["bias"]
    kept = expanded(anew["exp_avg::quantized"], anew["exp_avg::scales"])
    assert (kept - values).abs().max() <= values.abs().max() / 100
