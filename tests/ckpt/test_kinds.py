"""The checkpoints of tests/support/kinds are what they say: torch and the peers read them back,
with the same content at every number of ranks. What lowbit-ckpt does with each is in
test_kinds_tool.py."""

import numpy as np
import pytest
import torch

from tests.support.kinds import peers, runs
from tests.support.kinds.catalog import (
    KINDS,
    flat,
    load_file_of_torch,
    merged_metadata,
    nested,
    of,
    same,
)
from tests.support.kinds.decode import dequantize
from tests.support.peers.golden import arrays

pytestmark = pytest.mark.long

KNOWN = [(kind, world) for kind, world in of() if KINDS[kind].recoverable]


@pytest.mark.parametrize("kind, world", KNOWN)
def test_what_was_made_is_what_was_meant(made, kind, world):
    """By torch's own loader, and the peer's decoder where it has one."""
    assert same(KINDS[kind].held(made(kind, world)), KINDS[kind].meaning())


@pytest.mark.parametrize("kind, world", of())
def test_they_are_small(made, kind, world):
    path = made(kind, world)
    files = path.iterdir() if path.is_dir() else [path]
    assert 0 < sum(file.stat().st_size for file in files) < 2 << 20


# What is special about each is there.


def chunks(path, key):
    return [tuple(c.sizes) for c in merged_metadata(path).state_dict_metadata[key].chunks]


@pytest.mark.parametrize("world, rows", [(2, [19, 18]), (4, [10, 10, 10, 7])])
@pytest.mark.parametrize("kind", ["fsdp2_nested", "fsdp1_dtensor", "fsdp1_sharded", "lowbit_8bit"])
def test_rows_are_cut_unevenly(made, kind, world, rows):
    slot = "exp_avg_dynamic8" if kind == "lowbit_8bit" else "exp_avg"
    key = f"optim.state.body.linear.weight.{slot}"
    assert chunks(made(kind, world), key) == [(n, 256) for n in rows]


def test_some_ranks_hold_nothing(made):
    """torch's DTensors leave an empty chunk where a rank has no rows;
    its ShardedTensors leave none.
    """
    key = "optim.state.norm.scale.exp_avg"
    assert set(chunks(made("fsdp2_nested", 4), key)) == {(1,), (0,)}
    assert chunks(made("fsdp1_sharded", 4), key) == [(1,)]


def test_columns_are_cut(made):
    key = "optim.state.body.linear.weight.exp_avg"
    assert chunks(made("tp_fsdp2", 2), key) == [(37, 128)] * 2
    assert sorted(chunks(made("tp_fsdp2", 4), key)) == [(18, 128)] * 2 + [(19, 128)] * 2


def test_replicas_are_written_once(made):
    key = "optim.state.body.linear.weight.exp_avg"
    assert chunks(made("hsdp", 4), key) == [(19, 256), (18, 256)]
    assert chunks(made("ddp", 4), key) == [(37, 256)]


def test_keys_nested_flattened_alone_and_by_number(made):
    def paths(kind):
        return set(merged_metadata(made(kind, 2)).planner_data.values())

    assert ("optim", "state", "head.weight", "exp_avg") in paths("fsdp2_nested")
    assert ("optim", "state.head.weight.exp_avg") in paths("fsdp2_flattened")
    assert ("optim", "param_groups.head.weight.lr") in paths("fsdp2_flattened")
    assert ("state", "head.weight", "exp_avg") in paths("fsdp2_optim_only")
    assert ("optim", "state", "2", "exp_avg") in paths("raw")
    assert ("optim", "state", "0", "__bnb_optimizer_quant_state__", "state1") in paths("bnb")


def test_files_of_the_directories(made):
    def names(kind):
        return sorted(p.name for p in made(kind, 4).iterdir())

    assert names("fsdp2_nested") == [".metadata", *(f"__{r}_0.distcp" for r in range(4))]
    assert [n for n in names("no_collectives") if "metadata" in n] == [
        f"__{r}.metadata" for r in range(4)
    ]
    assert "__0_1.distcp" in names("two_threads") and len(names("file_per_item")) > 50


