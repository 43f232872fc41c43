"""False DCP metadata is refused, or harmless."""

from pathlib import Path

import pytest

from damage import judge
from hostile.dcp import LIES, rewritten
from oracle.writers.samples import Samples
from unshard import CheckpointError

pytestmark = pytest.mark.xdist_group("torch processes")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "output" / "merged"


@pytest.mark.parametrize("sample", ["DCP", "DCP, zstd"])
@pytest.mark.parametrize("name", LIES)
def test_false_metadata_is_refused(
    samples: Samples, tmp_path: Path, out: Path, name: str, sample: str
) -> None:
    source = rewritten(samples[sample].directory, tmp_path / "copy", LIES[name])
    judged = judge(source, samples[sample].truth, out)
    assert judged is None or isinstance(judged, CheckpointError), f"{type(judged)}: {judged}"
