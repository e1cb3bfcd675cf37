"""Files of torch.save with sound bytes and senseless values,
and those that are seldom and sound.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .case import BAD, FINE, VALUES, add
from .state import Save, saved
from .tensors import DTYPE, weight
from .write import floats, glob, reduce, tensor

# Sound bytes, senseless values: exit code 4. Weights may hold infinities, as masks do.
NAN, INF = b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f"


def at(key: str, number: bytes, where: int = 5) -> Callable[[Path], Path]:
    def change(save: Save) -> None:
        data = save.storages[key]
        save.storages[key] = data[: 4 * where] + number + data[4 * where + 4 :]

    return saved(change)


add("value.nan_in_exp_avg", at("2", NAN), VALUES, "exp_avg", torch=True)
add("value.inf_in_exp_avg", at("2", INF), VALUES, "exp_avg", torch=True)
add("value.inf_in_exp_avg_sq", at("3", INF, 31), VALUES, "exp_avg_sq", torch=True)
add("value.negative_exp_avg_sq", at("3", floats(1, -0.25)), VALUES, "exp_avg_sq", torch=True)
add("value.nan_step", at("1", NAN, 0), VALUES, "step", torch=True)
add("value.negative_step", at("1", floats(1, -3.0), 0), VALUES, "step", torch=True)
add(
    "value.negative_zero_exp_avg_sq",
    at("3", b"\0\0\0\x80"),
    FINE,
    torch=True,
    about="Zero, whatever its sign.",
)
add("value.nan_in_a_weight", at("0", NAN), VALUES, "nan|finite", torch=True)
add("value.inf_in_a_weight", at("0", INF), FINE, "inf|finite", torch=True, warns=True)

# Sound but seldom.
add(
    "tensor.transposed",
    weight((8, 4), stride=(1, 8)),
    FINE,
    torch=True,
    convert=None,
    about="Strides are honoured.",
)
add(
    "tensor.shared_storage",
    saved(lambda s: s.tensors.__setitem__("weight", tensor((2, 8), "0", offset=16, held=32))),
    FINE,
    torch=True,
    convert=None,
)
add(
    "tensor.expanded_scalar",
    saved(lambda s: s.extra.__setitem__("expanded", tensor((64,), "0", stride=(0,), held=32))),
    (FINE, BAD),
    "stride|expand|overlap|twice",
    torch=True,
    convert=None,
    warns=True,
)


# Scales of quantized state.
def quantized(layout: str, scale: bytes) -> Callable[[Path], Path]:
    """8-bit state with 256 codes and one scale, as three libraries lay it out."""

    def change(save: Save) -> None:
        codes, one = bytes(range(256)), tensor((1,), "5", held=1)
        save.storages |= {
            "0": floats(256),
            "4": codes,
            "5": scale,
            "6": floats(256, 0.0),
            "7": floats(1),
            "8": codes,
        }
        save.tensors["weight"] = tensor((256,), "0")
        step = {"step": save.tensors["step"]}
        byte, fine = tensor((256,), "4", "uint8"), tensor((1,), "7", held=1)
        other, book = tensor((256,), "8", "uint8"), tensor((256,), "6")
        if layout == "lowbit":  # its codes and scales are matrices
            save.tensors["weight"] = tensor((1, 256), "0")
            byte, other = (tensor((1, 256), key, "uint8") for key in ("4", "8"))
            one, fine = (tensor((1, 1), key, held=1) for key in ("5", "7"))
        del save.storages["2"], save.storages["3"]
        if layout == "lowbit":
            del save.storages["6"]
            scales = {"exp_avg_dynamic8_scale": one, "exp_avg_sq_dynamic8_unsigned_scale": fine}
            state = {"exp_avg_dynamic8": byte, "exp_avg_sq_dynamic8_unsigned": other, **scales}
        elif layout == "bitsandbytes":
            state = {
                "state1": byte,
                "state2": other,
                "qmap1": book,
                "qmap2": book,
                "absmax1": one,
                "absmax2": fine,
            }
        else:

            def subclass(codes: object, scale: object, signed: bool) -> object:
                cls = glob("torchao.optim.subclass_8bit", "OptimState8bit")
                strided = reduce(glob("torch.serialization", "_get_layout"), "torch.strided")
                device = reduce(glob("torch", "device"), "cpu")
                arguments = (cls, DTYPE, (256,), (1,), 0, strided, device, False)
                inner = {
                    "codes": codes,
                    "scale": scale,
                    "qmap": book,
                    "signed": signed,
                    "block_size": 256,
                }
                wrapper = glob("torch._tensor", "_rebuild_from_type_v2")
                return reduce(
                    wrapper,
                    glob("torch._utils", "_rebuild_wrapper_subclass"),
                    cls,
                    arguments,
                    inner,
                )

            state = {
                "exp_avg": subclass(byte, one, True),
                "exp_avg_sq": subclass(other, fine, False),
            }
        save.tensors = {"weight": save.tensors["weight"], **step, **state}

    return saved(change)


for layout, word in (("lowbit", "scale"), ("bitsandbytes", "absmax"), ("torchao", "scale|exp_avg")):
    # Only torchao's reading needs torchao itself, and its name on the list of safe ones.
    ok = None if layout == "torchao" else True
    add(f"value.{layout}_sound", quantized(layout, floats(1)), FINE, torch=ok, convert=None)
    add(f"value.{layout}_nan_scale", quantized(layout, NAN), VALUES, word, torch=ok, convert=None)
    add(f"value.{layout}_inf_scale", quantized(layout, INF), VALUES, word, torch=ok, convert=None)
    add(
        f"value.{layout}_negative_scale",
        quantized(layout, floats(1, -1.0)),
        VALUES,
        word,
        torch=ok,
        convert=None,
    )
