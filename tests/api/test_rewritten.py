"""A trainer saves its next step over the one that is read: one step comes of it, or an error.

Each save is valid, with checksums of its own, and of the same sizes. What is done to the files is
done by another thread at a moment of chance, from before the first byte is read to after the last.
"""

import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import unshard
from adapters import adapted
from optimizers import like, save_optimizer
from ranks import assert_same, contents, made, save_ranks, some_tensors
from trainers import dcp_under, shards
from unshard.progress import Advanced, Event, Stage, ignore
from unshard.read import open as reading
from unshard.read.hub_files import RECORD_NAME
from unshard.tensors.catalog import Catalog

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

MOMENTS, FEW = 100, 5  # for each of the two levels of `--verify`
STEPS = 2
STATE = "extra_state_world_size_2_rank_{}.pt"

Save = Callable[[Path, int], object]
Make = Callable[[Path, Path, str], object]


def tensors(step: int) -> dict[str, torch.Tensor]:
    """Return the weights of a step: copied by the kernel, in short runs, and whole."""
    generator = torch.Generator().manual_seed(step)
    return {
        f"model.layers.{number}.mlp.up_proj.weight": torch.randn(160, 130, generator=generator)
        for number in range(3)
    } | {"model.norm.weight": torch.randn(130, generator=generator)}


def save_verl(place: Path, step: int) -> None:
    save_ranks(place, tensors(step), 2)
    save_optimizer(place, {"exp_avg": like(tensors(step), step)}, 2)
    for rank in range(2):
        torch.save({"lr_scheduler": {"last_epoch": step}}, place / STATE.format(rank))


def save_dcp(place: Path, step: int) -> None:
    dcp_under("model")(place, tensors(step))


def save_compressed(place: Path, step: int) -> None:
    dcp_under("model", compressed=True)(place, tensors(step))


def save_adapter(place: Path, step: int) -> None:
    adapted(place, alpha=1.0 + step)
    held = {f"base_model.model.{name}": one for name, one in tensors(step).items()}
    pair = {
        f"base_model.model.lm_head.lora_{side}.default.weight": torch.full(shape, 1.0 + step)
        for side, shape in (("A", (2, 130)), ("B", (160, 2)))
    }
    base = {"base_model.model.lm_head.base_layer.weight": tensors(step + 7)[next(iter(tensors(0)))]}
    save_ranks(place, held | base | pair, 2)


def by_rename(new: Path, old: Path) -> None:
    """Replace each file in one step, as a trainer that writes a draft first."""
    for path in sorted(new.iterdir()):
        draft = old / f".{path.name}.draft"
        shutil.copyfile(path, draft)
        draft.replace(old / path.name)


def in_place(new: Path, old: Path) -> None:
    """Write over the bytes of each file."""
    for path in sorted(new.iterdir()):
        with (old / path.name).open("r+b") as file:
            file.write(path.read_bytes())
            file.truncate()


def with_old_times(new: Path, old: Path) -> None:
    """Write over the bytes of each file and give it its time back, as rsync --times can."""
    times = {path.name: (old / path.name).stat() for path in new.iterdir()}
    in_place(new, old)
    for name, status in times.items():
        os.utime(old / name, ns=(status.st_atime_ns, status.st_mtime_ns))


WAYS = (by_rename, in_place, with_old_times)


def merging(**options: object) -> Make:
    def make(source: Path, output: Path, verify: str) -> object:
        options.setdefault("config", "none")
        return unshard.merge(source, output, verify=verify, listener=ignore, **options)  # type: ignore[arg-type]

    return make


def average(source: Path, output: Path, verify: str) -> object:
    other = source.parent / "other"
    return unshard.average([source, other], output, verify=verify, listener=ignore, config="none")  # type: ignore[arg-type]


def reshard(source: Path, output: Path, verify: str) -> object:
    return unshard.reshard(source, output, world_size=3, verify=verify, listener=ignore)  # type: ignore[arg-type]


def to_dcp(source: Path, output: Path, verify: str) -> object:
    return unshard.reshard(source, output, world_size=2, to="dcp", verify=verify, listener=ignore)  # type: ignore[arg-type]


