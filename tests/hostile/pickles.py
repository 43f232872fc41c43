"""Pickles that reach for code, or for more memory and time than a checkpoint needs.

`calls` writes a name in every way that the opcodes know. `evils` are whole pickles, which end with
STOP: of every name and form, and the others that have no name.
"""

import pickle
import struct
from collections.abc import Callable, Iterator

__all__ = ["CALLS", "FORMS", "NAMES", "binary", "evils", "named", "oversized", "split_name"]

NAMES = """
    os.system posix.system nt.system subprocess.Popen subprocess.check_output builtins.eval
    builtins.exec builtins.compile builtins.__import__ builtins.open __builtin__.eval
    __builtin__.execfile pathlib:os.system torch.serialization:os.system pathlib:os.popen
    importlib.import_module runpy._run_module_as_main pty.spawn shutil.rmtree socket.socket
    ctypes.CDLL webbrowser.open pickle.loads _pickle.Unpickler marshal.loads torch.load
    torch.hub.load torch.utils.cpp_extension.load operator.attrgetter operator.methodcaller
    types.FunctionType types.CodeType io.open _io.FileIO numpy.load code.interact timeit.timeit
    multiprocessing.util.spawnv_passfds asyncio.create_subprocess_shell sys.exit
    collections:__builtins__.eval collections.OrderedDict:__subclasses__ functools:reduce
""".split()
"""Names that run commands, evaluate code or open files; a colon divides module and attribute."""


def split_name(name: str) -> tuple[str, str]:
    """Split at the colon, or else at the last dot, into module and attribute."""
    module, _, attribute = name.rpartition(":" if ":" in name else ".")
    return module, attribute


def binary(text: str) -> bytes:
    """Return the opcode that pushes a text."""
    data = text.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def named(module: str, name: str) -> bytes:
    """Return the opcode that pushes a global by its name."""
    return f"c{module}\n{name}\n".encode()


def _stacked(module: str, name: str) -> bytes:
    return binary(module) + binary(name) + b"\x93"


FORMS: dict[str, Callable[[str, str], bytes]] = {
    "REDUCE": lambda m, n: named(m, n) + b"(S'true'\ntR.",
    "NEWOBJ": lambda m, n: named(m, n) + b"(S'true'\nt\x81.",
    "NEWOBJ_EX": lambda m, n: named(m, n) + b"(S'true'\nt}\x92.",
    "STACK_GLOBAL": lambda m, n: _stacked(m, n) + b"(S'true'\ntR.",
    "INST": lambda m, n: f"(S'true'\ni{m}\n{n}\n.".encode(),
    "OBJ": lambda m, n: b"(" + named(m, n) + b"S'true'\no.",
    "pushed and popped": lambda m, n: named(m, n) + b"0N.",
    "popped with a mark": lambda m, n: b"N(" + named(m, n) + b"1.",
    "only memoised": lambda m, n: named(m, n) + b"q\x000N.",
    "as a dict key": lambda m, n: b"}" + named(m, n) + b"Ns.",
    "as state": lambda m, n: named("a", "B") + b")R" + named(m, n) + b"b.",
    "in a persistent id": lambda m, n: named(m, n) + b"Q.",
    "named from the memo": lambda m, n: (
        binary(n) + b"q\x000" + binary(m) + b"h\x00q\x010h\x00\x930N."
    ),
    "before garbage": lambda m, n: named(m, n) + b"\xff\xff",
    "in a frame": lambda m, n: _framed(named(m, n) + b"(S'true'\ntR."),
    "in a frame of a false length": lambda m, n: _framed(named(m, n) + b")R.", more=2**40),
    "across two frames": lambda m, n: (
        _framed(_stacked(m, n)) + b"\x95" + struct.pack("<Q", 3) + b")R."
    ),
    "memoised by MEMOIZE": lambda m, n: _stacked(m, n) + b"\x940h\x00)R.",
    "state of a call": lambda m, n: (
        named("torch", "Size") + b")R}" + binary("__reduce__") + named(m, n) + b"sb."
    ),
    "a callee that is called": lambda m, n: named("functools", "partial") + named(m, n) + b"\x85R.",
    "by a slot of a class": lambda m, n: (
        named("a", "B") + b")\x81(N}" + binary("x") + named(m, n) + b"stb."
    ),
}
"""Ways to write a name, so that Python's own unpickler would look it up or call it."""

