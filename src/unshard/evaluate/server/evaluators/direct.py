"""lm-eval on a model that is not merged: transformers loads it from the shards of a checkpoint.

A profile with `weights: direct` runs it with its own interpreter, which needs unshard, torch and
lm-eval, as `python -m unshard.evaluate.server.evaluators.direct run --config=job.yaml`: that is
lm-eval's own command line (0.4.13), with one more type of model. What it calls `pretrained` is a
directory that has everything of a merged model but its weights, and says where these are.
"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from unshard.errors import UnshardError
from unshard.fronts import Command

if TYPE_CHECKING:
    from lm_eval.api.model import LM
    from lm_eval.models.huggingface import HFLM

MODEL_TYPE = "unshard"
"""What lm-eval calls the type of model."""

PLACE_NAME = "weights.json"
"""The file in the model's directory that names the checkpoint, and which of its weights."""

# They say where on the hub a model's files are.
_PLACES = ("revision", "subfolder", "gguf_file")


class _Shards:
    """Loads the model of one directory from shards; any other as transformers does.

    Args:
        directory: of the model without weights.
        auto_class: the class of transformers that lm-eval has chosen.
        load: its `from_pretrained`.
    """

    def __init__(self, directory: str, auto_class: type, load: Callable[..., object]) -> None:
        self._directory = directory
        self._auto_class = auto_class
        self._load = load

    def from_pretrained(self, path: str, **options: object) -> object:
        if path != self._directory:
            return self._load(path, **options)
        import unshard

        place = json.loads((Path(path) / PLACE_NAME).read_bytes())
        kept = {name: value for name, value in options.items() if name not in _PLACES}
        own = {"weights": place["weights"], "config": path}
        return unshard.from_pretrained(place["checkpoint"], self._auto_class, **own, **kept)


def main() -> None:
    """Run lm-eval's command line, which knows the type of model `MODEL_TYPE`."""
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model

    register_model(MODEL_TYPE)(_model_type())
    try:
        cli_evaluate()
    except UnshardError as error:
        error.front = Command({})
        sys.exit(str(error))


def _model_type() -> "type[LM]":
    from lm_eval.models.huggingface import HFLM

    class Unmerged(HFLM):  # type: ignore[misc]  # lm_eval has no types
        """lm-eval's own type "hf", whose model is loaded from shards."""

        def _create_model(self, pretrained: str, **options: object) -> None:
            with _loading_shards(self, pretrained):
                super()._create_model(pretrained, **options)

    return Unmerged


@contextmanager
def _loading_shards(model: "HFLM", directory: str) -> Iterator[None]:
    """Have lm-eval load the model of a directory from shards as long as this lasts."""
    chosen = model.AUTO_MODEL_CLASS
    model.AUTO_MODEL_CLASS = _Shards(directory, chosen, chosen.from_pretrained)
    try:
        yield
    finally:
        model.AUTO_MODEL_CLASS = chosen  # lm-eval asks later which it is


if __name__ == "__main__":
    main()
