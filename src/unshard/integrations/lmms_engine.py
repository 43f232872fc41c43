"""lmms-engine's `FSDP2Merger`, replaced by ours in the process of a trainer.

Its RL trainers merge at every policy sync, while generation waits. Call this before training:

    import unshard.integrations.lmms_engine as integration
    integration.install()

`python -m unshard.evaluate.lmms_engine` does. Ray's workers are told to by their environment:

    runtime_env: {worker_process_setup_hook: unshard.integrations.lmms_engine.install}

lmms-engine's own merger is not imported: it imports every model that lmms-engine has, and one whose
dependency is missing would stop a training that does without it.
"""

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType

from unshard.merger import fsdp2

__all__ = ["install"]

_MODULE = "lmms_engine.merger.fsdp2"
# What their module has for others to import.
_NAMES = {
    "FSDP2Merger": fsdp2.FSDP2Merger,
    "CheckpointMerger": fsdp2.CheckpointMerger,
    "CheckpointType": fsdp2.CheckpointType,
    "STATE_DICT_DIRNAME_MAP": {
        "regular": "pytorch_model_fsdp_0",
        "ema": "pytorch_ema_model_fsdp_0",
    },
}


def install() -> None:
    """Replace lmms-engine's merger by ours, for modules that have imported it and for later ones.

    Subclasses of the original that exist already keep it. To call it again changes nothing.

    Raises:
        ImportError: lmms-engine is not installed, or has no merger.
    """
    if find_spec("lmms_engine.merger") is None:  # before any change
        raise ImportError("this version of lmms-engine has no merger", name="lmms_engine.merger")
    if _MODULE not in sys.modules:
        sys.modules[_MODULE] = ModuleType(_MODULE, fsdp2.__doc__)
        vars(sys.modules[_MODULE]).update(_NAMES)
    module = sys.modules[_MODULE]
    original = vars(module)["FSDP2Merger"]
    package = importlib.import_module("lmms_engine.merger")
    vars(package).setdefault("fsdp2", module)  # as an import would
    vars(package)["CheckpointMerger"].register(fsdp2.FSDP2Merger)
    loaded: list[object] = list(sys.modules.values())  # some packages put other objects there
    for names in (vars(one) for one in loaded if isinstance(one, ModuleType)):
        found = [name for name, value in list(names.items()) if value is original]
        names.update(dict.fromkeys(found, fsdp2.FSDP2Merger))
