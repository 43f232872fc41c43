"""The inert unpickler: faithful to the standard pickle module, and bounded whatever the bytes."""

import io
import pickle
import pickletools
import re
import struct
import subprocess
import sys
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hostile.pickles import FORMS, NAMES, named, split_name
from properties import examples
from unshard.containers.pickles.machine import (
    SLOT_COST,
    DangerousPickleError,
    Machine,
    MalformedPickleError,
)
from unshard.containers.pickles.opcodes import OPERATIONS
from unshard.containers.pickles.records import Global, Persistent, Record, Value
from unshard.containers.pickles.unpickle import run_all, unpickle

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
every_protocol = pytest.mark.parametrize("protocol", PROTOCOLS)


def roundtrip(value: object, protocol: int) -> Value:
    return unpickle(pickle.dumps(value, protocol))


def record(value: Value) -> Record:
    assert isinstance(value, Record)
    return value


# --- faithful: what the standard pickler writes, we read -----------------------------------------

texts = st.text(max_size=20)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**2100), 2**2100)
    | st.floats(allow_nan=False)
    | texts
)
keys = texts | st.integers(-(2**61) + 1, 2**61 - 1) | st.tuples(texts, st.integers(0, 9))


def plain_values(protocol: int) -> st.SearchStrategy[tuple[int, object]]:
    """Values that this protocol writes without calling anything."""
    leaves: st.SearchStrategy[object] = scalars
    if protocol >= 3:
        leaves |= st.binary(max_size=300)
    if protocol >= 4:
        leaves |= st.sets(texts) | st.frozensets(texts)
    values = st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner)
            | st.lists(inner, max_size=5).map(tuple)
            | st.dictionaries(keys, inner, max_size=5)
        ),
        max_leaves=20,
    )
    return st.tuples(st.just(protocol), values)


def exact(value: object) -> object:
    """Return something equal only for equal values of equal types in equal order."""
    match value:
        case list() | tuple():
            return type(value), [exact(item) for item in value]
        case dict():
            return dict, [(exact(key), exact(item)) for key, item in value.items()]
        case set() | frozenset():
            return type(value), value
        case _:
            return repr(value)


@settings(max_examples=examples(1000))
@given(st.sampled_from(PROTOCOLS).flatmap(plain_values))
@example((0, "é"))
@example((0, "a\\n\n\r\0\x1a'\"Ā😀"))
@example((2, "lone surrogate \ud800"))
@example((4, {"x" * 300: b"y" * 300}))
def test_plain_values_are_read_as_they_were_written(case: tuple[int, object]) -> None:
    protocol, value = case
    assert exact(roundtrip(value, protocol)) == exact(value)


@every_protocol
def test_long_containers_written_in_batches_are_read_whole(protocol: int) -> None:
    value = {"list": list(range(2500)), "dict": {str(i): i for i in range(2500)}}
    assert roundtrip(value, protocol) == value


@pytest.mark.parametrize("protocol", [0, 1, 2])
def test_bytes_before_protocol_3_are_the_call_that_makes_them(protocol: int) -> None:
    made = record(roundtrip(b"a\xff", protocol))
    assert made.is_call_of("_codecs.encode")
    assert made.args == ("aÿ", "latin1")


@pytest.mark.parametrize("protocol", [0, 1, 2, 3])
def test_sets_before_protocol_4_are_the_call_that_makes_them(protocol: int) -> None:
    made = record(roundtrip({"a"}, protocol))
    assert made.is_call_of("builtins.set", "__builtin__.set")
    assert made.args == (["a"],)


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"T\x02\0\0\0a\xff.", "aÿ"),
        (b"U\x02a\xff.", "aÿ"),
        (b"I01\n.", True),
        (b"I00\n.", False),
        (b"L-12L\n.", -12),
        (b"\x8a\0.", 0),
        (b"(K\x01K\x02l.", [1, 2]),
        (b"(K\x01K\x02d.", {1: 2}),
        (b"K\x01K\x022\x87.", (1, 2, 2)),
        (b"K\x01(K\x02K\x031.", 1),
        (b"K\x01K\x020.", 1),
        (b"K\x07p0\n0g0\n.", 7),
        (b"K\x07q\x000h\x00.", 7),
        (b"\x96\x02\0\0\0\0\0\0\0ab.", b"ab"),
    ],
)
def test_opcodes_that_only_older_picklers_write_are_read(data: bytes, value: object) -> None:
    assert exact(unpickle(data)) == exact(value)


