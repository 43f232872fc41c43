"""Which GPUs a text or this process's environment means."""

from pathlib import Path

import pytest

from unshard.errors import UsageError
from unshard.evaluate.server.gpus import find_gpus, parse_gpus
from unshard.evaluate.server.server_yaml import read_server_yaml

MIG = "MIG-3f1bd0c0-7a4b-5d1e-9c2f-0a1b2c3d4e5f"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", ()),
        ("2", ("0", "1")),
        ("3,", ("3",)),
        ("0,1", ("0", "1")),
        (" 2, 1, 02 ", ("2", "1")),
        ("1,2,", ("1", "2")),
        ("GPU-8f3a", ("GPU-8f3a",)),
        (f"{MIG}, GPU-8f3a,", (MIG, "GPU-8f3a")),
        ("MIG-GPU-8f3a/1/0", ("MIG-GPU-8f3a/1/0",)),
    ],
)
def test_gpus_that_are_given(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: tuple[str, ...]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert parse_gpus(text) == expected


@pytest.mark.parametrize(
    "text", ["", ",", "1,,2", "1,2,,", "2-3", "-1", "all", "\u0663", "GPU-", "GPU 0", "1,x"]
)
def test_what_means_no_gpus(text: str) -> None:
    with pytest.raises(UsageError, match="--gpus"):
        parse_gpus(text)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("0", ("0",)),
        ("2, 1", ("2", "1")),
        ("0,", ("0",)),
        (f"{MIG},GPU-8f3a", (MIG, "GPU-8f3a")),
    ],
)
def test_gpus_that_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch, visible: str, expected: tuple[str, ...]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert find_gpus() == expected


def test_a_number_of_gpus_means_those_that_this_process_may_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,GPU-8f3a,5")
    assert parse_gpus("2") == ("6", "GPU-8f3a")
    assert parse_gpus("0") == ()
    assert parse_gpus("0,1") == ("0", "1")
    (tmp_path / "server.yaml").write_text("gpus: 2")
    assert read_server_yaml(tmp_path / "server.yaml").gpus == ("6", "GPU-8f3a")
    (tmp_path / "server.yaml").write_text(f"gpus: [1, {MIG}]")
    assert read_server_yaml(tmp_path / "server.yaml").gpus == ("1", MIG)
    with pytest.raises(UsageError, match="--gpus 4: more than this process may use"):
        parse_gpus("4")


@pytest.mark.parametrize("visible", ["0,-1", "1,x", "GPU:8f3a"])
def test_names_that_are_not_those_of_gpus(monkeypatch: pytest.MonkeyPatch, visible: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(UsageError, match="CUDA_VISIBLE_DEVICES") as caught:
        find_gpus()
    assert "--gpus" in caught.value.hint
