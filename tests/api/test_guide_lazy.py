"""The code in the guide to lazy reading, and in the README, runs as it is written."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM

import unshard
from ranks import save_ranks
from tiny_models import logits, tiny_model

ROOT = Path(__file__).parent.parent.parent
GUIDE = ROOT / "docs" / "guides" / "lazy.md"


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def place(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A directory that holds `checkpoint-1000`, and the model it was saved from."""
    made = tiny_model(tie_word_embeddings=request.param)
    save_ranks(tmp_path / "checkpoint-1000", made.state_dict(), 2)
    made.save_pretrained(tmp_path / "saved")
    shutil.copy(tmp_path / "saved" / "config.json", tmp_path / "checkpoint-1000")
    return tmp_path


def executed(code: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(place)
    names: dict[str, Any] = {}
    exec(compile(code, str(GUIDE), "exec"), names)  # noqa: S102 (it is our own page)
    return names


def test_the_guides_models_are_those_that_transformers_loads(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = [code for code in blocks(GUIDE) if "load_into" in code]
    assert len(codes) == 2
    on_meta = executed(codes[0], place, monkeypatch)
    assert on_meta["loaded"] == unshard.Loaded((), (), ())
    unshard.merge(place / "checkpoint-1000", place / "merged")
    for dtype, code in ((torch.float32, codes[0]), (torch.bfloat16, codes[1])):
        ours = executed(code, place, monkeypatch)["model"]
        theirs = Qwen2ForCausalLM.from_pretrained(place / "merged", dtype=dtype)
        assert ours.dtype == dtype
        assert torch.equal(logits(ours), logits(theirs))
        tied = theirs.config.tie_word_embeddings
        assert (ours.lm_head.weight is ours.model.embed_tokens.weight) is tied


def test_the_guides_other_code_runs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, *_ = blocks(GUIDE)
    found = executed(first, place, monkeypatch)
    state = executed(second, place, monkeypatch)["state"]
    head = state["lm_head.weight"].numpy()
    assert (found["rows"] == head[0:16]).all()
    assert (found["some"] == head[::-1000, ..., :8]).all()
    assert found["norm"].shape == (16,)


def test_every_block_of_the_guide_is_one_of_these() -> None:
    assert len(blocks(GUIDE)) == 4