@pytest.mark.parametrize(
    "text",
    [
        r"'a\x41\n\'\\\"\t\r'",
        '"it\'s"',
        "'a'b'",
        "'a','b'",
        "'a' 'b'",
        "'a\0b'",
        r"'\\d'",
        "''," + "[" * 5000 + "]" * 5000 + ",''",
        "''," + "-" * 50_000 + "1,''",
    ],
    ids=lambda text: text[:20].replace("\0", "0"),
)
def test_quoted_strings_are_read_as_text_and_never_evaluated(text: str) -> None:
    data = b"S" + text.encode() + b"\n."
    assert unpickle(data) == pickle.loads(data)


def test_every_opcode_of_the_standard_library_is_known_or_refused_on_purpose() -> None:
    refused = set()
    for code in range(256):
        try:
            unpickle(bytes([code]))
        except MalformedPickleError as error:
            if "is not allowed" in str(error):
                refused.add(code)
    known = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
    assert {known[code] for code in refused & known.keys()} == {
        "EXT1",
        "EXT2",
        "EXT4",
        "NEXT_BUFFER",
        "READONLY_BUFFER",
    }
    assert refused >= set(range(256)) - known.keys()


def make(*args: object) -> object:
    """Stand for any function that a pickle may name."""
    raise AssertionError(args)


class Reduced:
    """Pickles as a call with state, list items and dict items."""

    def __reduce__(self) -> tuple[object, ...]:
        return make, ("argument", 1), {"field": 2}, iter(["x", "y"]), iter([("k", "v")])


class Plain:
    """Pickles by the default protocol: NEWOBJ and BUILD, or copyreg."""

    def __init__(self, field: object) -> None:
        self.field = field

    class Inner:
        """A nested class: protocol 2 reaches it through getattr."""


@every_protocol
def test_a_reduced_object_becomes_a_record_of_everything_it_asks_for(protocol: int) -> None:
    value = unpickle(pickle.dumps(Reduced(), protocol))
    made = record(value)
    assert made.callee == Global(__name__, "make")
    assert made.args == ("argument", 1)
    assert made.state == {"field": 2}
    assert made.elements == ["x", "y"]
    assert made.items == [("k", "v")]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_an_ordinary_object_becomes_a_record_of_its_class_and_state(protocol: int) -> None:
    made = record(roundtrip(Plain(3), protocol))
    assert made.is_call_of(f"{__name__}.Plain")
    assert (made.args, made.state) == ((), {"field": 3})


@pytest.mark.parametrize("protocol", [0, 1])
def test_an_ordinary_object_of_protocol_1_is_a_call_of_copyreg(protocol: int) -> None:
    made = record(roundtrip(Plain(3), protocol))
    assert made.is_call_of("copy_reg._reconstructor")
    assert made.args[0] == Global(__name__, "Plain")
    assert made.state == {"field": 3}


@every_protocol
def test_an_ordered_dict_keeps_its_items_in_order(protocol: int) -> None:
    made = record(roundtrip(OrderedDict([("b", 1), ("a", 2)]), protocol))
    assert made.is_call_of("collections.OrderedDict")
    assert made.items == [("b", 1), ("a", 2)]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_nested_class_is_named_whole_whichever_way_it_is_written(protocol: int) -> None:
    assert roundtrip(Plain.Inner, protocol) == Global(__name__, "Plain.Inner")
    assert record(roundtrip(Plain.Inner(), protocol)).is_call_of(f"{__name__}.Plain.Inner")


@every_protocol
def test_shared_objects_stay_shared(protocol: int) -> None:
    shared = [Reduced()]
    value = roundtrip([shared, shared, "text", "text"], protocol)
    assert isinstance(value, list)
    assert value[0] is value[1]


@every_protocol
def test_cycles_are_kept(protocol: int) -> None:
    loop: list[object] = []
    loop.append(loop)
    found = roundtrip(loop, protocol)
    assert isinstance(found, list)
    assert found[0] is found


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_record_may_be_in_its_own_state_and_be_a_key(protocol: int) -> None:
    value = Plain(None)
    value.field = {value: value}
    made = record(roundtrip(value, protocol))
    assert isinstance(made.state, dict)
    assert made.state == {"field": {made: made}}


