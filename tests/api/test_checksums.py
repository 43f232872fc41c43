"""`unshard.checksums`, `merge(checksums=True)` and `verify --checksums`, against hashlib."""

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import Shard

import unshard
from adapters import adapted
from bucket_server import BUCKET, serving
from ranks import bits, made, merged, save_ranks, some_tensors
from tiny_models import tiny_config, tiny_model
from unshard.cli.main import main

pytestmark = pytest.mark.filterwarnings("ignore::unshard.UnshardWarning")

MODEL = "qwen3_moe"


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Hash tensors as vLLM's weight checker does."""
    return {name: hashlib.sha256(bits(one)).hexdigest() for name, one in tensors.items()}


def run(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    with pytest.raises(SystemExit) as end:
        main(list(map(str, arguments)))
    assert end.value.code == code
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def model() -> dict[str, torch.Tensor]:
    return dict(tiny_model(MODEL).state_dict())


@pytest.fixture
def checkpoint(tmp_path: Path, model: dict[str, torch.Tensor]) -> Path:
    place = save_ranks(tmp_path / "global_step_4" / "actor", model, 2)
    tiny_config(MODEL).save_pretrained(place)
    return place


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantize": "fp8-block"}])
def test_they_are_those_of_the_tensors_that_merge_writes(
    checkpoint: Path, tmp_path: Path, options: dict[str, str]
) -> None:
    found = unshard.checksums(checkpoint, **options)  # type: ignore[arg-type]
    unshard.merge(checkpoint, tmp_path / "out", **options)  # type: ignore[arg-type]
    assert found == digests(merged(tmp_path / "out"))
    assert any("experts.0." in name for name in found)
    again = unshard.checksums(tmp_path / "out")
    assert list(again.items()) == list(found.items())  # in the same order


def test_fused_adapters_are_hashed_as_merge_writes_them(tmp_path: Path) -> None:
    adapted(tmp_path / "run")
    unshard.merge(tmp_path / "run", tmp_path / "out", allow_missing=True)
    found = unshard.checksums(tmp_path / "run", allow_missing=True)
    assert found == digests(merged(tmp_path / "out"))


def test_layouts_workers_and_memory_do_not_change_them(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    tensors = {
        "wide": torch.randn(4, 600_000, generator=generator),
        "tall": torch.randn(30_000, 66, generator=generator),
        "none": torch.zeros(0, 3),
        "one": torch.tensor(3.0),
    }
    cut = {name: one for name, one in tensors.items() if one.ndim == 2 and one.numel()}
    rest = {name: one for name, one in tensors.items() if name not in cut}
    rows = save_ranks(tmp_path / "rows", tensors, 3)
    columns = save_ranks(tmp_path / "columns", cut, 2, placements=[Shard(1)], extra=rest)
    expected = digests(tensors)
    assert unshard.checksums(rows) == expected
    assert unshard.checksums(columns, workers=1) == expected
    assert unshard.checksums(columns, workers=4, memory="1MB") == expected


def test_the_record_has_them_on_request_and_nothing_else_changes(
    checkpoint: Path, tmp_path: Path
) -> None:
    unshard.merge(checkpoint, tmp_path / "plain")
    unshard.merge(checkpoint, tmp_path / "out", checksums=True)
    record = json.loads((tmp_path / "out" / "unshard.json").read_text())
    assert record["checksums"] == digests(merged(tmp_path / "out"))
    plain, more = made(tmp_path / "plain"), made(tmp_path / "out")
    assert "checksums" not in json.loads(plain["unshard.json"])
    del plain["unshard.json"], more["unshard.json"]
    assert plain == more
    assert unshard.verify(tmp_path / "out", checkpoint).equal
    unshard.merge(checkpoint, tmp_path / "out", overwrite=True)  # the record is still one


def test_the_record_of_an_output_in_a_bucket_has_them(checkpoint: Path) -> None:
    with serving():
        target = f"s3://{BUCKET}/out"
        unshard.merge(checkpoint, target, checksums=True, dtype="bfloat16")
        assert unshard.verify(target, checksums=f"{target}/unshard.json").equal
        expected = unshard.checksums(checkpoint, dtype="bfloat16")
        assert unshard.checksums(target) == expected


def test_an_output_is_verified_by_lines_json_and_its_record(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, lines, answer = tmp_path / "out", tmp_path / "sums.txt", tmp_path / "sums.json"
    unshard.merge(checkpoint, out, checksums=True)
    lines.write_text(run(capsys, "checksums", checkpoint))
    answer.write_text(run(capsys, "checksums", checkpoint, "--json"))
    first = lines.read_text().splitlines()[0]
    assert first == f"{digests(merged(out))[first[66:]]}  {first[66:]}"
    assert json.loads(answer.read_text()) == {"checksums": digests(merged(out))}
    count = len(merged(out))
    upper = (f"{one[:64].upper()}{one[64:]}\n" for one in lines.read_text().splitlines())
    others, pipe = tmp_path / "others.txt", tmp_path / "pipe"
    others.write_text(f"\ufeff# of step 4\n\n{''.join(upper)}", "utf-8")
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(answer.read_bytes()))
    writer.start()
    for file in (lines, answer, out / "unshard.json", others, pipe):
        printed = run(capsys, "verify", out, "--checksums", file)
        assert printed.splitlines() == [
            f"compared    {count} tensors, bit by bit",
            f"equal       {count}",
            "different   0",
            "the models are the same",
        ]
    writer.join()


def test_what_differs_is_named(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    unshard.merge(checkpoint, out)
    sums = unshard.checksums(checkpoint)
    weights = out / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    names = sorted(sums)
    sums["model.other"] = sums.pop(names[0])
    (tmp_path / "sums.json").write_text(json.dumps({"checksums": sums}))
    printed = run(*(capsys, "verify", out, "--checksums", tmp_path / "sums.json", "--json"), code=1)
    found = json.loads(printed)
    assert (found["equal"], found["compared"], found["different"]) == (False, len(sums) - 1, 1)
    assert (found["missing"], found["unexpected"]) == (["model.other"], [names[0]])
    printed = run(*(capsys, "verify", out, "--checksums", tmp_path / "sums.json"), code=1)
    assert "different   1\n  " in printed
    assert ": another checksum\n" in printed
    assert printed.endswith("the models are not the same\n")


def test_names_of_training_are_those_of_the_record(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    unshard.merge(checkpoint, out, names="training", checksums=True)
    found = unshard.verify(out, checksums=out / "unshard.json")
    assert found.equal
    assert len(found.tensors) == len(merged(out))
    assert unshard.checksums(checkpoint, names="training") == digests(merged(out))


def answer_of(tensors: Mapping[str, torch.Tensor], ranks: str) -> dict[str, str]:
    """Return what vLLM's weight checker answers: ranks before names, projections that are one."""
    held = dict(tensors)
    for name in tensors:
        if ".q_proj." in name:
            parts = [held.pop(name.replace("q_proj", f"{one}_proj")) for one in "qkv"]
            held[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif ".gate_proj." in name:
            parts = [held.pop(name.replace("gate_proj", f"{one}_proj")) for one in ("gate", "up")]
            held[name.replace("gate_proj", "gate_up_proj")] = torch.cat(parts)
    return {f"{ranks}{name}": digest for name, digest in digests(held).items()}


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}])
def test_the_answer_of_an_engine_is_compared(tmp_path: Path, options: dict[str, str]) -> None:
    tensors = dict(tiny_model("qwen2").state_dict())
    place = save_ranks(tmp_path / "run", tensors, 2)
    tiny_config("qwen2").save_pretrained(place)
    unshard.merge(place, tmp_path / "out", **options)  # type: ignore[arg-type]
    answer = answer_of(merged(tmp_path / "out"), "dp0:pp0:pcp0:tp0:ep0:")
    answer |= {name.replace("dp0", "dp1"): digest for name, digest in answer.items()}
    file = tmp_path / "answer.json"
    file.write_text(json.dumps({"checksums": answer}))
    found = unshard.verify(tmp_path / "out", checksums=file)
    assert found.equal, found
    assert len(found.tensors) == len(answer) // 2
    key = next(name for name in answer if "qkv_proj.weight" in name)
    answer[key] = answer[key.replace("dp0", "dp1")] = "0" * 64
    file.write_text(json.dumps({"checksums": answer}))
    (wrong,) = unshard.verify(tmp_path / "out", checksums=file).different
    assert wrong.name == key.removeprefix("dp0:pp0:pcp0:tp0:ep0:")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"has no checksums"),
        (f"{'0' * 64}  a\nhello\n", r"line 2: is not a checksum"),
        ('{"sums": {}}', r"has no checksums"),
        ('{"checksums": {}}', r"has no checksums"),
        ('{"checksums": {"w": 3}}', r"line 1: is not a checksum"),
        (json.dumps({"checksums": {"dp0:pp0:pcp0:tp1:ep0:w": "0" * 64}}), "a part of a tensor"),
        (
            json.dumps({"checksums": {f"dp{n}:pp0:tp0:ep0:w": f"{n}" * 64 for n in (0, 1)}}),
            "two ranks have different values of w",
        ),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "sums").write_text(text)
    unshard.merge(save_ranks(tmp_path / "run", some_tensors(), 2), tmp_path / "out", config="none")
    with pytest.raises(unshard.UsageError, match=message):
        unshard.verify(tmp_path / "out", checksums=tmp_path / "sums")


def test_options_that_do_not_apply_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of = save_ranks(tmp_path / "run", some_tensors(), 2)
    place = tmp_path / "whole"
    unshard.merge(run_of, place, config="none")
    run(capsys, "verify", place, code=2)
    with pytest.raises(unshard.UsageError, match="excludes against"):
        unshard.verify(place, place, checksums=place)
    run(capsys, "verify", place, "--checksums", place / "none", code=2)
    run(capsys, "verify", place, "--checksums", place, "--atol", "1", code=2)
    with pytest.raises(unshard.UsageError, match="exclude each other"):
        unshard.merge(place, tmp_path / "out", checksums=True, reuse=True, config="none")
