"""Reader for torch.distributed.checkpoint (DCP): `.metadata` and `__R_I.distcp` files.

Written by `torch.distributed.checkpoint.save`: accelerate and the HF Trainer, torchtitan,
torchtune, Lightning, Composer, OLMo-core. `tensors` reads them.

Lightning saves the LightningModule and Composer the ComposerModel, whose attribute is the model:
every name starts with it (`model.model.norm.weight`). Nothing else is taken off a name.
"""

from dataclasses import replace

from unshard.containers.torch_files.reader import read_torch_file
from unshard.errors import CorruptError
from unshard.read.dcp.metadata import DcpMetadata, read_metadata
from unshard.read.dcp.model import model_names, read_object
from unshard.read.dcp.names import ACCELERATE, MODEL_KEYS
from unshard.read.dcp.tensors import metadata_files, read_catalog
from unshard.read.format import Location, ReadOptions
from unshard.read.torch_save.values import is_lightning, items_of
from unshard.read.wrapper_names import without_wrapper_module
from unshard.tensors.catalog import Catalog

_LIGHTNING, _COMPOSER = "Lightning", "Composer"
_BY_PREFIX = {  # the keys under which they save the model
    ("state", "model"): _COMPOSER,
    ("app", "model"): "prime-rl",
    ("fsdp_checkpoint", "model"): "RLinf",
}
_TRAINING_STATE = """
    optimizer_* optim scheduler.bin scheduler.pt random_states_*.pkl rng_state*.pth sampler*.bin
    trainer_state.json meta.pt train
""".split()


def read(location: Location, options: ReadOptions) -> Catalog:
    """Return what a checkpoint holds."""
    metadata = read_metadata(metadata_files(location))
    is_object = not metadata.paths and any(name in metadata.objects for name in MODEL_KEYS)
    if is_object or not metadata.tensors:
        return read_object(metadata, location, options)
    chosen = model_names(metadata, str(location.weights_dir))
    writer = _writer(location, metadata, chosen.prefix)
    names = dict(chosen.names)
    if writer in {_LIGHTNING, _COMPOSER}:  # which save a module around the model
        names = without_wrapper_module(names)
    step = location.step_dir
    return replace(
        read_catalog(metadata, names, location),
        writer=writer,
        skipped=chosen.skipped,
        training_state=tuple(sorted({p for one in _TRAINING_STATE for p in step.glob(one)})),
    )


def _writer(location: Location, metadata: DcpMetadata, prefix: tuple[str, ...]) -> str:
    """Return the tool that wrote a checkpoint, as far as its files and paths show."""
    folder, step = location.weights_dir, location.step_dir
    if folder.name.startswith(ACCELERATE):
        trainer = (step / "trainer_state.json").is_file()
        return "HF Trainer (accelerate)" if trainer else "accelerate"
    meta = folder / "meta.pt"
    if meta.exists() or meta.is_symlink():  # a link that leads nowhere is an error, not Fabric
        value = read_torch_file(meta).value
        if items_of(value) is None:
            raise CorruptError(f"{meta}: not what Lightning saves there", expected="a dict")
        return _LIGHTNING if is_lightning(value) else "Lightning Fabric"
    if prefix in _BY_PREFIX:
        return _BY_PREFIX[prefix]
    if folder.name == "model_and_optim":
        return "OLMo-core"
    roots = {path[0] for path in metadata.paths.values() if path}
    return "torchtitan" if not prefix and "train_state" in roots else "torch"
