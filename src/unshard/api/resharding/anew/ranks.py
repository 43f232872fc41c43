"""Files of ranks (verl, lmms-engine) of a checkpoint in another format."""

import re
from json import dumps

from unshard.api.resharding.anew.training import add_training, read_training
from unshard.api.resharding.formats import ReshardFormat, files_for
from unshard.api.resharding.ranks import files_of_ranks
from unshard.api.resharding.source import FSDP_CONFIG
from unshard.api.resharding.target import Target
from unshard.api.resharding.writing import Addition, Writing
from unshard.plan.resharding import lay_out_ranks
from unshard.read.dcp.scheduler import SCHEDULERS
from unshard.read.format import shortened
from unshard.read.open import Checkpoint
from unshard.read.optimizer.reader import unread_files

_NOTED = re.compile(rf"^optim|(^|\.)({'|'.join(SCHEDULERS)})(\.|$)")
_EXPERT = re.compile(r"\.experts\.\d+\.")


def ranks_anew(source: Checkpoint, target: Target, to: ReshardFormat) -> Writing:
    """Return what is written of a checkpoint that is placed (see `placing`)."""
    world = len(target.meshes)
    ranks = files_of_ranks(source, target, files_for(to, source), {})
    made = lay_out_ranks([*ranks], target.version)
    files = Addition()
    add_companions(source, "huggingface/" if to is ReshardFormat.VERL else "", files)
    if to is ReshardFormat.VERL:
        config = {"FSDP_version": 2, "world_size": world}
        files.data[FSDP_CONFIG] = dumps(config, indent=4).encode()
    device = target.meshes[0].device_type
    add_training(read_training(source), to, world, device, files)
    return Writing(made, files)


def add_companions(source: Checkpoint, folder: str, files: Addition) -> None:
    """Add config, tokenizer and the like, and note what else the source has or lacks."""
    files.copied |= {f"{folder}{name}": path for name, path in source.companions.paths.items()}
    if source.optimizer is None:
        files.notes.append(
            "no state of an optimizer was found that can be read: only the model can be loaded"
        )
        unread = unread_files(source)
        if unread:
            files.notes.append(f"left out of the optimizer: {shortened(unread, 5)} (not read)")
    if not source.location.format.sharded and any(map(_EXPERT.search, source.catalog.tensors)):
        files.notes.append(
            "every expert has tensors of its own, as on the hub: transformers 5 trains the experts "
            "of most families in one tensor, and then does not load these"
        )
    # Of the optimizer and the scheduler, other notes say what is left out.
    skipped = [one.fqn for one in source.catalog.skipped if not _NOTED.search(one.fqn)]
    if skipped:
        files.notes.append(f"left out: {', '.join(skipped[:5])} (not the model's weights)")
