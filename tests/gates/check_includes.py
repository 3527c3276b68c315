#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the folders of src/ may include of each other. A room is a folder of src/, of src/cuda/ or of src/cuda/sm90/ with all below
it, or what lies in src/cuda/ or src/cuda/sm90/ itself. No rooms include each other in a circle, no kernel family includes another,
and of all that lies outside of src/cuda/sm90/ the backend alone knows what is in there."""
import re
import sys

from sources import ROOT, sources

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
HOUSES = ("", "cuda", "cuda/sm90")  # their folders are rooms
ARCHITECTURE = "cuda/sm90"
SHARED = ("device", "host")  # rooms of an architecture that are no family
REGISTRY = "cuda/cuda_backend.cpp"


def room(path):
    """The room of a path below src/."""
    parts = path.split("/")[:-1]
    while parts and "/".join(parts) not in HOUSES and "/".join(parts[:-1]) not in HOUSES:
        parts.pop()
    return "/".join(parts)


def family(path):
    """The kernel family that a path belongs to, or none."""
    name = room(path)
    return name if name.startswith(ARCHITECTURE + "/") and name.rsplit("/", 1)[-1] not in SHARED else None


def includes(root, files):
    """Pairs of paths below src/: a file, and one of the project's own that it includes."""
    src = root / "src"
    pairs = []
    for path in files:
        for name in INCLUDE.findall(path.read_text(encoding="utf-8")):
            found = [base / name for base in (src, path.parent) if (base / name).is_file()]
            if found and found[0].resolve().is_relative_to(src.resolve()):
                pairs.append((path.relative_to(src).as_posix(), found[0].resolve().relative_to(src.resolve()).as_posix()))
    return pairs


def circles(pairs):
    """The shortest way back to a room for each include between two rooms that has one, each circle once."""
    ways = {}
    for pair in pairs:
        if room(pair[0]) != room(pair[1]):
            ways.setdefault(room(pair[0]), {}).setdefault(room(pair[1]), pair)
    complaints, seen = [], set()
    for start in sorted(ways):
        paths = [[start]]
        reached = set()
        while paths:
            path = paths.pop(0)
            for following in sorted(ways.get(path[-1], {})):
                if following == start:
                    if frozenset(path) not in seen:
                        seen.add(frozenset(path))
                        steps = [ways[a][b] for a, b in zip(path, path[1:] + [start])]
                        complaints.append("a circle: " + ", ".join(f"src/{a} includes {b}" for a, b in steps))
                    paths = []
                    break
                if following not in reached:
                    reached.add(following)
                    paths.append(path + [following])
    return complaints


def complaints(root, files):
    pairs = includes(root, files)
    found = circles(pairs)
    for name, included in pairs:
        if family(name) and family(included) and family(name) != family(included):
            found.append(f"src/{name} includes {included}: one kernel family knows nothing of another")
        inside = included.startswith(ARCHITECTURE + "/")
        if inside and not name.startswith(ARCHITECTURE + "/") and name != REGISTRY:
            found.append(f"src/{name} includes {included}: of what lies outside only {REGISTRY} knows {ARCHITECTURE}")
    return found


def main():
    files = sources("src")
    found = complaints(ROOT, files)
    rooms = {room(path.relative_to(ROOT / "src").as_posix()) for path in files}
    print("\n".join(found) or f"{len(files)} files in {len(rooms)} rooms, no circle")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
