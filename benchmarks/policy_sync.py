"""Compare lmms-engine's merger with ours at a policy sync of its RL trainers, side by side.

That is what generation waits for between the trainer's save and the engines' reload: rank 0 removes
what an earlier try left, merges, and marks the version as ready. Both mergers run in this process,
warm, in turns; the report has medians. Ours flushes its files to disk, theirs does not, so theirs
is measured with a flush, too. Their outputs are compared bit for bit.

    python benchmarks/policy_sync.py --gigabytes 3 --rounds 5

The merger of lmms-engine is the released one, with its `mapping_func`. `lmms_engine.models`, which
it imports for the models that are registered there, is an empty module here: a Llama is
transformers' own, and a GPU's packages are not installed. The checkpoints are written by real
torch: DTensors on a fake process group, in one process.
"""

import argparse
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

from from_pretrained_against_merge import write_checkpoint

_TINY: Mapping[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
_OURS, _THEIRS, _FLUSHED = "unshard", "lmms-engine", "lmms-engine, flushed"


def save(shards: Path, *, ranks: int, gigabytes: float) -> None:
    """Write what the trainer saves for a sync; a tiny one if it has no gigabytes."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = shards / "pytorch_model_fsdp_0"
    folder.mkdir(parents=True)
    sizes = {} if gigabytes else {"sizes": _TINY}
    write_checkpoint(folder, ranks=ranks, gigabytes=gigabytes, dim=0, **sizes)
    for file in folder.glob("*.json"):
        file.rename(shards / file.name)
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))  # noqa: S106 (a token)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)  # type: ignore[no-untyped-call]  # untyped there
    fast.save_pretrained(shards)


def sync(merger: Callable[[], Any], shards: Path, version: Path, *, flush: bool) -> None:
    """Do what `RLTrainRunner` does on rank 0."""
    if version.exists():
        shutil.rmtree(version)
    merger().merge(shards, output_path=version, model_general_type=None)
    if flush:
        for file in version.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
    (version / ".lmms_weight_sync_ready").write_text("version_id=12\n")


def measure(root: Path, rounds: int) -> dict[str, float]:
    """Return the median seconds of a sync by each contender."""
    from lmms_engine.merger.fsdp2 import FSDP2Merger as Theirs

    import unshard
    from unshard.merger import FSDP2Merger as Ours

    shards, seconds = root / "weight_v000012-fsdp", dict[str, list[float]]()
    versions = {_OURS: Ours, _THEIRS: Theirs, _FLUSHED: Theirs}
    for number in range(rounds + 1):
        for name, merger in versions.items():
            version = root / ("ours" if merger is Ours else "theirs") / "weight_v000012"
            version.parent.mkdir(exist_ok=True)
            os.sync()
            started = time.perf_counter()
            sync(merger, shards, version, flush=name == _FLUSHED)
            if number:  # the first round imports, and warms the page cache
                seconds.setdefault(name, []).append(time.perf_counter() - started)
    mine, others = (root / name / "weight_v000012" for name in ("ours", "theirs"))
    if not unshard.verify(mine, others).equal:
        sys.exit("the outputs differ")
    for name, values in seconds.items():
        print(f"  {name:<21} {' '.join(f'{value:.3f}' for value in values)} s")
    return {name: median(values) for name, values in seconds.items()}


def main() -> None:
    """Write the checkpoints, measure, print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=3.0, help="of float32, the large one")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", type=Path, default=None, help="where to work")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable()  # torch warns of every mesh that is loaded without its process group
    sys.modules["lmms_engine.models"] = ModuleType("lmms_engine.models")
    os.environ.setdefault("LOGURU_LEVEL", "ERROR")
    for gigabytes, rounds in ((0.0, 4 * options.rounds), (options.gigabytes, options.rounds)):
        with tempfile.TemporaryDirectory(dir=options.directory) as folder:
            root = Path(folder)
            save(root / "weight_v000012-fsdp", ranks=options.ranks, gigabytes=gigabytes)
            print(f"{gigabytes or 'tiny'}{' GB' * bool(gigabytes)} on {options.ranks} ranks:")
            medians = measure(root, rounds)
        for name, value in medians.items():
            print(f"  {name:<21} {value:.3f} s, {value / medians[_THEIRS]:.2f} x lmms-engine")


if __name__ == "__main__":
    main()
