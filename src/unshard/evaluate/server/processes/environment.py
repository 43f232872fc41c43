"""The environment of an evaluator: the server's own, without what is not meant for it."""

import os
import re
import sys
from collections.abc import Mapping

__all__ = ["MARK", "evaluator_environment", "scrubbed"]

MARK = "UNSHARD_ATTEMPT"
"""Names the attempt's directory in every process of it, so that they can be found again."""

# What launchers (torchrun, accelerate, Slurm, MPI) tell their own processes: an evaluator that
# started from one of them would wait for the others.
_LAUNCHER = re.compile(
    r"(?:RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE)"
    r"|(?:MASTER_|GROUP_|ROLE_|TORCHELASTIC_|SLURM_|PMIX_|PMI_|OMPI_|NCCL_ASYNC|ACCELERATE_).*"
)
# What this interpreter finds, another one should not.
_PYTHON = frozenset({"PYTHONHOME", "PYTHONPATH"})
# A URL in UNSHARD_EVAL_SERVER may contain a password.
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|KEY|CREDENTIAL|^UNSHARD_EVAL_SERVER$", re.IGNORECASE)


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without launchers' variables and secrets."""
    return {
        name: value
        for name, value in environment.items()
        if not _LAUNCHER.fullmatch(name) and not _SECRET.search(name)
    }


def evaluator_environment(
    own: Mapping[str, str], *, program: str, gpus: tuple[str, ...], directory: str
) -> dict[str, str]:
    """Return the environment of an evaluator.

    Args:
        own: what its profile sets; wins over the server's, secrets included.
        program: what is started: only this interpreter gets what tells it where its modules are.
        gpus: all that it can see, whatever its profile sets; none: it sees no GPU.
        directory: of the attempt.
    """
    found = scrubbed(os.environ)
    if program != sys.executable:
        found = {name: value for name, value in found.items() if name not in _PYTHON}
    return found | dict(own) | {"CUDA_VISIBLE_DEVICES": ",".join(gpus), MARK: directory}
