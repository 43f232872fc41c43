"""A run without a chosen name gets one that the server accepts."""

from pathlib import Path

import pytest

from unshard.evaluate.run_folder import RunFolder
from unshard.evaluate.server.admission import _RUN


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("lr=0.1,bs=8", "lr=0.1_bs=8"),
        ("--help", "help"),
        ("=x.", "x"),
        ("...", "run"),
        ("a" * 99 + ".b", "a" * 99),
        ("run/_unshard/pins/0f", "run"),
        ("a b", "a_b"),
        ("exp1/checkpoints", "exp1"),
        ("exp1/checkpoints/_unshard/pins/0f", "exp1"),
    ],
)
def test_a_directorys_name_becomes_one_that_a_run_may_have(folder: str, name: str) -> None:
    assert RunFolder(Path("/runs") / folder).name == name
    assert _RUN.fullmatch(name)
