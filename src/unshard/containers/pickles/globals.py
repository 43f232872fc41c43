"""Which names in a pickle are attacks. Nothing is ever imported; a name here refuses the file.

The list is not what makes unpickling safe (no name is resolved at all): it tells a user that a
checkpoint was made to run commands, which must not pass as "a value that was skipped".
"""

from functools import lru_cache

from unshard.containers.pickles.records import Global

__all__ = ["is_dangerous"]

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
# An attribute reached through an innocent module: pathlib.os.system, torch.serialization.os.popen.
_ATTRIBUTES = frozenset(
    """
    os posix nt subprocess sys pty socket shutil importlib runpy ctypes builtins __builtin__ eval
    exec __import__ __builtins__ __globals__ __subclasses__ __loader__ __getattribute__ __dict__
    __class__ __base__ __bases__ __mro__ __code__ system popen
    """.split()
)


@lru_cache(maxsize=4096)
def is_dangerous(name: Global) -> bool:
    """Return whether a name runs commands, evaluates code or opens files, or reaches for that."""
    dotted = name.dotted
    parts = dotted.split(".")
    if parts[0] in _BUILTINS:
        return any(part in _BUILTIN_NAMES or part in _ATTRIBUTES for part in parts[1:])
    if parts[0] in _MODULES or any(part in _ATTRIBUTES for part in name.name.split(".")):
        return True
    return any(dotted == known or dotted.startswith(known + ".") for known in _QUALIFIED)
