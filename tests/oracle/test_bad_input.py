"""Damaged files of every format: missing, cut, overgrown, replaced, with single bytes changed."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import pytest

from damage import Findings, Spare, assert_same_bits, change_byte, judge, places_to_flip
from oracle.offsets import looks_whole
from oracle.writers.samples import CHECKED, FORMATS, NAMES_UNGUARDED, Samples, weight_ranges
from ranks import assert_same, merged
from unshard import CheckpointError, UnshardError
from waiting import LIMIT_S

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("torch processes"),
    pytest.mark.filterwarnings("ignore::unshard.UnshardWarning"),
]

FLIPS = 100  # of a byte, in every format; more when hunting
FULL_FLIPS = 30


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "output" / "merged"


@pytest.mark.parametrize("name", FORMATS)
def test_a_missing_file_is_noticed_or_does_not_matter(
    samples: Samples, tmp_path: Path, out: Path, name: str
) -> None:
    sample, findings = samples[name], Findings()
    spare = Spare(sample.directory, tmp_path / "copy")
    for file in spare.files():
        with findings.attempt(file), spare.damaged(file, Path.unlink):
            if is_known_to_be_missing(name, spare.directory):
                expect_checkpoint_error(judge(spare.directory, sample.truth, out))
    findings.tell()


def is_known_to_be_missing(name: str, damaged: Path) -> bool:
    """Return whether what is left knows more: no shard says how many ranks there were.

    Nor does a checkpoint of Lightning say without its meta.pt that a module wrapped the model.
    """
    if name == "DCP, Lightning" and not (damaged / "meta.pt").exists():
        return False
    return not name.startswith("shards") or not looks_whole(damaged)


def expect_checkpoint_error(error: UnshardError | None, *words: str) -> None:
    assert error is None or isinstance(error, CheckpointError), type(error)
    for word in words:
        assert error is None or word in str(error), f"{word!r} is not in: {error}"


@pytest.mark.parametrize("name", FORMATS)
def test_a_truncated_file_is_noticed_or_does_not_matter(
    samples: Samples, tmp_path: Path, out: Path, name: str
) -> None:
    sample, random, findings = samples[name], Random(name), Findings()
    spare = Spare(sample.directory, tmp_path / "copy")
    for file in spare.files():
        size = (spare.original / file).stat().st_size
        cuts = {0, 1, size // 2, size - 1, *random.sample(range(size), min(size, 10))}
        for cut in sorted(cuts):
            change = partial(os.truncate, length=cut)
            with findings.attempt(file, cut), spare.damaged(file, change):
                error = judge(spare.directory, sample.truth, out)
                expect_checkpoint_error(error, Path(file).name)
    findings.tell()


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_behind_the_end_are_noticed_or_do_not_matter(
    samples: Samples, tmp_path: Path, out: Path, name: str
) -> None:
    sample, random, findings = samples[name], Random(name), Findings()
    spare = Spare(sample.directory, tmp_path / "copy")
    for file in spare.files():
        whole = (spare.original / file).read_bytes()
        for more in (b"\0", b"\n", random.randbytes(100), random.randbytes(70_000), whole):
            change = partial(append, more=more)
            with findings.attempt(file, len(more)), spare.damaged(file, change):
                expect_checkpoint_error(judge(spare.directory, sample.truth, out))
    findings.tell()


def append(path: Path, more: bytes) -> None:
    with path.open("ab") as file:
        file.write(more)


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("gone"))


def replace_by_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def replace_by_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def replace_by_noise(path: Path) -> None:
    path.write_bytes(Random(0).randbytes(path.stat().st_size))


def replace_by_zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


REPLACEMENTS = (
    replace_by_directory,
    replace_by_dangling_link,
    replace_by_loop,
    replace_by_device,
    replace_by_noise,
    replace_by_zeros,
)


@pytest.mark.parametrize("replacement", REPLACEMENTS)
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_not_such_a_file_is_noticed_or_does_not_matter(
    samples: Samples,
    tmp_path: Path,
    out: Path,
    name: str,
    replacement: Callable[[Path], None],
) -> None:
    sample, findings = samples[name], Findings()
    spare = Spare(sample.directory, tmp_path / "copy")
    for file in spare.files():
        with findings.attempt(file), spare.damaged(file, replacement):
            expect_checkpoint_error(judge(spare.directory, sample.truth, out))
    findings.tell()


@pytest.mark.parametrize("name", FORMATS)
def test_a_pipe_is_not_waited_for(samples: Samples, tmp_path: Path, name: str) -> None:
    """In a process of its own: a thread that waits for a pipe could not be ended here."""
    spare, out = Spare(samples[name].directory, tmp_path / "copy"), tmp_path / "merged"
    files = [spare.directory / file for file in spare.files()[:4]]
    command = [sys.executable, "-c", WITH_PIPES, str(spare.directory), str(out), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert len(outcomes) == len(files) > 0
    for number, error in enumerate(outcomes):
        place = Path(f"{out}-{number}")
        assert place.exists() is (error is None), error
        if place.exists():
            assert_same(merged(place), samples[name].truth)


WITH_PIPES = """
import json, os, signal, sys
import unshard

