"""A run without a chosen name gets one that the server accepts."""

from pathlib import Path

import pytest

from unshard.evaluate.run_folder import RunFolder
from unshard.evaluate.server.admission import _is_run


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("lr=0.1,bs=8", "lr=0.1_bs=8"),
        ("--help", "help"),
        ("=x.", "x"),
        ("...", "run"),
        ("a" * 99 + ".", "a" * 99),
        ("lr=1e-5..2e-5", "lr=1e-5_2e-5"),
        ("run/_unshard/pins/0f", "run"),
        ("a b", "a_b"),
        ("exp1/checkpoints", "exp1"),
        ("exp1/checkpoints/_unshard/pins/0f", "exp1"),
    ],
)
def test_a_directorys_name_becomes_one_that_a_run_may_have(folder: str, name: str) -> None:
    assert RunFolder(Path("/runs") / folder).name == name
    assert _is_run(name)


@pytest.mark.parametrize("start", ["lr=0.1_" * 15, "\u5b9f\u9a13" * 36])
def test_runs_with_long_names_that_differ_at_their_ends_have_different_names(start: str) -> None:
    names = {RunFolder(Path("/runs") / f"{start}seed{seed}").name for seed in range(3)}
    assert len(names) == 3
    assert all(_is_run(name) and name.startswith(start[:30]) for name in names)
