"""The software bill of materials of a release lists what the wheel's metadata asks for."""

import hashlib
import json
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distribution
from pathlib import Path

ROOT = Path(__file__).parent.parent
PLOTS = "unshard/evaluate/server/http/page/static/uPlot.iife.min.js"


def a_wheel(directory: Path) -> Path:
    """Pack what the bill is made of: the metadata of this installation, and the script."""
    path = directory / "unshard-0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        text = distribution("unshard").read_text("METADATA")
        assert text is not None
        archive.writestr("unshard-0.dist-info/METADATA", text)
        archive.write(ROOT / "src" / PLOTS, PLOTS)
    return path


def test_the_bill_lists_all_dependencies_and_what_is_inside(tmp_path: Path) -> None:
    wheel = a_wheel(tmp_path)
    command = [sys.executable, str(ROOT / "tools" / "sbom.py"), str(wheel)]
    first, second = (subprocess.run(command, capture_output=True, check=True) for _ in range(2))
    assert first.stdout == second.stdout
    bill = json.loads(first.stdout)
    assert (bill["bomFormat"], bill["specVersion"], bill["version"]) == ("CycloneDX", "1.6", 1)
    subject = bill["metadata"]["component"]
    assert subject["name"] == "unshard"
    assert subject["licenses"] == [{"license": {"id": "Apache-2.0"}}]
    assert subject["hashes"][0]["content"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {
        one["name"] + "".join(p["value"] for p in one.get("properties", ())): one["purl"]
        for one in bill["components"]
        if one["scope"] == "required" and one["name"] != "uPlot"
    }
    assert set(needed) == {one.replace("_", "-") for one in project["dependencies"]}
    assert needed["huggingface-hub>=0.27"] == "pkg:pypi/huggingface-hub"
    (plots,) = (one for one in bill["components"] if one["name"] == "uPlot")
    assert plots["purl"] == f"pkg:npm/uplot@{plots['version']}"
    references = [one["bom-ref"] for one in bill["components"]]
    assert len(set(references)) == len(references)
    assert bill["dependencies"] == [{"ref": subject["bom-ref"], "dependsOn": references}]
