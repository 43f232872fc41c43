"""Run attacks in guarded processes, and judge what became of them."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from damage import MEBIBYTES
from hostile.attacks import HOSTS, Attack
from hostile.guard import CHECKPOINT, Outcome
from oracle.writers.samples import Sample
from ranks import assert_same, merged

__all__ = ["run_attacks"]

_TESTS = Path(__file__).parents[1]
_BATCH = 200  # whose files are on the disk together


def run_attacks(
    attacks: Sequence[Attack], samples: Mapping[str, Sample], scratch: Path
) -> Iterator[tuple[int, list[str]]]:
    """Run every command on every attack; yield of each batch how many ran, and what went wrong."""
    for start in range(0, len(attacks), _BATCH):
        batch = {f"case-{n}": one for n, one in enumerate(attacks[start : start + _BATCH])}
        outcomes, problems = _run_batch(batch, samples, scratch / "batch")
        for outcome in outcomes:
            attack = batch[outcome.case]
            made = scratch / "batch" / outcome.case / "out" / outcome.command
            for problem in _judged(outcome, attack, samples[attack.host], made):
                problems.append(f"{attack.name}: {outcome.command}: {problem}")
        shutil.rmtree(scratch / "batch")
        yield len(outcomes), problems


def _run_batch(
    batch: Mapping[str, Attack], samples: Mapping[str, Sample], scratch: Path
) -> tuple[list[Outcome], list[str]]:
    model = samples["one safetensors"].directory / "model.safetensors"
    places = []
    for host in (*HOSTS, "refused"):
        place = _prepared(scratch / host, model)
        if host != "refused":
            shutil.copytree(samples[host].directory, place / CHECKPOINT)
        places.append(place)
    for name, attack in batch.items():
        place = _prepared(scratch / name, model)
        attack.make(samples[attack.host].directory, place / CHECKPOINT)
        places.append(place)
    results = scratch / "results"
    paths = os.pathsep.join([str(_TESTS), *filter(None, sys.path)])
    child = subprocess.run(
        [
            sys.executable,
            "-m",
            "hostile.guard",
            str(results),
            str(len(HOSTS) + 1),
            *map(str, places),
        ],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    begun = [batch[Path(line["begun"]).name].name for line in lines if "begun" in line]
    died = []
    if child.returncode != 0 or len(begun) != len(batch):
        died.append(f"{begun[-1:]}: the process ended: {child.returncode} {child.stderr[-1000:]}")
    return [Outcome(**line) for line in lines if "begun" not in line], died


def _prepared(place: Path, model: Path) -> Path:
    (place / "model").mkdir(parents=True)
    (place / CHECKPOINT).parent.mkdir()
    shutil.copy(model, place / "model")
    return place


def _judged(outcome: Outcome, attack: Attack, sample: Sample, made: Path) -> list[str]:
    problems = [f"did this: {what}" for what in outcome.caught]
    message = outcome.message
    if "Traceback" in message:
        problems.append(message[-1000:])
    elif outcome.code not in (0, 1) and "error: " not in message:
        problems.append(f"ended with {outcome.code} and without an error: {message[-300:]}")
    if outcome.grown > MEBIBYTES << 20:
        problems.append(f"took {outcome.grown >> 20} MiB")
    if outcome.command != "merge":
        return problems
    if outcome.code == 0 and attack.on_code:
        problems.append("was merged")
    elif outcome.code == 0:
        try:
            assert_same(merged(made), sample.truth)
        except AssertionError as error:
            problems.append(f"was merged into something else: {error}")
    elif outcome.made:
        problems.append("left an output")
    return problems
