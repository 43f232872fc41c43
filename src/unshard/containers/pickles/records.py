"""Results of unpickling: inert records of the calls in a pickle, never the objects themselves.

Unpickling is safe because nothing is imported, not because of the list of dangerous names. The list
exists so that a user learns that a checkpoint was made to run commands.
"""

from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Global:
    """A reference to an importable object, which is never imported.

    `dotted` is the whole name, made once because it is compared for every tensor.
    """

    module: str
    name: str
    dotted: str = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dotted", f"{self.module}.{self.name}")

    def __str__(self) -> str:
        return self.dotted


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """A reference to an object outside the pickle: in torch's files, a storage."""

    pid: "Value"


@dataclass(slots=True, eq=False)
class Record:
    """A call in a pickle, and the later operations on its result.

    Compared and hashed by identity: records may be dict keys and may form cycles, so never walk
    them without a bound.

    Attributes:
        callee: usually the name of a class or function.
        args: positional arguments.
        state: the value of the last BUILD.
    """

    callee: "Value"
    args: tuple["Value", ...]
    state: "Value" = None
    _items: list[tuple["Value", "Value"]] | None = None
    _elements: list["Value"] | None = None

    @property
    def items(self) -> list[tuple["Value", "Value"]]:
        """Keys and values of SETITEM(S), in order."""
        if self._items is None:
            self._items = []
        return self._items

    @property
    def elements(self) -> list["Value"]:
        """Values of APPEND(S) and ADDITEMS, in order."""
        if self._elements is None:
            self._elements = []
        return self._elements

    def is_call_of(self, *names: str) -> bool:
        """Return whether the callee has one of these dotted names."""
        return isinstance(self.callee, Global) and self.callee.dotted in names


# A JSON-like value, a record, or a container of values; an `object`, so that mypy demands a check
# before each use.
Value = object

SKIPPED: Value = object()
"""The memo entry of an object that was not made."""

_MODULES = frozenset(
    """
    os posix nt subprocess _posixsubprocess sys shutil socket _socket pty importlib
    _frozen_importlib runpy ctypes _ctypes code codeop webbrowser multiprocessing pickle _pickle
    cPickle marshal dill cloudpickle joblib shelve asyncio signal pip ensurepip timeit cProfile
    profile pdb bdb trace doctest commands popen2 requests urllib urllib2 http httplib ftplib
    smtplib telnetlib tempfile imp pkgutil zipimport pydoc linecache
    """.split()
)
_BUILTINS = frozenset({"builtins", "__builtin__", "__builtins__"})
_BUILTIN_NAMES = frozenset(
    """
    eval exec execfile compile open file input raw_input __import__ breakpoint globals locals vars
    getattr setattr delattr apply reload help memoryview exit quit
    """.split()
)
_QUALIFIED = frozenset(
    """
    operator.attrgetter operator.methodcaller operator.itemgetter _operator.attrgetter
    _operator.methodcaller functools.reduce functools.partialmethod types.FunctionType
    types.CodeType torch.load torch.hub torch.jit.load torch.serialization.load torch.package
    torch.utils.cpp_extension torch._inductor torch._dynamo torch.utils.collect_env
    torch.utils.bottleneck numpy.load numpy.f2py numpy.distutils numpy.testing
    io.open io.FileIO io.open_code _io.open _io.FileIO
    """.split()
)
# An enum of numbers: Megatron records the signal on which it saves.
_HARMLESS = frozenset({"signal.Signals"})
# Attributes of harmless modules: pathlib.os.system, torch.serialization.os.popen.
_ATTRIBUTES = frozenset(
    """
    os posix nt subprocess sys pty socket shutil importlib runpy ctypes builtins __builtin__ eval
    exec __import__ __builtins__ __globals__ __subclasses__ __loader__ __getattribute__ __dict__
    __class__ __base__ __bases__ __mro__ __code__ system popen
    """.split()
)


@lru_cache(maxsize=4096)
def is_dangerous(name: Global) -> bool:
    """Return whether a name runs commands, evaluates code, opens files, or gives access to that."""
    dotted = name.dotted
    if dotted in _HARMLESS:
        return False
    parts = dotted.split(".")
    if parts[0] in _BUILTINS:
        return any(part in _BUILTIN_NAMES or part in _ATTRIBUTES for part in parts[1:])
    if parts[0] in _MODULES or any(part in _ATTRIBUTES for part in name.name.split(".")):
        return True
    return any(dotted == known or dotted.startswith(known + ".") for known in _QUALIFIED)
