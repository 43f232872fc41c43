"""What a number was measured with, and which of that distinguishes it from others. Pure."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

NOT_SETTINGS = frozenset({"batch_size", "max_batch_size", "num_gpus"})
"""The arguments that are recorded, but do not distinguish one number from another."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a number was measured with.

    Attributes:
        arguments: of the evaluator: the profile's, and over them the submission's.
        revision: a digest of what else of the profile can change a number; empty where an earlier
            version measured, which did not record it.
        evaluator: its name and version, if its results have them.
        basis: the revision without the profile's own arguments, which `arguments` has.
    """

    arguments: Mapping[str, object] = field(default_factory=dict)
    revision: str = ""
    evaluator: str | None = None
    basis: str = ""

    @property
    def compared(self) -> dict[str, object]:
        """The arguments that can change a number; what says no changes none."""
        return {
            key: int(one) if isinstance(one, float) and one.is_integer() else one
            for key, one in self.arguments.items()
            if key not in NOT_SETTINGS and one is not False
        }

    @property
    def id(self) -> str:
        """What is equal for numbers that can be compared."""
        parts = json.dumps([self.compared, self.basis or self.revision], sort_keys=True)
        return hashlib.sha256(parts.encode()).hexdigest()[:12]