@every_protocol
def test_persistent_ids_are_kept_as_they_are_written(protocol: int) -> None:
    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: object) -> object:
            pid: object = "7" if protocol == 0 else ("storage", Plain, "7", "cpu", 12)
            return pid if isinstance(obj, Plain) else None

    file = io.BytesIO()
    Pickler(file, protocol).dump([Plain(1)])
    expected = "7" if protocol == 0 else ("storage", Global(__name__, "Plain"), "7", "cpu", 12)
    match unpickle(file.getvalue()):
        case [Persistent(pid)]:
            assert pid == expected
        case other:
            pytest.fail(str(other))


def test_no_module_is_imported_and_no_class_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.joinpath("unshard_trap.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    data = b"(cunshard_trap\nA\n)Rcunshard_no_such_module\nB\n)\x81(iunshard_trap\nC\nl."
    value = unpickle(data)
    assert isinstance(value, list)
    assert [str(record(item).callee) for item in value] == [
        "unshard_trap.A",
        "unshard_no_such_module.B",
        "unshard_trap.C",
    ]
    assert "unshard_trap" not in sys.modules


# --- attacks: names that run commands ------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_runs_commands_is_refused_however_it_is_written(name: str, form: str) -> None:
    with pytest.raises(DangerousPickleError, match=re.escape(name.replace(":", "."))):
        unpickle(FORMS[form](*split_name(name)))


@pytest.mark.parametrize(
    "arguments",
    [
        b"(S'os'\nS'system'\nt",
        b"(ca\nB\nt",
        b"(ca\nB\nS'c'\nNt",
        b"(ca\nB\nNt",
        b"(ca\nB\n)RS'c'\nt",
        b"(ca\nB\nS'__globals__'\nt",
        b"(ctorch\nserialization\nS'os'\nt",
        b"(c__builtin__\ngetattr\nS'__self__'\nt",
        b")",
    ],
)
@pytest.mark.parametrize("module", ["builtins", "__builtin__"])
def test_getattr_is_refused_unless_it_names_a_nested_class(module: str, arguments: bytes) -> None:
    with pytest.raises(DangerousPickleError):
        unpickle(named(module, "getattr") + arguments + b"R.")


def test_a_chain_of_getattr_does_not_reach_a_dangerous_name() -> None:
    getattr_ = named("__builtin__", "getattr")
    step = getattr_ + getattr_ + b"(ctorch\nserialization\nS'x'\ntRS'os'\n\x86R."
    with pytest.raises(DangerousPickleError, match=r"torch\.serialization\.x\.os"):
        unpickle(step)


@pytest.mark.parametrize(
    "name",
    """
    collections.OrderedDict collections.defaultdict torch.bfloat16 torch.Size torch.device
    torch.FloatStorage torch.storage.UntypedStorage torch._utils._rebuild_tensor_v2
    torch._utils._rebuild_wrapper_subclass torch._tensor._rebuild_from_type_v2
    torch.distributed.tensor.DTensor torch.distributed.device_mesh.DeviceMesh
    torch.distributed.tensor.placement_types.Shard torch.serialization._get_layout
    torch.distributed.checkpoint.metadata.Metadata pathlib.PosixPath _codecs.encode
    numpy._core.multiarray._reconstruct numpy.dtype numpy.ndarray copyreg._reconstructor
    builtins.set __builtin__.set builtins.slice builtins.complex functools.partial
    argparse.Namespace torch.torch_version.TorchVersion datetime.datetime
    """.split(),
)
def test_the_names_that_checkpoints_need_are_read(name: str) -> None:
    module, attribute = split_name(name)
    assert unpickle(named(module, attribute) + b".") == Global(module, attribute)


# --- attacks: bytes that are not a pickle, or one beyond the bounds ------------------------------

MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "only STOP": b".",
    "full stack": b"NN.",
    "open mark": b"N(.",
    "EXT1": b"\x82\x01.",
    "EXT2": b"\x83\x01\x00.",
    "EXT4": b"\x84\x01\x00\x00\x00.",
    "NEXT_BUFFER": b"\x97.",
    "READONLY_BUFFER": b"N\x98.",
    "protocol 6": b"\x80\x06N.",
    "BINBYTES8 of 2**60 bytes": b"\x8e" + struct.pack("<Q", 2**60) + b"x.",
    "BINUNICODE8 of 2**60 bytes": b"\x8d" + struct.pack("<Q", 2**60) + b"x.",
    "BYTEARRAY8 of 2**64-1 bytes": b"\x96" + struct.pack("<Q", 2**64 - 1) + b"x.",
    "BINSTRING of negative length": b"T\xff\xff\xff\xffx.",
    "LONG4 of negative length": b"\x8b" + struct.pack("<i", -1) + b"x.",
    "LONG of 100,000 digits": b"L" + b"9" * 100_000 + b"L\n.",
    "INT that is no number": b"Ix\n.",
    "FLOAT that is no number": b"Fx\n.",
    "UTF-8 that is none": b"X\x01\x00\x00\x00\xff.",
    "escape that is none": b"V\\u12\n.",
    "string without quotes": b"Sabc\n.",
    "string of one quote": b"S'\n.",
    "string with an unknown escape": b"S'\\d'\n.",
    "string with half an escape": b"S'\\x4'\n.",
    "int key of 2**64": b"}\x8a\x09" + struct.pack("<QB", 0, 1) + b"Ns.",
    "int key of 2,000 bits": b"}\x8a\xff" + b"\x7f" * 255 + b"Ns.",
    "list key": b"}]Ns.",
    "dict key": b"}}Ns.",
    "dict in a set": b"\x8f(}\x90.",
    "list in a frozenset": b"(]\x91.",
    "list in a tuple key": b"}]\x85Ns.",
    "tuple key of 9 items": b"}(NNNNNNNNNtNs.",
    "tuple key nested 60 deep and doubled": b"}N\x85" + b"2\x86" * 60 + b"Ns.",
    "tuple key nested 100,000 deep": b"}N" + b"\x85" * 100_000 + b"Ns.",
    "tuple nested 100,000 deep in a set": b"\x8f(N" + b"\x85" * 100_000 + b"\x90.",
    "1,001 marks": b"(" * 1001 + b"N" + b"t" * 1001 + b".",
    "key without a value": b"}(Nu.",
    "items of a list": b"]NNs.",
    "elements of a tuple": b")Na.",
    "elements of a dict": b"}(Ne.",
    "elements added to a frozenset": b"(\x91(N\x90.",
    "state of a list": b"]}b.",
    "state of a global": b"ca\nB\n}b.",
    "call without an argument tuple": b"ca\nB\n]R.",
    "call of a text": b"S'os.system'\n(S'true'\ntR.",
    "call of nothing": b"N)R.",
    "call with keywords": b"ca\nB\n)}Nq\x00Ns\x92.",
    "global named by a number": b"K\x01K\x02\x93.",
    "global without a second line": b"ca\n",
    "unset memo entry": b"h\x05.",
    "unset memo entry 2**31": b"j\x00\x00\x00\x80.",
    "negative memo index": b"Np-1\n.",
    "negative memo index read": b"Np0\ng-1\n.",
    "OBJ without a class": b"(o.",
    "DUP of nothing": b"2.",
    "TUPLE3 of two": b"NN\x87.",
    "mark closed twice": b"N(tt.",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
def test_what_is_not_a_pickle_or_beyond_the_bounds_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedPickleError):
        unpickle(data)


