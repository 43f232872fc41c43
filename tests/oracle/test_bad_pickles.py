"""Pickles that were made to harm: they run commands, or describe tensors that cannot be."""

import builtins
import os
import pickle
import shutil
from collections import OrderedDict
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from damage import assert_refused, bomb, cycle, judge
from hostile.dcp import put_item
from oracle.writers.samples import Samples
from ranks import as_rank, rank_path, save_ranks, some_tensors
from unshard import CorruptError, UnsafeError, UnshardError

pytestmark = pytest.mark.xdist_group("torch processes")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "output" / "merged"


class Call:
    """Pickled as a call of a function."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function = function
        self.args = args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.function, self.args


def evils(mark: Path) -> dict[str, bytes]:
    """Return pickles that leave a mark when they are loaded."""
    command = Call(os.system, f"touch {mark}")
    text = Call(builtins.eval, f"open({str(mark)!r}, 'w')")
    named = {f"system, {protocol}": pickle.dumps(command, protocol) for protocol in range(6)}
    inside = {"x": [command, torch.float32]}
    return named | {
        "eval": pickle.dumps(text),
        "inside": pickle.dumps(inside),
        "os.system by name": b"cos\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR.",
        "through another module": b"\x80\x04\x8c\x07pathlib\x8c\x09os.system\x93\x8c\x01x\x85R.",
        "after what is wanted": pickle.dumps({})[:-1] + b"0" + pickle.dumps(command)[2:],
    }


def as_zip(data: bytes) -> bytes:
    """Return a torch.save file with this pickle."""
    file = BytesIO()
    writer = torch._C.PyTorchFileWriter(file)
    writer.write_record("data.pkl", data, len(data))
    writer.write_record("byteorder", b"little", 6)
    writer.write_end_of_file()
    return file.getvalue()


PLACES: dict[str, Callable[[Path, bytes], object]] = {
    "rank files": lambda at, evil: rank_path(at, 3, 1).write_bytes(as_zip(evil)),
    "rank files, ShardedTensors": lambda at, evil: rank_path(at, 3, 0).write_bytes(as_zip(evil)),
    "bins": lambda at, evil: (at / "pytorch_model_fsdp_0_rank1.bin").write_bytes(as_zip(evil)),
    "DCP": lambda at, evil: (at / ".metadata").write_bytes(evil),
    "DCP, no collectives": lambda at, evil: (at / "__1.metadata").write_bytes(evil),
    "DCP, many files": lambda at, evil: put_item(at, as_zip(evil)),
    "DCP, Lightning": lambda at, evil: (at / "meta.pt").write_bytes(as_zip(evil)),
    "Megatron": lambda at, evil: (at / "common.pt").write_bytes(as_zip(evil)),
    "pytorch_model.bin": lambda at, evil: (at / "pytorch_model.bin").write_bytes(as_zip(evil)),
}


@pytest.mark.parametrize("name", PLACES)
def test_a_pickle_that_runs_commands_is_refused_and_runs_nothing(
    samples: Samples, tmp_path: Path, out: Path, name: str
) -> None:
    mark = tmp_path / "mark"
    for number, (kind, evil) in enumerate(evils(mark).items()):
        source = tmp_path / f"copy {number}"
        shutil.copytree(samples[name].directory, source)
        PLACES[name](source, evil)
        error = judge(source, None, out)
        assert isinstance(error, UnsafeError), (kind, error)
        assert not mark.exists()


@pytest.mark.parametrize("value", [None, (), ["pytorch-lightning_version"]])
def test_a_file_that_is_not_lightnings_in_the_place_of_its_own_is_refused(
    samples: Samples, tmp_path: Path, out: Path, value: object
) -> None:
    """Only this file says whether a module wrapped the model, so names depend on it."""
    source = shutil.copytree(samples["DCP, Lightning"].directory, tmp_path / "copy")
    torch.save(value, source / "meta.pt")
    assert_refused(source, out, CorruptError, "meta.pt: not what Lightning saves there")


def test_an_object_that_is_not_a_weight_is_not_opened(
    samples: Samples, tmp_path: Path, out: Path
) -> None:
    sample, mark = samples["DCP, optimizer"], tmp_path / "mark"
    shutil.copytree(sample.directory, tmp_path / "copy")
    put_item(tmp_path / "copy", as_zip(evils(mark)["eval"]), "note")
    assert judge(tmp_path / "copy", sample.truth, out) is None
    assert not mark.exists()


LAST: Any = (False, OrderedDict())  # requires_grad, hooks
BIG, HUGE, ENDLESS = 2**62, 2**70, 10**5000


def view(sizes: Any, strides: Any, offset: Any = 0, count: int = 12) -> Call:
    """Return a tensor that says this of itself, over a storage of so many numbers."""
    storage = torch.storage.TypedStorage(  # type: ignore[no-untyped-call]
        wrap_storage=torch.zeros(count).untyped_storage(), dtype=torch.float32, _internal=True
    )
    return Call(torch._utils._rebuild_tensor_v2, storage, offset, sizes, strides, *LAST)


TENSORS: dict[str, Callable[[], Any]] = {
    "larger than its storage": lambda: view((4, 4), (4, 1)),
    "outside its storage": lambda: view((3, 4), (4, 1), 1),
    "before its storage": lambda: view((3, 4), (4, 1), -1),
    "negative sizes": lambda: view((-3, -4), (4, 1)),
    "negative strides": lambda: view((3, 4), (-4, 1), 8),
    "without strides": lambda: view((3, 4), ()),
    "expanded beyond all disks": lambda: view((BIG,), (0,)),
    "expanded beyond all integers": lambda: view((BIG, BIG), (0, 0)),
    "huge": lambda: view((HUGE,), (0,)),
    "huge without elements": lambda: view((0, HUGE), (1, 1)),
    "huge strides": lambda: view((1, 3), (HUGE, 1)),
    "huge strides without elements": lambda: view((0, 3), (HUGE, 1)),
    "huge offset without elements": lambda: view((0, 3), (3, 1), HUGE),
    "negative offset without elements": lambda: view((0, 3), (3, 1), -HUGE),
    "endless": lambda: view((ENDLESS,), (0,)),
    "endless without elements": lambda: view((0, ENDLESS), (1, 1)),
    "endless offset": lambda: view((3, 4), (4, 1), ENDLESS),
    "many dimensions": lambda: view((1,) * 70, (1,) * 70),
    "very many dimensions": lambda: view((1,) * 100_000, (1,) * 100_000),
    "sizes of fractions": lambda: view((3.0, 4.0), (4, 1)),
    "sizes of text": lambda: view("34", (4, 1)),
    "sizes within sizes": lambda: view(cycle(), (4, 1)),
    "sizes without end": lambda: view(bomb(), (4, 1)),
    "another storage": lambda: Call(torch._utils._rebuild_tensor_v2, bomb(), 0, (3,), (1,), *LAST),
    "a dtype without end": lambda: Call(
        torch._utils._rebuild_tensor_v3,
        torch.zeros(12).untyped_storage(),
        0,
        (3,),
        (1,),
        *LAST,
        bomb(),
    ),
    "conjugation without end": lambda: Call(
        torch._utils._rebuild_tensor_v2,
        view((3,), (1,)).args[0],
        0,
        (3,),
        (1,),
        *LAST,
        bomb(),
    ),
    "a type without end": lambda: Call(
        torch._tensor._rebuild_from_type_v2, torch._utils._rebuild_tensor_v2, bomb(), (), {}
    ),
    "a type that is a cycle": lambda: Call(
        torch._tensor._rebuild_from_type_v2, torch._utils._rebuild_tensor_v2, cycle(), (), {}
    ),
    "a parameter of itself": lambda: Call(torch._utils._rebuild_parameter, cycle(), *LAST),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_that_cannot_be_is_refused(tmp_path: Path, out: Path, kind: str) -> None:
    source = tmp_path / "whole"
    source.mkdir()
    state = {"good": torch.ones(2), "bad": TENSORS[kind]()}
    torch.save(state, source / "pytorch_model.bin")
    assert_refused(source, out, UnshardError, "bad")


@pytest.mark.parametrize("kind", TENSORS)
def test_an_item_that_cannot_be_is_refused(
    samples: Samples, tmp_path: Path, out: Path, kind: str
) -> None:
    shutil.copytree(samples["DCP"].directory, tmp_path / "copy")
    file = BytesIO()
    torch.save(TENSORS[kind](), file)
    put_item(tmp_path / "copy", file.getvalue())
    assert_refused(tmp_path / "copy", out, UnshardError)


def lie_about(what: Any, **values: Any) -> Any:
    for name, value in values.items():
        object.__setattr__(what, name, value)
    return what


DTENSORS: dict[str, Callable[[DTensor, DeviceMesh], object]] = {
    "placements without end": lambda x, _: lie_about(x._spec, placements=(bomb(28),)),
    "placements missing": lambda x, _: lie_about(x._spec, placements=()),
    "placements too many": lambda x, _: lie_about(x._spec, placements=(Shard(0), Shard(0))),
    "shard of no dimension": lambda x, _: lie_about(x._spec, placements=(Shard(7),)),
    "shard of a negative dimension": lambda x, _: lie_about(x._spec, placements=(Shard(-1),)),
    "shard of another dimension": lambda x, _: lie_about(x._spec, placements=(Shard(1),)),
    "mesh of itself": lambda x, _: lie_about(x._spec, mesh=cycle()),
    "coordinates outside": lambda _, m: lie_about(m, _coordinate_on_dim=(7,)),
    "coordinates huge": lambda _, m: lie_about(m, _coordinate_on_dim=(HUGE,)),
    "coordinates endless": lambda _, m: lie_about(m, _coordinate_on_dim=(ENDLESS,)),
    "coordinates negative": lambda _, m: lie_about(m, _coordinate_on_dim=(-1,)),
    "coordinates outside a mesh of unsorted ranks": lambda x, _: lie_about(
        x._spec,
        mesh=lie_about(Stub(), mesh=torch.tensor([0, 2, 1]), _coordinate_on_dim=(7,)),
    ),
    "coordinates of another rank": lambda _, m: lie_about(m, _coordinate_on_dim=(0,)),
    "rank of another file": lambda _, m: lie_about(m, _rank=0),
    "names without end": lambda _, m: lie_about(m, _mesh_dim_names=(bomb(28),)),
    "ranks without end": lambda _, m: lie_about(m, _flatten_rank_map=bomb()),
    "ranks huge": lambda _, m: lie_about(m, _flatten_rank_map=(0, 1, HUGE)),
    "layout without end": lambda _, m: lie_about(m, _layout=bomb()),
    "axis huge": lambda _, m: lie_about(m, _layout=layout((BIG,), (1,))),
    "axis long": lambda _, m: lie_about(m, _layout=layout((2**33,), (1,))),
    "axes many": lambda _, m: lie_about(m, _layout=layout((2,) * 40, (1,) * 40)),
    "axis negative": lambda _, m: lie_about(m, _layout=layout((-3,), (1,))),
    "axis endless": lambda _, m: lie_about(m, _layout=layout((3,), (ENDLESS,))),
}


class Stub:
    """Pickled as an object with attributes."""


def layout(shape: tuple[int, ...], stride: tuple[int, ...]) -> Stub:
    axis = lie_about(Stub(), shape=shape, stride=stride)
    return lie_about(Stub(), axes=(axis,), shape=shape, stride=stride)  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", DTENSORS)
def test_a_dtensor_that_cannot_be_is_refused(tmp_path: Path, out: Path, kind: str) -> None:
    source = save_ranks(tmp_path / "ranks", some_tensors(), 3)
    with as_rank(1, 3):
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("fsdp",))
        state = {
            name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)
            for name, tensor in some_tensors().items()
        }
        DTENSORS[kind](state["lm_head.weight"], mesh)
        torch.save(state, rank_path(source, 3, 1))
    judge(source, some_tensors(), out)