MADE: dict[str, tuple[Save, Make]] = {
    "merge": (save_verl, merging()),
    "cast": (save_verl, merging(dtype="bfloat16", extra_state=False)),
    "optimizer": (save_verl, merging(optimizer=True)),
    "average": (save_verl, average),
    "reshard": (save_verl, reshard),
    "reshard to DCP": (save_verl, to_dcp),
    "DCP": (save_dcp, merging()),
    "reshard DCP": (save_dcp, reshard),
    "compressed DCP": (save_compressed, merging()),
    "LoRA": (save_adapter, merging(lora="both")),
    "shards": (lambda place, step: shards(place, tensors(step)), merging()),
}


@pytest.mark.parametrize("moments", [FEW, pytest.param(MOMENTS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("verify", ["light", "full"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MADE)
def test_a_rewritten_checkpoint_gives_one_step_or_an_error(
    tmp_path: Path, name: str, way: Callable[[Path, Path], None], verify: str, moments: int
) -> None:
    save, make = MADE[name]
    steps, output = [tmp_path / f"step_{number}" for number in range(STEPS)], tmp_path / "out"
    for number, place in enumerate((*steps, tmp_path / "other")):
        save(place, number)
    source, truth, took = tmp_path / "latest", [], 0.0
    for place in steps:
        shutil.copytree(place, source, dirs_exist_ok=True)
        begun = time.monotonic()
        make(source, output, verify)
        took = max(took, time.monotonic() - begun)
        truth.append(made(output))
        shutil.rmtree(output)
    assert truth[0] != truth[1]
    names = {path.name for path in tmp_path.iterdir()}
    chance, outcomes = random.Random(f"{name} {way.__name__} {verify}"), set()
    for _ in range(moments):
        shutil.rmtree(source)
        shutil.copytree(steps[0], source)
        writer = threading.Timer(chance.uniform(0, took), way, (steps[1], source))
        writer.start()
        try:
            make(source, output, verify)
        except unshard.CheckpointError as error:
            outcomes.add(str(error).splitlines()[0].rpartition(": ")[2])
        else:
            outcomes.add(f"step {truth.index(made(output))}")
            shutil.rmtree(output)
        writer.join()
        assert {path.name for path in tmp_path.iterdir()} == names
    if way is by_rename and "compressed" not in name:  # else a header may be torn, too
        assert outcomes <= {"step 0", "step 1", "has changed while it was being read"}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_read_on_demand_is_of_the_step_that_was_opened(
    tmp_path: Path, way: Callable[[Path, Path], None]
) -> None:
    for step in range(STEPS):
        save_verl(tmp_path / str(step), step)
    names = list(tensors(0))
    for count in range(len(names) + 1):
        source = tmp_path / f"latest-{count}"
        shutil.copytree(tmp_path / "0", source)
        with unshard.open_checkpoint(source, framework="pt") as opened:
            found = {name: opened[name] for name in names[:count]}
            way(tmp_path / "1", source)
            with suppress(unshard.CorruptError):
                for name in names[count:]:
                    found[name] = opened[name]
            assert_same(found, {name: tensors(0)[name] for name in found})
            assert len(found) >= count


def empty_model() -> torch.nn.Module:
    """Return a model whose parameters have the names of `tensors`."""
    model = torch.nn.Module()
    for name, values in tensors(0).items():
        *folders, last = name.split(".")
        inner = model
        for folder in folders:
            if folder not in dict(inner.named_children()):
                inner.add_module(folder, torch.nn.Module())
            inner = inner.get_submodule(folder)
        inner.register_parameter(last, torch.nn.Parameter(torch.empty_like(values)))
    return model


def read_virtual(source: Path, _: Path) -> None:
    with unshard.virtual(source, listener=ignore, config="none") as files:
        try:
            files["model.safetensors"].read()
        except unshard.CorruptError:
            files.check_sources()  # says the same
            raise AssertionError from None


READ: dict[str, Callable[[Path, Path], object]] = {
    "virtual": read_virtual,
    "load_state_dict": lambda source, _: unshard.load_state_dict(source),
    "load_into": lambda source, _: unshard.load_into(empty_model(), source),
    "verify": lambda source, model: unshard.verify(model, source, listener=ignore),
    "base": lambda source, model: unshard.merge(
        source.with_name("0"), model.with_name("out"), base=model, listener=ignore, config="none"
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", READ)
def test_all_that_reads_weights_notices_that_they_are_no_longer_what_was_opened(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    way: Callable[[Path, Path], None],
) -> None:
    """The files are rewritten when headers were read, and no weights."""
    source, model, checked = tmp_path / "latest", tmp_path / "model", reading.check_coverage
    for step in range(STEPS):
        save_verl(tmp_path / str(step), step)
        unshard.merge(
            tmp_path / str(step), tmp_path / f"model_{step}", listener=ignore, config="none"
        )
    shutil.copytree(tmp_path / "0", source)
    shutil.copytree(tmp_path / "model_0", model)

    def rewrite(catalog: Catalog) -> None:
        checked(catalog)
        way(tmp_path / "1", source)
        way(tmp_path / "model_1", model)

    monkeypatch.setattr(reading, "check_coverage", rewrite)
    with pytest.raises(unshard.CorruptError, match="has changed while it was being read"):
        READ[name](source, model)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("way", WAYS)
def test_what_is_finished_of_half_of_two_steps_is_not_resumed(
    tmp_path: Path, way: Callable[[Path, Path], None]
) -> None:
    for step in range(STEPS):
        save_verl(tmp_path / str(step), step)
    source, out = tmp_path / "latest", tmp_path / "out"
    shutil.copytree(tmp_path / "0", source)
    begun: list[Event] = []

    def rewrite(event: Event) -> None:
        if isinstance(event, Advanced) and not begun:
            begun.append(event)
            way(tmp_path / "1", source)

    with pytest.raises(unshard.CorruptError, match="has changed") as caught:
        unshard.merge(
            source,
            out,
            resume=True,
            max_shard_size=90_000,
            workers=1,
            listener=rewrite,
            config="none",
        )
    assert "resume" not in str(caught.value)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1", "latest"}
    unshard.merge(source, out, resume=True, max_shard_size=90_000, listener=ignore, config="none")
    unshard.merge(
        tmp_path / "1", tmp_path / "true", max_shard_size=90_000, listener=ignore, config="none"
    )
    found, truth = contents(out), contents(tmp_path / "true")
    assert found | {RECORD_NAME: b""} == truth | {RECORD_NAME: b""}


def test_a_companion_that_is_removed_meanwhile_is_named(tmp_path: Path) -> None:
    source = tmp_path / "source"
    adapted(source)

    def remove(event: Event) -> None:
        if isinstance(event, Stage) and event.name == "writing":
            (source / "tokenizer.json").unlink()

    with pytest.raises(unshard.CorruptError, match=r"tokenizer\.json: no longer exists"):
        unshard.merge(source, tmp_path / "out", listener=remove, config="none")
    assert list(tmp_path.iterdir()) == [source]


def test_a_base_that_is_replaced_is_noticed_on_demand(tmp_path: Path) -> None:
    adapted(tmp_path / "trained")
    base = {name: torch.ones_like(one) for name, one in some_tensors().items()}
    for number, place in enumerate((tmp_path / "base", tmp_path / "next")):
        place.mkdir()
        (place / "config.json").write_text('{"model_type": "llama"}')
        for name, one in base.items():
            save_file({name: one + number}, place / f"{name}.safetensors", {"format": "pt"})
        index = {"weight_map": {name: f"{name}.safetensors" for name in base}}
        (place / "model.safetensors.index.json").write_text(json.dumps(index))
    trained = unshard.load_state_dict(tmp_path / "trained")
    save_ranks(tmp_path / "adapter", {n: one for n, one in trained.items() if "lora_" in n}, 2)
    shutil.copy(tmp_path / "trained" / "lora_train_meta.json", tmp_path / "adapter")
    with unshard.open_checkpoint(
        tmp_path / "adapter", base=tmp_path / "base", names="hub"
    ) as opened:
        names = list(opened)
        assert opened["model.norm.weight"].max() == 1
        by_rename(tmp_path / "next", tmp_path / "base")
        with pytest.raises(unshard.CorruptError, match="has changed while it was being read"):
            for name in names:
                _ = opened[name]


def test_files_that_are_closed_within_a_loan_are_compared(tmp_path: Path) -> None:
    """More of them than are kept open; one is written to while it is open."""
    ranks, rows = 72, torch.arange(72.0).reshape(72, 1)
    source = save_ranks(tmp_path / "source", {"s": rows.expand(72, 8).contiguous()}, ranks)
    other = save_ranks(tmp_path / "other", {"s": rows.expand(72, 8).contiguous() + 100}, ranks)
    with unshard.open_checkpoint(source) as opened:
        assert opened.get_slice("s")[8:40].max() == 39
        name = f"model_world_size_{ranks}_rank_8.pt"
        (source / name).write_bytes((other / name).read_bytes())
        with pytest.raises(unshard.CorruptError, match="has changed while it was being read"):
            opened.get_slice("s")[8:72]