CALLS: dict[str, bytes] = {
    "EXT1": b"\x82\x01)R.",
    "EXT2": b"\x83\x01\x00)R.",
    "EXT4": b"\x84\x01\x00\x00\x00)R.",
    "getattr of a module": b"c__builtin__\ngetattr\n(ctorch\nserialization\nS'os'\ntR.",
    "getattr of getattr": (
        b"cbuiltins\ngetattr\n(c__builtin__\ngetattr\n(ctorch\nserialization\nS'x'\ntRS'os'\ntR."
    ),
    "a pickle in a pickle": (
        b"c_pickle\nloads\nC" + bytes([20]) + b"cos\nsystem\n(S'a'\ntR."[:20] + b"\x85R."
    ),
    "NEXT_BUFFER": b"\x97.",
    "STACK_GLOBAL of a number": b"K\x01K\x02\x93.",
    "a callee that is a text": b"S'os.system'\n(S'true'\ntR.",
    "keywords of a call": named("os", "system") + b")}" + binary("command") + b"S'true'\ns\x92.",
}
"""Pickles that reach for code without one of the names."""


def _framed(data: bytes, *, more: int = 0) -> bytes:
    return b"\x80\x04\x95" + struct.pack("<Q", len(data) + more) + data


def evils() -> Iterator[tuple[str, bytes]]:
    """Yield every attack on code, by what it is."""
    for name in NAMES:
        for form, write in FORMS.items():
            yield f"{name}, {form}", write(*split_name(name))
    yield from CALLS.items()
    good, evil = pickle.dumps({"x": 1}, 2), FORMS["REDUCE"]("os", "system")
    yield "another stream before STOP", good[:-1] + b"0" + evil


def oversized() -> Iterator[tuple[str, bytes]]:
    """Yield pickles of a few megabytes that ask for far more memory, or for quadratic time."""
    million = 10**6
    yield "lists within lists", b"]" * (4 * million) + b"."
    yield "tuples within tuples", b"N" + b"\x85" * (4 * million) + b"."
    yield "dicts", b"}" * (4 * million) + b"."
    yield "sets", b"\x8f" * (4 * million) + b"."
    yield "calls", b"ca\nB\nq\x00" + b"h\x00)R" * million + b"."
    yield "persistent ids", b"N" + b"Q" * (4 * million) + b"."
    memo = (b"r" + struct.pack("<I", 9 + i) for i in range(million * 3 // 2))
    yield "memo entries", b"N" + b"".join(memo) + b"."
    yield "a far memo entry", b"N" + b"r" + struct.pack("<I", 2**32 - 1) + b"."
    yield "doubled tuples as a key", b"}N\x85" + b"2\x86" * 60 + b"Ns."
    yield "a deep tuple as a key", b"}N" + b"\x85" * 100_000 + b"Ns."
    yield "a number of many digits", b"L" + b"9" * million + b"L\n."
    yield "a huge number", b"\x8b" + struct.pack("<i", million) + b"\x7f" * million + b"."
    yield "bytes of 2**60", b"\x8e" + struct.pack("<Q", 2**60) + b"x."
    yield "a text of 2**60", b"\x8d" + struct.pack("<Q", 2**60) + b"x."
    yield "a negative length", b"T\xff\xff\xff\xffx."
    yield "marks", b"(" * 100_000 + b"N."
    yield "nothing", b""
    yield "only STOP", b"."
    yield "a full stack", b"NN."
    yield "protocol 6", b"\x80\x06N."
