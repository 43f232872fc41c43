"""The settings of a measurement, and which of them make numbers incomparable. Pure."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

NOT_SETTINGS = frozenset({"batch_size", "max_batch_size", "num_gpus"})
"""The arguments that are recorded, but do not change the numbers."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a measurement.

    Attributes:
        arguments: the profile's arguments for the evaluator, updated with the submission's.
        revision: a digest of everything else in the profile that can change a number; empty for
            measurements of an earlier version, which did not record it.
        evaluator: its name and version, if its results have them.
        basis: the revision without the profile's own arguments, which `arguments` has.
    """

    arguments: Mapping[str, object] = field(default_factory=dict)
    revision: str = ""
    evaluator: str | None = None
    basis: str = ""

    @property
    def compared(self) -> dict[str, object]:
        """The arguments that can change a number; False is the default of every flag."""
        return {
            key: int(value) if isinstance(value, float) and value.is_integer() else value
            for key, value in self.arguments.items()
            if key not in NOT_SETTINGS and value is not False
        }

    @property
    def id(self) -> str:
        """A hash that is equal for numbers that can be compared."""
        parts = json.dumps([self.compared, self.basis or self.revision], sort_keys=True)
        return hashlib.sha256(parts.encode()).hexdigest()[:12]
