"""Compare a merged model, tensor by tensor, with the checksums of the model before it was sharded.

Usage: check_result.py MERGED EXPECTED.json
"""

import hashlib
import json
import sys
from pathlib import Path

from unshard.containers.safetensors_file import read_safetensors


def main(merged: Path, expected: Path) -> int:
    """Print what was compared; return 1 if anything differs."""
    truth = json.loads(expected.read_text())
    found = {}
    for path in sorted(merged.glob("*.safetensors")):
        file = read_safetensors(path)
        data = path.read_bytes()[file.data_start :]
        for entry in file.entries:
            found[entry.name] = {
                "dtype": entry.dtype.name,
                "shape": list(entry.shape),
                "sha256": hashlib.sha256(data[entry.begin : entry.end]).hexdigest(),
            }
    wrong = sorted(
        name for name in truth.keys() | found.keys() if truth.get(name) != found.get(name)
    )
    for name in wrong:
        print(f"{name}: expected {truth.get(name)}, found {found.get(name)}")
    print(
        f"{len(truth) - len(wrong)} of {len(truth)} tensors equal the unsharded model, bit for bit"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