def test_zstd_items_are_frames_without_a_size(made):
    """As torch's extension leaves them: the descriptor in the metadata,
    and a frame that does not say how long it becomes.
    """
    path = made("zstd", 2)
    for info in merged_metadata(path).storage_data.values():
        assert info.transform_descriptors == ["stream.zstd/1"]
        frame = (path / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        assert frame[:4] == b"\x28\xb5\x2f\xfd" and frame[4] >> 5 == 0


def test_containers_of_torch(made):
    assert made("zip_file", 1).read_bytes()[:4] == b"PK\3\4"
    magic = 0x1950A86A20F9469CFC6C.to_bytes(10, "little")
    assert made("legacy_file", 1).read_bytes()[:15] == b"\x80\x02\x8a\x0a" + magic + b"."
    model = load_file_of_torch(made("model_file", 1))
    assert type(model).__name__ == "OrderedDict" and hasattr(model, "_metadata")
    shared = load_file_of_torch(made("shared_file", 1))["model"]
    where = {name: t.untyped_storage().data_ptr() for name, t in shared.items()}
    assert where["tied.in"] == where["tied.out"] == where["transposed"]
    assert where["head"] == where["tail"] == where["every.other"]
    assert shared["transposed"].stride() == (1, 256) and shared["every.other"].stride() == (16, 3)


def test_where_pickle_finds_torchao(made):
    for kind, module in (
        ("torchao_4bit_file", "torchao.optim.subclass_4bit"),
        ("torchao_4bit_prototype_file", f"{peers.OLD}.subclass_4bit"),
    ):
        assert f"c{module}\nOptimState4bit\n".encode() in made(kind, 1).read_bytes()


def test_layouts_of_the_peers(made):
    def entry(kind, key="optimizer"):
        content = load_file_of_torch(made(kind, 1))
        return (content if key is None else content[key])["state"][0]

    wrapped = entry("bnb_file")["__bnb_optimizer_quant_state__"]
    assert wrapped["absmax1"].shape == (37,) and wrapped["state1"].dtype == torch.uint8
    assert entry("bnb_plain_file").keys() == {"step", *wrapped}
    assert entry("bnb_2048_file")["absmax1"].shape == (5,)  # 9472 elements: the last one short
    old = load_file_of_torch(made("torchao_8bit_2048_file", 1))["optimizer"]["state"]
    assert old[1]["exp_avg"].block_size == 2048 and type(old[0]["exp_avg"]) is torch.Tensor
    new = entry("flashoptim_014_file")
    assert new["exp_avg::scales"].dtype == torch.bfloat16 and new["step"].dtype == torch.int64
    assert entry("flashoptim_013_compressed_file")["exp_avg::scales"].dtype == torch.float16
    assert entry("flashoptim_013_file")["exp_avg"].dtype == torch.bfloat16
    assert entry("lpmm_rank1_file", None)["exp_avg_sq_qstate"]["overhead"]["max1"] is None
    lost = entry("adafactor8bit_f1_fallback_file")["row_var_q"].reshape(-1)
    assert set(lost[:96].tolist()) == {255}  # whatever the values were
    assert entry("adafactor8bit_al16_file")["row_var_q"].dtype == torch.int16


# The encoders written here: held to golden arrays, and near to what they encode.


@pytest.mark.parametrize(
    "case, dtype, bits",
    [
        ("bf16_8", torch.bfloat16, 8),
        ("bf16_16", torch.bfloat16, 16),
        ("fp16_8", torch.float16, 8),
        ("fp16_16", torch.float16, 16),
    ],
)
def test_weights_are_split_as_flashoptim_splits_them(case, dtype, bits):
    left = arrays("flashoptim_golden")
    w = torch.tensor(left["ecc_in_f32bits"].view(np.float32))
    fine = w.isfinite() & w.to(dtype).isfinite()  # its other rows depend on the processor
    p, c = peers.split(w, dtype, bits)
    assert torch.equal(
        p[fine].view(torch.int16), torch.tensor(left[f"ecc_{case}_hi"].view("i2"))[fine]
    )
    assert torch.equal(c[fine], torch.tensor(left[f"ecc_{case}_lo"])[fine])
    kept = {"error_bits": c.to(dtype) if bits == 8 else c.view(dtype)}
    back = dequantize("flashoptim", kept, w.shape, p, {"master_bytewidth": 2 + bits // 8})["param"]
    theirs = torch.tensor(left[f"ecc_{case}_recon_f32bits"].view(np.float32))
    assert torch.equal(back[fine], theirs[fine])


def test_flashoptims_own_bytes_give_flashoptims_own_weights():
    got = KINDS["flashoptim_golden_file"].meaning()["w", "param"].numpy()
    np.testing.assert_array_equal(got, arrays("flashoptim_golden")["tr_adamw_bf16_24_s3_recon"])


@pytest.mark.parametrize(
    "case, generation", [("af046_adamw_uf8_al8", "al8"), ("af046_adamw_uf4_al16", "al16")]
)
def test_logarithms_are_coded_as_adafactor8bit_codes_them(case, generation):
    """What its bytes stand for becomes its bytes again."""
    left = {k.partition("/")[2]: torch.tensor(v) for k, v in arrays().items() if k.startswith(case)}
    state = {f"variance_{k}": left[f"variance_{k}"] for k in ("q", "scale", "min_log")}
    said = {"step": 3, "block_size": 2048, "variance_shape": (96, 64)}
    v = dequantize("adafactor8bit", {**state, **said}, (96, 64))["variance"]
    codes = peers.log_blocks(v, generation)["q"].reshape(-1).int()
    assert (codes - left["variance_q"].reshape(-1).int()).abs().max() <= 1
    if generation == "al8":
        assert torch.equal(codes, left["variance_q"].reshape(-1).int())


WITHIN = {  # of each block's largest, or of the value itself for logarithms
    "bnb_2048_file": 0.02,
    "flashoptim": 0.01,
    "adafactor8bit_f0_file": 0.002,
    "adafactor8bit_f1_file": 0.2,
    "adafactor8bit_f2_file": 0.2,
    "adafactor8bit_al8_file": 0.05,
    "adafactor8bit_al16_file": 0.0005,
}


@pytest.mark.parametrize(
    "kind", [k for k in KINDS if KINDS[k].by == "synthesized" and k != "flashoptim"]
)
def test_what_was_synthesized_is_near_to_what_it_stands_for(kind):
    which = "adafactor" if kind.startswith("adafactor") else "adamw"
    share = WITHIN.get(kind, WITHIN["flashoptim"])
    truth = {(n, k): v for n, s in runs.plain_state(which).items() for k, v in s.items()}
    truth["table", "variance"] = peers.table()
    compared = 0
    for key, got in KINDS[kind].meaning().items():
        if key not in truth:
            continue
        want = torch.as_tensor(truth[key])
        # Logarithms keep shares of a value, down to 2^-126 where zeros are not codes.
        logarithmic = kind.startswith("adafactor8bit") and "f0" not in kind
        room = want.abs() if logarithmic else want.abs().max()
        assert ((got - want).abs() <= share * room + 1e-37).all(), key
        compared += 1
    assert compared >= 10


def test_objects_survive_as_well(made):
    """Values that are not tensors are in every form, and torch finds them."""
    assert flat(made("fsdp2_nested", 4))["optim.param_groups.0.lr"] == runs.LR
    groups = nested(made("raw", 2))["optim"]["param_groups"]
    assert groups[0]["params"] == [0, 1, 2] and groups[1]["weight_decay"] == 0.0