def test_1000_nested_marks_are_still_read() -> None:
    value = unpickle(b"(" * 1000 + b"N" + b"t" * 1000 + b".")
    for _ in range(1000):
        assert isinstance(value, tuple)
        (value,) = value
    assert value is None


DEEP: dict[str, bytes] = {
    "tuples": b"N" + b"\x85" * 200_000,
    "lists": b"]" * 200_000 + b"a" * 199_999,
    "dicts": b"}" + b"N}" * 200_000 + b"s" * 200_000,
    "persistent ids": b"N" + b"Q" * 200_000,
    "records": b"ca\nB\nq\x00" + b"h\x00" * 199_999 + b"N" + b"\x85R" * 200_000,
}


@pytest.mark.slow
@pytest.mark.parametrize("data", DEEP.values(), ids=DEEP.keys())
def test_200_000_values_in_one_another_are_read_and_freed_without_recursion(data: bytes) -> None:
    value = unpickle(data + b".")
    assert type(value) in (tuple, list, dict, Persistent, Record)
    del value


def sample() -> dict[str, object]:
    """Return a value that makes the pickler write most opcodes."""
    return {
        "texts": ["a", "é", "😀" * 100, "long" * 100],
        "numbers": [0, 255, 256, 65536, -1, 2**31, 2**70, 0.5, True, False, None],
        "bytes": [b"", b"a", b"b" * 300],
        "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
        "sets": [{"a"}, frozenset({"b"})],
        "objects": [Reduced(), Plain(1), Plain.Inner, OrderedDict(a=1), {1: {2: 3}}],
    }


