"""lm-eval on a model that is not merged: transformers loads it from the shards of a checkpoint.

A profile with `weights: direct` runs it with its own interpreter, which needs unshard, torch and
lm-eval, as `python -m unshard.evaluate.server.evaluators.direct run --config=job.yaml`: that is
lm-eval's own command line (0.4.13), with one more type of model. Its `pretrained` is a directory
with all files of a merged model except its weights, and with the path of the checkpoint.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from unshard.errors import UnshardError
from unshard.fronts import Command

MODEL_TYPE = "unshard"  # lm-eval's name for the type of model
PLACE_NAME = "weights.json"
"""The file in the model's directory with the path of the checkpoint and its set of weights."""

# Options for files of a model on the hub.
_HUB_OPTIONS = ("revision", "subfolder", "gguf_file")


class _Shards(NamedTuple):
    """Loads the model of one directory from shards; any other as transformers does.

    Attributes:
        directory: the model's, without weights.
        auto_class: the class of transformers that lm-eval has chosen.
        load: its `from_pretrained`.
    """

    directory: str
    auto_class: type
    load: Callable[..., object]

    def from_pretrained(self, path: str, **options: object) -> object:
        if path != self.directory:
            return self.load(path, **options)
        import unshard

        source = json.loads((Path(path) / PLACE_NAME).read_bytes())
        loading = {name: value for name, value in options.items() if name not in _HUB_OPTIONS}
        own = {"weights": source["weights"], "config": path}
        return unshard.from_pretrained(source["checkpoint"], self.auto_class, **own, **loading)


def main() -> None:
    """Run lm-eval's command line with the type of model `MODEL_TYPE`."""
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM

    @register_model(MODEL_TYPE)
    class Unmerged(HFLM):  # type: ignore[misc]  # lm_eval has no types
        """lm-eval's own type "hf", whose model is loaded from shards."""

        AUTO_MODEL_CLASS: Any

        def _create_model(self, pretrained: str, **options: object) -> None:
            chosen = self.AUTO_MODEL_CLASS
            self.AUTO_MODEL_CLASS = _Shards(pretrained, chosen, chosen.from_pretrained)
            try:
                super()._create_model(pretrained, **options)
            finally:
                self.AUTO_MODEL_CLASS = chosen  # lm-eval compares it later

    try:
        cli_evaluate()
    except UnshardError as error:
        error.front = Command({})
        sys.exit(str(error))


if __name__ == "__main__":
    main()
