"""Checkpoints with torchao's subclasses of Tensor, which torchao 0.18 wrote (tests/data/README.md).

Those of training wrap the weight; those of quantised models pack it into several tensors.
"""

import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.testing._internal.two_tensor import TwoTensor

import unshard
from ranks import assert_same, merged, save_ranks
from unshard import CheckpointError, NotMergeableError
from unshard.containers.pickles.records import Global, Record
from unshard.read.torch_save.values import TYPED, TensorFormError, read_view

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

ARCHIVE = Path(__file__).parent.parent / "data" / "torchao.tar.xz"
TRAINED = ("bf16_int8_mixed", "float8_experts", "float8_linear", "mxfp8_experts")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("torchao")
    with tarfile.open(ARCHIVE) as opened:
        opened.extractall(directory, filter="data")
    return directory / "torchao"


@pytest.mark.parametrize("stored", ["ranks", "dcp"])
@pytest.mark.parametrize("case", TRAINED)
def test_weights_of_training_are_read_as_they_are(
    written: Path, tmp_path: Path, case: str, stored: str
) -> None:
    unshard.merge(written / case / stored, tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), load_file(written / case / "truth.safetensors"))


@pytest.mark.parametrize("to", ["verl", "dcp"])
@pytest.mark.parametrize("stored", ["ranks", "dcp"])
def test_they_are_resharded(written: Path, tmp_path: Path, stored: str, to: str) -> None:
    case = written / "float8_experts"
    unshard.reshard(case / stored, tmp_path / "again", world_size=2, to=to)
    unshard.merge(tmp_path / "again", tmp_path / "out", config="none")
    assert_same(merged(tmp_path / "out"), load_file(case / "truth.safetensors"))


@pytest.mark.parametrize(
    "file", ["NF4Tensor.pt", "Int8Tensor.pt", "Float8Tensor.pt", "Float8Tensor.dcp"]
)
def test_packed_weights_are_refused_with_advice_that_helps(
    written: Path, tmp_path: Path, file: str
) -> None:
    kind = {"NF4Tensor": "quantization.quantize_.workflows.nf4.nf4_tensor.NF4Tensor"}
    name = f"torchao.{kind.get(Path(file).stem, f'quantization.{Path(file).stem}')}"
    for allowed in ([], [name]):
        with pytest.raises(CheckpointError, match=f"{name}[^\n]*: dequantise it and save") as error:
            unshard.merge(written / "packed" / file, tmp_path / "out", allow_globals=allowed)
        assert "allow" not in str(error.value)


def test_any_packed_subclass_is_refused_so(tmp_path: Path) -> None:
    pair: torch.Tensor = TwoTensor(torch.ones(2), torch.ones(2))  # type: ignore[no-untyped-call]
    directory = save_ranks(tmp_path / "ckpt", {}, 1, plain=[{"w": pair}])
    with pytest.raises(NotMergeableError, match=r"TwoTensor, packed into other tensors"):
        unshard.merge(directory, tmp_path / "out")


def wrapping(name: str) -> Record:
    """Return what a pickle says of a tensor that wraps itself."""
    module, _, kind = name.rpartition(".")
    state: dict[str, object] = {}
    rebuild = Global("torch._utils", "_rebuild_wrapper_subclass")
    torch_module, _, function = TYPED.rpartition(".")
    args = (rebuild, Global(module, kind), (), state)
    record = Record(Global(torch_module, function), args)
    state["_data"] = record
    return record


def test_a_wrapper_inside_itself_is_an_error() -> None:
    name = "torchao.prototype.moe_training.tensor.Float8TrainingWeightWrapperTensor"
    with pytest.raises(TensorFormError, match="wrapped too often"):
        read_view(wrapping(name))


@pytest.mark.parametrize(
    "name",
    ["other.tensor.Float8TrainingWeightWrapperTensor", "torchao.float8.Float8TrainingTensor"],
)
def test_other_classes_are_not_read_as_wrappers(name: str) -> None:
    with pytest.raises(TensorFormError, match=f"of type {name}"):
        read_view(wrapping(name))