@every_protocol
def test_a_pickle_cut_at_any_byte_is_malformed(protocol: int) -> None:
    data = pickle.dumps(sample(), protocol)
    unpickle(data)
    for size in range(len(data)):
        with pytest.raises(MalformedPickleError):
            unpickle(data[:size])


def runs_or_refuses(data: bytes) -> None:
    try:
        unpickle(data)
    except (MalformedPickleError, DangerousPickleError) as error:
        assert str(error)  # noqa: PT017 (an error is allowed, not demanded)


@settings(max_examples=examples(1000))
@given(st.binary(max_size=100))
def test_random_bytes_are_read_or_refused(data: bytes) -> None:
    runs_or_refuses(data)


opcodes = st.sampled_from([opcode.code.encode("latin-1") for opcode in pickletools.opcodes])
arguments = st.binary(max_size=4) | st.sampled_from([b"1\n", b"a\n", b"'a'\n", b"a\nB\n"])


@settings(max_examples=examples(1000))
@given(st.lists(opcodes | arguments, max_size=40).map(b"".join))
def test_random_opcodes_are_read_or_refused(data: bytes) -> None:
    runs_or_refuses(data + b".")


@settings(max_examples=examples(1000))
@given(
    st.sampled_from(PROTOCOLS),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 3), st.binary(max_size=4))),
)
def test_a_mutated_pickle_is_read_or_refused(
    protocol: int, edits: list[tuple[int, int, bytes]]
) -> None:
    data = pickle.dumps(sample(), protocol)
    for place, removed, added in edits:
        at = place % len(data)
        data = data[:at] + added + data[at + removed :]
    runs_or_refuses(data)


# --- bounds: memory and time, measured in a child of its own -------------------------------------

_CHILD = """
import resource
import struct
from unshard.containers.pickles.unpickle import (
    DangerousPickleError,
    MalformedPickleError,
    run_all,
    unpickle,
)

def memory(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

M = 1_000_000
data = {source}
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
resource.setrlimit(resource.RLIMIT_CPU, ({seconds}, {seconds}))
before = memory("VmRSS")
try:
    outcome = type(unpickle(data)).__name__
except (MalformedPickleError, DangerousPickleError) as error:
    outcome = type(error).__name__
print(outcome, memory("VmHWM") - before, len(data))
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="measured through /proc")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a pickle in a process of its own.

    Attributes:
        kind: the type of the value, or of the error.
        growth: bytes of memory at the peak beyond those held before.
        size: the pickle's bytes.
    """

    kind: str
    growth: int
    size: int


def in_a_child(source: str, *, seconds: int = 60) -> Outcome:
    """Unpickle what a Python expression makes, within 4 GiB and some seconds of processor time.

    The expression may count in M, a million.
    """
    code = _CHILD.format(source=source, seconds=seconds)
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr[-2000:] or f"killed: {child.returncode}"
    kind, growth, size = child.stdout.split()
    return Outcome(kind, int(growth), int(size))


@linux
@pytest.mark.parametrize("index", [2**28, 2**32 - 1])
def test_a_large_memo_index_allocates_nothing(index: int) -> None:
    word = struct.pack("<I", index)
    outcome = in_a_child(repr(b"K\x07r" + word + b"0j" + word + b"."))
    assert outcome.growth < 20_000_000


BOMBS: dict[str, str] = {
    "lists": r"b']' * (4 * M)",
    "dicts": r"b'}' * (4 * M)",
    "sets": r"b'\x8f' * (4 * M)",
    "frozensets": r"b'(\x91' * (2 * M)",
    "tuples": r"b'N\x85' * (4 * M)",
    "records": r"b'ca\nB\nq\x00' + b'h\x00)R' * M",
    "persistent ids": r"b'N' + b'Q' * (4 * M)",
    "persistent ids as text": r"b'P\n' * (4 * M)",
    "lists of one": r"b']Na' * (3 * M)",
    "dicts of one": r"b'}NNs' * (M * 3 // 2)",
    "memo": r"b'N' + b''.join(b'r' + struct.pack('<I', 9 + i) for i in range(M * 3 // 2))",
    "nested classes with long names": (
        r"b'c__builtin__\ngetattr\nq\x000X\x00\x00\x0c\x00' + b'x' * 0xC0000 + b'q\x010'"
        r" + b'ca\nB\nq\x02' + b'0h\x00h\x02h\x01\x86Rq\x02' * 50"
    ),
}


@pytest.mark.slow
@linux
@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS.keys())
def test_bombs_are_refused_within_300_mb(source: str) -> None:
    outcome = in_a_child(source)
    assert outcome.kind == "MalformedPickleError"
    assert outcome.growth < 300_000_000


