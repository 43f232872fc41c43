"""What a client chooses of an evaluator: one value, from its command line to the evaluator's."""

from typing import Annotated, TypedDict

from pydantic import BaseModel, ConfigDict, Field

from unshard.evaluate.values import LARGEST, Scalar, Whole, expects

__all__ = ["OPTIONS", "ArgumentFields", "Arguments"]

_LONGEST = 4000
_AUTO = r"^auto(:[1-9][0-9]{0,3})?$"
_IN_EVERY_KEY = ("num_fewshot", "batch_size", "limit", "gen_kwargs")

BatchSize = Annotated[
    Annotated[int, Field(ge=1, le=LARGEST)] | Annotated[str, Field(pattern=_AUTO)],
    expects("a whole number above 0, auto, or auto:N"),
]
Limit = Annotated[
    Annotated[int, Field(gt=0, le=LARGEST)] | Annotated[float, Field(gt=0, le=LARGEST)],
    expects("a number above 0; below 1 it is a share"),
]
Seed = Annotated[  # of numpy, which takes the smallest
    int, Field(ge=0, lt=2**32), expects("a whole number, 0 to 4294967295")
]
Pairs = Annotated[str, Field(max_length=_LONGEST), expects("key=value, separated by commas")]


class Arguments(BaseModel):
    """What a client chooses of an evaluator; None: as the profile or the evaluator says.

    A new argument is a field here and in `ArgumentFields`: the database, both evaluators, commands
    and the protocol take what is here.

    Attributes:
        model_args: arguments of the evaluator's model, without the checkpoint.
        num_fewshot, batch_size, limit, gen_kwargs: as the evaluators call them.
        num_gpus: how many GPUs the job gets.
        seed: of every random generator: Python's, numpy's, torch's, that of few-shot examples.
    """

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    model_args: dict[str, Scalar] = {}
    num_fewshot: Whole | None = None
    batch_size: BatchSize | None = None
    limit: Limit | None = None
    gen_kwargs: Pairs | None = None
    num_gpus: Whole | None = None
    seed: Seed | None = None

    def given(self) -> dict[str, object]:
        """Return what the client chose, by name."""
        return self.model_dump(exclude_defaults=True)

    def options(self) -> dict[str, object]:
        """Return the chosen options that are one plain value for both evaluators, by name."""
        return {name: value for name, value in self.given().items() if name in OPTIONS}

    def key_parts(self) -> list[object]:
        """Return what tells two measurements of a checkpoint apart.

        How many GPUs were used does not. An argument that was added later counts only where it is
        given: jobs in older databases keep their keys.
        """
        first = [dict(sorted(self.model_args.items()))]
        first += [getattr(self, name) for name in _IN_EVERY_KEY]
        later = self.options().keys() - set(_IN_EVERY_KEY)
        return [*first, *([name, getattr(self, name)] for name in sorted(later))]


OPTIONS = frozenset(Arguments.model_fields) - {"model_args", "gen_kwargs", "num_gpus"}
"""The arguments that are one plain value, which evaluators and commands take as it is."""


class ArgumentFields(TypedDict, total=False):
    """The fields of `Arguments`, as keywords of a function."""

    model_args: dict[str, Scalar] | None
    num_fewshot: int | None
    batch_size: int | str | None
    limit: float | None
    gen_kwargs: str | None
    num_gpus: int | None
    seed: int | None
