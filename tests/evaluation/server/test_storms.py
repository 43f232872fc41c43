"""A short storm; `make torture-eval` has long ones."""

from pathlib import Path

import pytest

from evaluation.storms import Storm, rage

pytestmark = pytest.mark.slow


def test_nothing_is_lost_in_a_storm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    few = Storm(jobs=8, clients=4, restarts=2, followers=2, silent=4, locks=1, seed=1)
    happened = rage(tmp_path, few)
    assert "8 jobs of 4 clients" in happened
    assert "1 SIGKILL, 1 SIGTERM, 1 full, 1 locked" in happened