PROMISED_RATIO = 20  # of memory to the pickle's bytes: see the docstring of unpickle


@pytest.mark.slow
@linux
@pytest.mark.parametrize(
    "source",
    [
        r"b'\x8f' * (M * 6 // 10) + b'\x8c\x02\xc4\x80' * (M * 24 // 10)",
        r"b'\x8f' * (M * 6 // 10) + b'P\n' * (M * 48 // 10)",
        r"b'ca\n' + b'\xc4\x80.' * (4 * M) + b'\n.'",
        r"b'S' + b'\x27' + b'\\n' * (M * 45 // 10) + b'\x27' + b'\n.'",
        r"b'ca\nB\n)R\x8b\0\0\x08\0' + b'x' * 0x80000 + b'q\x000' + b'h\0Ns' * (M // 500) + b'.'",
        r"b'ca\nB\n)R((' + b'M\xff\xff' * 8 + b'tq\0N' + b'h\0N' * (M * 7 // 10) + b'u.'",
    ],
    ids=[
        "sets and strings",
        "sets and persistent ids",
        "a dotted name",
        "a string of escapes",
        "a huge integer as many keys",
        "a tuple as many keys",
    ],
)
def test_memory_stays_below_the_promised_bound_whatever_becomes_of_it(source: str) -> None:
    outcome = in_a_child(source)
    assert outcome.growth + outcome.size < max(300_000_000, PROMISED_RATIO * outcome.size)


def collision(bits: int, *, below: int) -> tuple[list[int], int]:
    """Return integers that fill a table's probe sequence, and one that walks most of them.

    CPython looks integers up by their own bits, then at 5 * slot + 1, and so on while it is taken.
    """
    mask = (1 << bits) - 1
    chain = {1: 0}
    slot = 1
    while len(chain) < 0.6 * mask:
        slot = (5 * slot + 1) & mask
        chain[slot] = len(chain)
    start = below // 2
    last = (key for key in range(start, below) if 0 <= _walk(key, mask, chain) < len(chain) // 4)
    return list(chain), next(last)


def _walk(key: int, mask: int, taken: dict[int, int]) -> int:
    """Return where in the chain the search goes on once the key's bits are used up, or -1."""
    slot = key & mask
    while key and slot in taken:
        key >>= 5
        slot = (5 * slot + key + 1) & mask
    return taken.get(slot, -1)


def colliding_keys() -> bytes:
    chain, last = collision(17, below=2**60)
    fill = b"".join(b"J" + struct.pack("<i", slot) + b"N" for slot in chain)
    number = b"\x8a\x08" + struct.pack("<q", last) + b"q\x00N"
    return b"}(" + fill + number + b"u(" + b"h\x00N" * 60_000 + b"u."


def colliding_memo() -> bytes:
    chain, last = collision(17, below=2**32)
    fill = b"".join(b"r" + struct.pack("<I", slot) for slot in [*chain, last])
    return b"N" + fill + (b"j" + struct.pack("<I", last) + b"0") * 60_000 + b"."


@linux
@pytest.mark.parametrize("make_pickle", [colliding_keys, colliding_memo])
def test_integers_cannot_be_chosen_to_make_it_quadratic(
    tmp_path: Path, make_pickle: Callable[[], bytes]
) -> None:
    path = tmp_path / "pickle"
    path.write_bytes(make_pickle())
    assert in_a_child(f"open({str(path)!r}, 'rb').read()", seconds=4).size < 900_000


@linux
def test_equal_long_keys_cannot_make_it_quadratic() -> None:
    text = r"b'X\x00\x00\x10\x00' + b'x' * 0x100000"
    source = rf"{text} + b'q\x000' + {text} + b'q\x010}}h\x00Ns' + b'h\x01Ns' * 500_000 + b'.'"
    assert in_a_child(source, seconds=5).size < 5_000_000


@pytest.mark.parametrize("entries", [1, 2, 5, 6, 11, 43])
def test_no_less_is_charged_for_dicts_than_they_take(entries: int) -> None:
    keys = [f"key{number}" for number in range(entries)]
    data = pickle.dumps([dict.fromkeys(keys) for _ in range(5000)])
    state = Machine(data)
    tracemalloc.start()
    try:
        value = run_all(state, OPERATIONS, inline=True)
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert isinstance(value, list)
    assert taken <= state.spent + SLOT_COST * len(state.memo)
