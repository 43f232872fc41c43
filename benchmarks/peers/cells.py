"""What is merged: the matrix of checkpoints, and where each is."""

from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["DTYPES", "EMBEDDINGS", "HEAD", "LAYOUTS", "SIZES", "Cell", "Made"]

SIZES = ("0.5b", "1.5b")
DTYPES = ("bfloat16", "float32")
LAYOUTS = ("verl", "lmms-engine", "DCP", "safetensors")
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""The tied names."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One checkpoint of the matrix: size of the model, ranks, layout and stored dtype."""

    size: str
    ranks: int
    layout: str
    dtype: str

    @property
    def label(self) -> str:
        """How results.json names it."""
        return " ".join(str(value) for value in asdict(self).values())


@dataclass(frozen=True, slots=True)
class Made:
    """What `make` wrote.

    Attributes:
        root: the directory of this checkpoint and of what belongs to it.
        checkpoint: the step's directory.
        weights: the directory of the weight files.
        truth: one safetensors file with all tensors but the tied one.
    """

    root: Path
    checkpoint: Path
    weights: Path
    truth: Path

    @property
    def files(self) -> list[Path]:
        """The files that hold weights."""
        kinds = (".pt", ".distcp", ".safetensors")
        return sorted(one for one in self.weights.iterdir() if one.suffix in kinds)
