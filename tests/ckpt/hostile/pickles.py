"""Pickles that run code, grow, loop or break off, each inside a checkpoint that is whole otherwise.

Every trick is made twice: in the data.pkl of a torch.save file and in the .metadata of a directory,
where a reader that skips keys it does not know would still have to read it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .case import BAD, FINE, add
from .dcp import base
from .state import Save, live, put
from .write import P2, P4, Pairs, Raw, archive, dump, glob, le, records_of, reduce, string


@dataclass
class Trick:
    """A value that stands under a key nobody knows, or a change of the whole pickle."""

    name: str
    value: object = None
    whole: Callable[[bytes], bytes] | None = None
    mentions: str = ""
    codes: int | tuple[int, ...] = BAD
    torch: bool | None = False
    """Whether torch.load(weights_only=True) takes it in a torch.save file."""
    convert: int | None = None
    """What convert says of a torch.save file, where that is not what verify says: it leaves out
    objects that it only names.
    """


def laughs(levels: int) -> Raw:
    """(x, x) of (x, x) of ...: a few bytes,
    2^levels leaves for whoever does not look where they have been.
    """
    body = b"K\x00"
    for i in range(levels):
        body += b"q" + le(1, i) + b"h" + le(1, i) + b"\x86"
    return Raw(body)


def recalled(value: bytes, before: bytes = b"](", each: bytes = b"", after: bytes = b"e") -> Raw:
    """A value of a megabyte, and 20,000 times the two bytes that refer to it."""
    return Raw(before + value + b"q\x00" + each + (b"h\x00" + each) * 20_000 + after)


def empty_array(content: bytes) -> bytes:
    """An array of numpy with shape [0], which has that content nevertheless."""
    array = (
        glob("numpy.core.multiarray", "_reconstruct")
        + b"("
        + glob("numpy", "ndarray")
        + b"K\x00\x85C\x01btR"
    )
    dtype = glob("numpy", "dtype") + b"(" + string("u1") + b"\x89\x88tR"
    return array + b"(K\x01K\x00\x85" + dtype + b"\x89" + content + b"tb"


def opcode(name: str, body: bytes, torch: bool | None = False) -> Trick:
    return Trick("opcode_" + name, Raw(body), mentions="opcode|allow|execut|not read", torch=torch)


MILLION = 1_000_000
DEEP = "deep|nest|depth|stack|limit|too many"
CUT = "ends|end of|cut|trunc|short|beyond|longer|past|remain|left"
STACK = "stack|mark|not opened|exactly one|one value|underflow|takes more|key without"
UNKNOWN = "allow|outside|not known|unknown|unsafe|global"
MEMO = "memo|remember|recall"
SCHEMA = "argument|expect|call|tensor|storage|dimension|stride|size|layout|shape|not |pickle"

MEGABYTE = string("a" * MILLION)
STORAGE = (
    b"(" + string("storage") + glob("torch", "FloatStorage") + MEGABYTE + string("cpu") + b"K\x01t"
)

TRICKS = [
    # Code.
    Trick("code_posix_system", live(), mentions=r"posix\W+system"),
    Trick("code_nt_system", live("nt"), mentions=r"nt\W+system"),
    Trick("code_builtins_eval", reduce(glob("builtins", "eval"), "1"), mentions=r"eval"),
    Trick("code_builtins_exec", reduce(glob("__builtin__", "exec"), ""), mentions=r"exec"),
    Trick("code_named_but_not_called", glob("os", "system"), mentions=r"os\W+system"),
    Trick("code_dotted_name", glob("torch", "serialization.os.system"), mentions="serialization"),
    Trick(
        "code_dotted_by_stack_global",
        Raw(string("torch") + string("serialization.os.system") + b"\x93"),
        mentions="serialization|opcode",
    ),
    Trick(
        "code_stack_global",
        Raw(string("posix") + string("system") + b"\x93" + dump(("true",)) + b"R"),
        mentions=r"system|opcode",
    ),
    Trick(
        "code_import_of_a_module",
        glob("torch.nonsense", "Nothing"),
        mentions="nonsense",
        convert=FINE,
    ),
    # Objects of unknown classes are named and never built, as is what unknown functions give; what
    # reaches the system is refused.
    Trick(
        "opaque_object",
        Raw(glob("argparse", "Namespace") + b")\x81" + dump({"a": 1}) + b"b"),
        mentions="Namespace",
        convert=FINE,
    ),
    Trick(
        "opaque_of_a_call",
        reduce(glob("pathlib", "PosixPath"), "a"),
        mentions="PosixPath|pathlib",
        convert=FINE,
    ),
    Trick(
        "opaque_with_code_inside",
        Raw(glob("argparse", "Namespace") + b")\x81" + dump({"a": live()}) + b"b"),
        mentions=r"posix\W+system|Namespace",
    ),
    Trick(
        "opaque_class_of_a_call",
        Raw(glob("types", "Maker") + b")R)R"),
        mentions="Maker|types|global|call",
        convert=FINE,
    ),
    Trick(
        "opaque_function", reduce(glob("json", "loads"), "1"), mentions="json|loads", convert=FINE
    ),
    Trick(
        "opaque_class_of_the_system",
        Raw(glob("multiprocessing.subprocess", "Popen") + b")\x81"),
        mentions="Popen|multiprocessing",
    ),
    Trick(
        "opaque_names_without_end",
        Raw(b"](" + b"".join(glob("a", f"B{i}") for i in range(70_000)) + b"e"),
        mentions="more than|limit|allow",
        torch=None,
    ),
    Trick(
        "opaque_items_without_end",
        Raw(glob("a", "B") + b")\x81(" + b"N" * 2_800_000 + b"e"),
        mentions="B|limit|allow|more than",
        torch=None,
        convert=FINE,
    ),
    Trick("set_of_lists", reduce(glob("__builtin__", "set"), [[1]]), mentions="key|hash|set"),
    Trick("complex_of_text", reduce(glob("__builtin__", "complex"), "1", "2"), mentions="complex"),
    Trick(
        "counter_of_a_list",
        reduce(glob("collections", "Counter"), [1]),
        mentions="Counter",
        torch=None,
    ),
    Trick(
        "pairs_of_three",
        reduce(glob("collections", "OrderedDict"), [[1, 2, 3]]),
        mentions="pairs|OrderedDict",
    ),
    Trick(
        "code_newobj",
        Raw(glob("subprocess", "Popen") + dump(("true",)) + b"\x81"),
        mentions="Popen",
    ),
    Trick(
        "code_global_of_numbers", Raw(b"K\x01K\x02\x93"), mentions="text|string|global|opcode|name"
    ),
    Trick(
        "code_getattr",
        reduce(glob("builtins", "getattr"), glob("torch", "Size"), "__init__"),
        mentions="getattr|attr|" + UNKNOWN,
    ),
    Trick(
        "code_getattr_of_an_unknown_class_is_called",
        Raw(reduce(glob("builtins", "getattr"), glob("a", "B"), "__init__") + b")R"),
        mentions="opaque|getattr|global|" + UNKNOWN,
        convert=FINE,
    ),
    Trick(
        "code_getattr_of_an_opaque_object",
        reduce(glob("builtins", "getattr"), Raw(glob("a", "B") + b")\x81"), "x"),
        mentions="opaque|getattr|" + UNKNOWN,
        convert=FINE,
    ),
    Trick("code_name_with_escapes", glob("torch", "\x1b[2Jred\x07"), mentions=UNKNOWN + "|red"),
    Trick(
        "code_name_of_a_megabyte",
        glob("torch", "A" * MILLION),
        mentions=UNKNOWN + "|long|limit",
        torch=None,
    ),
    Trick(
        "code_name_without_end",
        whole=lambda p: p[:-1] + b"ctorch" * 3,
        mentions=CUT + "|" + STACK + "|" + UNKNOWN + "|line",
    ),
    Trick(
        "code_build_with_setstate",
        Raw(glob("torch", "Size") + b")\x81" + dump({"__setstate__": 1}) + b"b"),
        mentions=SCHEMA,
    ),
    # Memory.
    Trick("memo_2_27", Raw(b"Nr" + le(4, 1 << 27)), mentions=MEMO, torch=True),
    Trick("memo_2_31", Raw(b"Nr" + le(4, (1 << 31) - 1)), mentions=MEMO, torch=True),
    Trick("memo_2_32", Raw(b"Nr" + le(4, (1 << 32) - 1)), mentions=MEMO, torch=True),
    Trick("memo_skips", Raw(b"Nq\x09"), mentions=MEMO, torch=True, codes=(BAD, FINE)),
    Trick("memo_missing", Raw(b"h\x05"), mentions=MEMO),
    Trick("memo_long_missing", Raw(b"j" + le(4, (1 << 32) - 1)), mentions=MEMO),
    Trick("memo_of_nothing", whole=lambda p: p[:2] + b"q\x00" + p[2:], mentions=MEMO + "|stack"),
    Trick("deep_list", Raw(b"]" * MILLION + b"a" * (MILLION - 1)), mentions=DEEP, torch=None),
    Trick("deep_tuple", Raw(b"N" + b"\x85" * MILLION), mentions=DEEP, torch=None),
    Trick("deep_dict", Raw(b"}N" * 900_000 + b"N" + b"s" * 900_000), mentions=DEEP, torch=None),
    Trick("deep_marks", Raw(b"(" * MILLION + b"t" * MILLION), mentions=DEEP, torch=None),
    Trick(
        "deep_2000", Raw(b"]" * 2000 + b"a" * 1999), mentions=DEEP, torch=None, codes=(BAD, FINE)
    ),
    Trick(
        "marks_left_open",
        whole=lambda p: p[:-1] + b"(" * 2_500_000 + b".",
        mentions=DEEP + "|" + STACK,
        torch=None,
    ),
    Trick(
        "many_lists",
        Raw(b"](" + b"]" * 2_800_000 + b"e"),
        mentions="deep|limit|more than|too many|budget",
        torch=None,
        codes=(BAD, FINE),
    ),
    Trick(
        "many_nones",
        Raw(b"](" + b"N" * 2_800_000 + b"e"),
        mentions="deep|limit|more than|too many|budget",
        torch=None,
        codes=(BAD, FINE),
    ),
    Trick(
        "many_keys",
        Raw(b"}(" + b"".join(b"J" + le(4, i) + b"N" for i in range(300_000)) + b"u"),
        mentions="limit|more than|too many|budget",
        torch=None,
        codes=(BAD, FINE),
    ),
    Trick(
        "many_appends",
        Raw(b"]" + b"Na" * 800_000),
        mentions="limit|more than|too many|budget",
        torch=None,
        codes=(BAD, FINE),
    ),
    Trick(
        "billion_laughs",
        laughs(60),
        mentions="deep|limit|too many|more than|shared|expand|budget|twice|refer",
        torch=True,
    ),
    Trick(
        "loop_of_a_list",
        Raw(b"]q\x00h\x00a"),
        mentions="itself|cycl|loop|deep|refer|contain",
        torch=True,
    ),
    Trick(
        "loop_through_a_tuple",
        Raw(b"]q\x00h\x00\x85a"),
        mentions="itself|cycl|loop|deep|refer|contain",
        torch=True,
    ),
    Trick(
        "loop_of_a_dict",
        Raw(b"}q\x00Nh\x00s"),
        mentions="itself|cycl|loop|deep|refer|contain",
        torch=True,
    ),
    Trick(
        "bytearray_2_32",
        reduce(glob("__builtin__", "bytearray"), 1 << 32),
        mentions=SCHEMA + "|" + UNKNOWN + "|bytearray",
        torch=None,
    ),
    Trick(
        "bytearray_2_62",
        reduce(glob("builtins", "bytearray"), 1 << 62),
        mentions=SCHEMA + "|" + UNKNOWN + "|bytearray",
        torch=False,
    ),
    Trick(
        "integer_of_2040_bits",
        Raw(b"\x8a\xff" + b"\x01" * 255),
        mentions="integer|number|bits|long",
        torch=True,
        codes=(BAD, FINE),
    ),
    Trick(
        "integer_of_a_megabyte",
        Raw(b"\x8b" + le(4, MILLION) + b"\x01" * MILLION),
        mentions="integer|number|bits|long|opcode",
    ),
    # What lies there once and is referred to often.
    Trick("recalled_text", recalled(MEGABYTE), mentions="unfold", torch=None),
    Trick("recalled_key", recalled(MEGABYTE, b"}(", b"N", b"u"), mentions="twice", torch=None),
    Trick(
        "recalled_name",
        Raw(
            b"}"
            + MEGABYTE
            + b"}("
            + b"".join(b"J" + le(4, i) + b"N" for i in range(20_000))
            + b"us"
        ),
        mentions="unfold",
        torch=None,
        codes=(BAD, FINE),
    ),
    Trick(
        "recalled_array",
        recalled(empty_array(b"B" + le(4, MILLION) + b"a" * MILLION)),
        mentions="numpy",
        torch=None,
        convert=BAD,
    ),
    Trick(
        "recalled_storage",
        recalled(STORAGE, glob("a", "B") + b"(", b"Q", b"tR"),
        mentions="a.B|persistent",
        torch=None,
        convert=BAD,
    ),
    # Lengths.
    Trick("length_of_text", Raw(b"X" + le(4, 0xFFFFFFFF) + b"ab"), mentions=CUT),
    Trick("length_of_text8", Raw(b"\x8d" + le(8, (1 << 64) - 1) + b"ab"), mentions=CUT + "|opcode"),
    Trick("length_of_short_text", whole=lambda p: p[:-1] + b"\x8c\xffab", mentions=CUT + "|opcode"),
    Trick("length_of_bytes", Raw(b"B" + le(4, 0x7FFFFFFF) + b"ab"), mentions=CUT + "|opcode"),
    Trick("length_of_bytes8", Raw(b"\x8e" + le(8, 1 << 62) + b"ab"), mentions=CUT + "|opcode"),
    Trick("length_of_bytearray8", Raw(b"\x96" + le(8, 1 << 62) + b"ab"), mentions=CUT + "|opcode"),
    Trick("length_of_long1", whole=lambda p: p[:-1] + b"\x8a\x08\x01", mentions=CUT + "|integer"),
    Trick("length_of_long4", Raw(b"\x8b" + le(4, 0x7FFFFFFF)), mentions=CUT + "|integer|opcode"),
    Trick("length_of_long4_negative", Raw(b"\x8b" + le(4, -1)), mentions=CUT + "|integer|opcode"),
    Trick(
        "length_of_frame",
        whole=lambda p: p[:2] + b"\x95" + le(8, 1 << 40) + p[2:],
        mentions="frame|opcode|" + CUT,
    ),
    Trick(
        "length_of_frame_2_64",
        whole=lambda p: p[:2] + b"\x95" + le(8, (1 << 64) - 1) + p[2:],
        mentions="frame|opcode|" + CUT,
    ),
    # Opcodes that no checkpoint needs.
    opcode("pop", b"NN0", torch=False),
    opcode("pop_mark", b"N(N1"),
    opcode("dup", b"N2\x86"),
    opcode("inst", b"(ios\ngetcwd\n"),
    opcode("obj", b"(" + glob("torch", "Size") + b"o"),
    opcode("ext1", b"\x82\x01"),
    opcode("ext2", b"\x83\x01\x00"),
    opcode("ext4", b"\x84\x01\x00\x00\x00"),
    opcode("put_text", b"Np0\n"),
    opcode("get_text", b"g0\n"),
    opcode("persistent_text", b"Pstorage\n"),
    opcode("long_text", b"L1L\n"),
    opcode("long4", b"\x8b" + le(4, 1) + b"\x01"),
    Trick(
        "newobj_ex_of_a_known_class",
        Raw(glob("torch", "Size") + b")}\x92"),
        mentions="by their names|opcode",
    ),
    Trick(
        "newobj_ex",
        Raw(glob("argparse", "Namespace") + b")}\x92"),
        mentions="Namespace",
        convert=FINE,
    ),
    opcode("next_buffer", b"\x97"),
    opcode("readonly_buffer", b"N\x98"),
    Trick("bytearray8", Raw(b"\x96" + le(8, 1) + b"a"), mentions="bytearray", codes=(BAD, FINE)),
    Trick("frozenset", Raw(b"(N\x91"), mentions="frozenset", convert=FINE),
    Trick("empty_set_of_lists", Raw(b"\x8f(]\x90"), mentions="set"),
    Trick("empty_set_in_itself", Raw(b"\x8fq\x01(h\x01\x90"), mentions="memo|set|deep"),
    Trick("additems_to_a_list", Raw(b"](N\x90"), mentions="adds|set|opcode"),
    opcode("ff", b"\xff"),
    # Stack and values.
    Trick("stack_tuple_of_nothing", Raw(b"(\x85t"), mentions=STACK),
    Trick("stack_closed_not_opened", whole=lambda p: p[:2] + b"t" + p[2:], mentions=STACK),
    Trick("stack_append_to_nothing", whole=lambda p: p[:2] + b"e" + p[2:], mentions=STACK),
    Trick("stack_append_to_a_tuple", Raw(b")Na"), mentions=STACK + "|not a list|add"),
    Trick("stack_set_in_a_list", Raw(b"]NNs"), mentions=STACK + "|not a|add"),
    Trick("stack_key_without_value", Raw(b"}(K\x01u"), mentions=STACK + "|without|odd"),
    Trick("stack_reduce_of_text", Raw(string("a") + b")R"), mentions=STACK + "|global|call"),
    Trick(
        "stack_reduce_of_a_list",
        Raw(glob("torch", "Size") + b"]R"),
        mentions=STACK + "|global|call|tuple|argument",
        torch=None,
    ),
    Trick("stack_build_of_a_number", Raw(b"K\x01}b"), mentions=STACK + "|state|build"),
    Trick("stack_two_values", whole=lambda p: p[:-1] + b"N.", mentions=STACK, torch=True),
    Trick(
        "stack_two_values_under", whole=lambda p: p[:2] + b"N" + p[2:], mentions=STACK, torch=True
    ),
    Trick(
        "stack_empty_at_stop", whole=lambda p: p[:2] + b".", mentions=STACK + "|expect|root|nothing"
    ),
    Trick("stack_mark_at_stop", whole=lambda p: p[:-1] + b"(.", mentions=STACK),
    Trick(
        "after_stop",
        whole=lambda p: p + b"garbage",
        mentions="behind|after|STOP|trailing",
        torch=True,
    ),
    Trick(
        "second_pickle",
        whole=lambda p: p + P2 + live() + b".",
        mentions="behind|after|STOP|trailing",
        torch=True,
    ),
    Trick("no_stop", whole=lambda p: p[:-1], mentions=CUT + "|STOP"),
    Trick("cut_in_half", whole=lambda p: p[: len(p) // 2], mentions=CUT + "|STOP|pickle"),
    Trick("one_byte", whole=lambda p: p[:1], mentions=CUT + "|STOP|pickle|protocol"),
    Trick("no_bytes", whole=lambda p: b"", mentions=CUT + "|STOP|pickle|empty"),
    Trick("protocol_99", whole=lambda p: b"\x80\x63" + p[2:], mentions="protocol", torch=True),
    Trick("text_not_utf8", Raw(b"X" + le(4, 2) + b"\xff\xfe"), mentions="utf"),
    Trick("text_overlong_utf8", Raw(b"X" + le(4, 2) + b"\xc0\x80"), mentions="utf"),
    Trick("text_half_utf8", Raw(b"X" + le(4, 2) + b"\xe2\x82"), mentions="utf"),
    Trick(
        "text_with_a_lone_surrogate", Raw(b"X" + le(4, 3) + b"\xed\xa0\x80"), codes=FINE, torch=True
    ),
    Trick("key_is_a_list", Raw(b"}]K\x01s"), mentions="key|hash"),
    Trick("key_is_a_dict", Raw(b"}}K\x01s"), mentions="key|hash"),
    Trick("key_is_a_list_in_a_tuple", Raw(b"}]\x85K\x01s"), mentions="key|hash"),
    # Allowed names, called with something else than torch calls them with.
    Trick("call_size_of_text", reduce(glob("torch", "Size"), ("a",)), mentions=SCHEMA, torch=None),
    Trick("call_size_of_two", reduce(glob("torch", "Size"), (1,), (2,)), mentions=SCHEMA),
    Trick("call_size_of_a_number", reduce(glob("torch", "Size"), 4), mentions=SCHEMA),
    Trick("call_a_dtype", reduce(glob("torch", "float32")), mentions=SCHEMA),
    Trick(
        "call_layout_of_nonsense",
        reduce(glob("torch.serialization", "_get_layout"), "torch.os"),
        mentions=SCHEMA + "|" + UNKNOWN,
    ),
]


def with_pickle(change: Callable[[bytes], bytes] | None, value: object) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        save = Save()
        if value is not None:
            save.extra["extra"] = value
        pickle = save.pickle() if change is None else change(save.pickle())
        return put(folder, archive(records_of(pickle, save.storages)))

    return make


def with_metadata(change: Callable[[bytes], bytes] | None, value: object) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        checkpoint = base()
        if value is not None:
            checkpoint.state_extra["extra"] = value
        if change is not None:
            checkpoint.change = change
        return checkpoint.write(folder)

    return make


for trick in TRICKS:
    add(
        "pickle.save_" + trick.name,
        with_pickle(trick.whole, trick.value),
        trick.codes,
        trick.mentions,
        torch=trick.torch,
        convert=tuple({trick.codes} if isinstance(trick.codes, int) else trick.codes)
        if trick.convert is None
        else (trick.convert,),
    )
    add(
        "pickle.metadata_" + trick.name,
        with_metadata(trick.whole, trick.value),
        trick.codes,
        trick.mentions,
    )


# Duplicate keys, where the dict means something. Python keeps the last of them, and takes 0,
# False and 0.0 for one.


def twice(place: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        save = Save()
        value = save.value()
        model, optim = value["model"], value["optim"]
        state = optim["state"][0]  # type: ignore[index]
        other = Pairs([("w", save.tensors["weight"]), ("w", save.tensors["exp_avg"])])

        def twice(key: object) -> object:
            states = Pairs([(0, state), (key, {})])
            return {"model": model, "optim": {**optim, "state": states}}  # type: ignore[dict-item]

        outer: object = {
            "top": Pairs([("model", model), ("optim", optim), ("model", model)]),
            "model": {"model": other, "optim": optim},
            "state": twice(0),
            "false": twice(False),
            "float": twice(0.0),
        }[place]
        return put(folder, archive(records_of(P2 + dump(outer) + b".", save.storages)))

    return make


for place in ("top", "model", "state", "false", "float"):
    add(f"pickle.save_key_twice_{place}", twice(place), BAD, "twice|duplicate|two|same", torch=True)


def protocol_4(folder: Path) -> Path:
    save = Save()
    save.extra["extra"] = Raw(b"\x95" + le(8, 3) + b"\x8c\x01a")
    pickle = P4 + save.pickle()[2:]
    return put(folder, archive(records_of(pickle, save.storages)))


add("pickle.save_protocol_4", protocol_4, (BAD, FINE), "opcode|protocol|allow", torch=False)


def in_item(value: object) -> Callable[[Path], Path]:
    """The value of `lr`, which a directory keeps as an item of its own."""

    def make(folder: Path) -> Path:
        checkpoint = base()
        checkpoint.value("optim.param_groups.0.lr", value)
        return checkpoint.write(folder)

    return make


ITEM = [
    t
    for t in TRICKS
    if t.value is not None and t.codes == BAD and not t.name.startswith(("call_", "opcode_long4"))
]
SOME = (
    "code_posix_system",
    "code_named_but_not_called",
    "memo_2_31",
    "deep_list",
    "billion_laughs",
    "loop_of_a_list",
    "bytearray_2_32",
    "length_of_text",
    "text_not_utf8",
    "opcode_inst",
    "opcode_ext1",
)
for trick in ITEM:
    if trick.name in SOME:
        # A byte item is opaque to torch's planner, yet unpickled without a limit by its loader.
        add("pickle.item_" + trick.name, in_item(trick.value), BAD, f"lr|{trick.mentions}")


def in_tensor_item(folder: Path) -> Path:
    """A tensor item whose pickle runs a command before it gives the tensor."""
    checkpoint = base()
    checkpoint.items["model.w", (0, 0)].pickle = lambda p: P2 + b"](" + live() + p[2:-1] + b"e."
    return checkpoint.write(folder)


add("pickle.item_code_in_a_tensor", in_tensor_item, BAD, r"posix|model\.w")


def before_metadata(folder: Path) -> Path:
    """Runs a command and then gives a whole Metadata: torch.distributed.checkpoint loads it without
    a word.
    """
    checkpoint = base()
    checkpoint.change = lambda p: p[:2] + live() + b"0" + p[2:]
    return checkpoint.write(folder)


add("pickle.metadata_code_before", before_metadata, BAD, r"posix\W+system")
