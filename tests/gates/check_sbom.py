#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The bill of materials that the build wrote is CycloneDX by its schema, and NOTICE speaks of each of its components."""
import argparse
import json
import pathlib
import re
import sys

from sources import ROOT


def schema_complaints(text):
    try:
        from cyclonedx.schema import SchemaVersion
        from cyclonedx.validation.json import JsonStrictValidator
    except ImportError as error:
        raise SystemExit(f"{error}; scripts/setup.sh gates brings it") from error
    error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    return [f"not by CycloneDX's schema: {error}"] if error else []


def complaints(text):
    yield from schema_complaints(text)
    sbom = json.loads(text)
    version = re.search(r'FLASH3_VERSION_STRING "(.+)"', (ROOT / "include/flash3/version.h").read_text(encoding="utf-8"))[1]
    if (said := sbom["metadata"]["component"]["version"]) != version:
        yield f"it is of flash3 {said}, the header of {version}"
    notice = (ROOT / "NOTICE").read_text(encoding="utf-8")
    for component in sbom["components"]:
        if not re.fullmatch(r"\d+(\.\d+)*", component["version"]):
            yield f"{component['name']}: version {component['version']!r}"
        if component["name"] not in notice:
            yield f"{component['name']} is shipped, but NOTICE does not name it"
    if not sbom["components"] or {c["bom-ref"] for c in sbom["components"]} != set(sbom["dependencies"][0]["dependsOn"]):
        yield "its dependencies are not its components"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sbom", type=pathlib.Path)
    text = parser.parse_args().sbom.read_text(encoding="utf-8")
    bad = list(complaints(text))
    print("\n".join(bad) or f"{len(json.loads(text)['components'])} components")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