source, out, *files = sys.argv[1:]
outcomes = []
for number, file in enumerate(files):
    os.rename(file, f"{out}-kept")
    os.mkfifo(file)
    signal.alarm(60)  # which ends this process
    try:
        unshard.merge(source, f"{out}-{number}", config="none")
        outcomes.append(None)
    except unshard.CheckpointError as error:
        outcomes.append(str(error))
    signal.alarm(0)
    os.replace(f"{out}-kept", file)
print(json.dumps(outcomes))
"""


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
@pytest.mark.parametrize("name", FORMATS)
def test_what_may_not_be_read_is_named(
    samples: Samples, tmp_path: Path, out: Path, name: str
) -> None:
    sample, findings = samples[name], Findings()
    spare = Spare(sample.directory, tmp_path / "copy")
    for file in spare.files():
        with findings.attempt(file), spare.damaged(file, partial(Path.chmod, mode=0)):
            expect_checkpoint_error(judge(spare.directory, sample.truth, out))
    findings.tell()


@pytest.mark.parametrize("name", FORMATS)
def test_a_changed_byte_is_noticed_or_does_not_matter(
    samples: Samples, tmp_path: Path, out: Path, name: str
) -> None:
    """Outside the weights, which nothing but their own checksums can vouch for."""
    sample, random, findings = samples[name], Random(name), Findings()
    spare = Spare(sample.directory, tmp_path / "copy")
    weights = weight_ranges(spare.directory.resolve())
    compare = assert_same_bits if name.startswith(NAMES_UNGUARDED) else assert_same
    files = spare.files()
    for file in files:
        size = (spare.directory / file).stat().st_size
        taken = weights.get((spare.directory / file).resolve(), [])
        for place in places_to_flip(size, taken, FLIPS // len(files) + 1, random):
            change = partial(change_byte, place=place, random=random)
            with findings.attempt(file, place), spare.damaged(file, change):
                judge(spare.directory, sample.truth, out, compare=compare)
    findings.tell()


@pytest.mark.parametrize("name", CHECKED)
def test_a_changed_byte_anywhere_is_noticed_by_full_verification(
    samples: Samples, tmp_path: Path, out: Path, name: str
) -> None:
    sample, random, findings = samples[name], Random(name), Findings()
    spare = Spare(sample.directory, tmp_path / "copy")
    compare = assert_same_bits if name.startswith(NAMES_UNGUARDED) else assert_same
    files = [file for file in spare.files() if not file.endswith(".metadata")]
    for file in files:
        size = (spare.directory / file).stat().st_size
        for place in places_to_flip(size, [], FULL_FLIPS // len(files) + 1, random):
            change = partial(change_byte, place=place, random=random)
            with findings.attempt(file, place), spare.damaged(file, change):
                judge(spare.directory, sample.truth, out, compare=compare, verify="full")
    findings.tell()
