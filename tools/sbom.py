"""Write the software bill of materials of a release: `python tools/sbom.py WHEEL > sbom.json`.

It is CycloneDX 1.6 in JSON, made of the wheel's own metadata: what the wheel depends on, with the
versions that it allows, and the one library of others that is inside, uPlot. The same wheel gives
the same bytes. The versions that a user gets are those of the user's installation.
"""

import hashlib
import json
import re
import sys
import uuid
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

PLOTS = "unshard/evaluate/server/http/page/static/uPlot.iife.min.js"
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*([^;]*?)\s*(?:;\s*(.*))?")
_VERSION = re.compile(r"uPlot \(v([0-9.]+)\)")


def main() -> None:
    """Print the bill of the wheel that the command line names."""
    sys.stdout.write(json.dumps(bill_of(Path(sys.argv[1])), indent=2) + "\n")


def bill_of(wheel: Path) -> dict[str, object]:
    """Return the bill of a wheel."""
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
        plots = archive.read(PLOTS)
    subject = _package(metadata["Name"], metadata["Version"]) | {
        "description": metadata["Summary"],
        "licenses": [{"license": {"id": _license(metadata)}}],
        "hashes": [_hash(digest)],
    }
    components = [_uplot(plots), *map(_dependency, metadata.get_all("Requires-Dist", []))]
    unique = {str(component["bom-ref"]): component for component in components}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, digest)}",
        "version": 1,
        "metadata": {"component": subject},
        "components": list(unique.values()),
        "dependencies": [{"ref": subject["bom-ref"], "dependsOn": list(unique)}],
    }


def _package(name: str, version: str = "") -> dict[str, object]:
    address = f"pkg:pypi/{re.sub('[-_.]+', '-', name).lower()}" + (f"@{version}" if version else "")
    package: dict[str, object] = {
        "type": "library",
        "bom-ref": address,
        "name": name,
        "purl": address,
    }
    return package | ({"version": version} if version else {})


def _license(metadata: Message) -> str:
    return str(metadata["License-Expression"] or metadata["License"])


def _hash(digest: str) -> dict[str, str]:
    return {"alg": "SHA-256", "content": digest}


def _dependency(requirement: str) -> dict[str, object]:
    """Return what a line of Requires-Dist asks for; what only an extra needs is optional."""
    found = _REQUIREMENT.fullmatch(requirement)
    if found is None:
        sys.exit(f"error: Requires-Dist: {requirement}: cannot be read")
    name, versions, marker = (part or "" for part in found.groups())
    component = _package(name)
    component["bom-ref"] = requirement
    component["scope"] = "optional" if "extra" in marker else "required"
    stated = {"unshard:versions": versions, "unshard:marker": marker}
    component["properties"] = [{"name": n, "value": v} for n, v in stated.items() if v]
    return component


def _uplot(script: bytes) -> dict[str, object]:
    found = _VERSION.search(script[:200].decode("utf-8", "replace"))
    if found is None:
        sys.exit(f"error: {PLOTS}: does not name its version")
    return {
        "type": "library",
        "bom-ref": f"pkg:npm/uplot@{found[1]}",
        "name": "uPlot",
        "version": found[1],
        "purl": f"pkg:npm/uplot@{found[1]}",
        "licenses": [{"license": {"id": "MIT"}}],
        "hashes": [_hash(hashlib.sha256(script).hexdigest())],
        "scope": "required",
    }


if __name__ == "__main__":
    main()
