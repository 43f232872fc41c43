"""Turn sharded training checkpoints into Hugging Face models: exact, fast, without torch.

    import unshard

    report = unshard.merge("checkpoint-1000", "out", dtype="bfloat16")
    print(unshard.inspect("checkpoint-1000").tensors)
    with unshard.open_checkpoint("checkpoint-1000") as checkpoint:
        rows = checkpoint.get_slice("lm_head.weight")[0:16]

Importing this package imports nothing else; the first use of a name imports numpy. So a command
handles signals before it imports anything slow.
"""

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (pip checks it, but not for a source tree)
    raise ImportError(
        f"unshard needs Python 3.11 or later; this is Python {sys.version_info[0]}."
        f"{sys.version_info[1]}, which is past its end of life: install unshard into its own "
        "environment (in a clone: uv tool install --python 3.12 .) and run its commands, "
        "`unshard eval serve` and `unshard eval watch` from there"
    )

__version__ = "1.0.0rc1"

TYPE_CHECKING = False  # type checkers treat this as true; importing typing takes time
if TYPE_CHECKING:
    from unshard.api import *  # noqa: F403 (the list of public names)
else:  # with `__getattr__`, type checkers would accept any name

    def __getattr__(name: str) -> object:
        from importlib.util import find_spec

        if name == "__all__":
            return __dir__()
        # Python also looks up a submodule here, before it imports it.
        if name.isidentifier() and name[0] != "_" and not find_spec(f"{__name__}.{name}"):
            if name.endswith(("Error", "Warning")):
                from unshard import errors as module
            else:
                from unshard import api as module
            if callable(value := getattr(module, name, None)):
                return value
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        from unshard import api

        return sorted(["__version__", *dir(api)])
