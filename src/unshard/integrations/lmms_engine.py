"""Replacement of lmms-engine's `FSDP2Merger` by ours in the process of a trainer.

Its RL trainers merge at every policy sync, while generation waits. Call this before training:

    import unshard.integrations.lmms_engine as integration
    integration.install()

`python -m unshard.evaluate.lmms_engine` does so. For Ray's workers, set in their environment:

    runtime_env: {worker_process_setup_hook: unshard.integrations.lmms_engine.install}

lmms-engine's own merger is not imported, because it imports every model of lmms-engine, and a
missing dependency of any model would stop the training.
"""

import importlib
import sys
from importlib.util import find_spec
from types import ModuleType

from unshard.merger import fsdp2

__all__ = ["install"]

_MODULE = "lmms_engine.merger.fsdp2"
# The public names of their module.
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
    """Replace lmms-engine's merger by ours, in modules that have imported it and in later imports.

    Existing subclasses of the original keep it. Another call changes nothing.

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
    for names in (vars(each) for each in loaded if isinstance(each, ModuleType)):
        uses = [name for name, value in list(names.items()) if value is original]
        names.update(dict.fromkeys(uses, fsdp2.FSDP2Merger))
