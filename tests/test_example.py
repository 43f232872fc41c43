"""The checkpoint that ships with the project: a real Qwen2 on four ranks, for transformers."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import unshard
from ranks import merged

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("example") / "merged"
    unshard.merge(EXAMPLES / "checkpoint", path)
    return path


def test_every_tensor_equals_the_unsharded_model(output: Path) -> None:
    script = [sys.executable, str(EXAMPLES / "check_result.py"), str(output)]
    done = subprocess.run(
        [*script, str(EXAMPLES / "expected.json")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "51 of 51 tensors" in done.stdout


def test_the_check_of_the_demonstration_can_fail(output: Path, tmp_path: Path) -> None:
    truth = json.loads((EXAMPLES / "expected.json").read_text())
    truth["lm_head.weight"]["sha256"] = "0" * 64
    (tmp_path / "wrong.json").write_text(json.dumps(truth))
    script = [sys.executable, str(EXAMPLES / "check_result.py"), str(output)]
    done = subprocess.run(
        [*script, str(tmp_path / "wrong.json")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "lm_head.weight: expected" in done.stdout


@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_it_and_gives_the_same_logits(output: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(output, dtype="auto")
    assert model.dtype == torch.float32
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3, 4, 5]])).logits
    expected = np.load(EXAMPLES / "expected_logits.npy")  # of another process, maybe another CPU
    np.testing.assert_allclose(logits.numpy(), expected, rtol=0, atol=1e-5)


def test_the_tokenizer_loads_with_its_chat_template(output: Path) -> None:
    from transformers import AutoTokenizer

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer = AutoTokenizer.from_pretrained(output)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert "hello" in text


def test_its_bfloat16_merge_is_what_torch_casts_it_to(output: Path, tmp_path: Path) -> None:
    unshard.merge(EXAMPLES / "checkpoint", tmp_path / "out", dtype="config")
    cast = merged(tmp_path / "out")
    for name, tensor in merged(output).items():
        assert torch.equal(cast[name], tensor.bfloat16()), name
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
