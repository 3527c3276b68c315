#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The built site holds together: every link within it leads to a file, and with # to a place in that page; every page is reached from the
first one, the search knows all pages and what is documented on them, and no line of code is wider than the page.

    python3 docs/check_site.py build/docs/html

Links to other hosts are not followed.
"""
import json
import pathlib
import re
import sys
import urllib.parse
from html.parser import HTMLParser

START = "docs/index.html"
# What the search must know, and as what: something of each part of the site. A word is there by its stem.
SEARCHED = {"flash3_forward": "object", "flash3::forward": "object", "flash3.attention": "object", "softmax": "word", "causal": "word",
            "xformer": "word", "changelog": "title"}
# What a code block shows without scrolling in a window of 1,280 pixels, as site/site.css lays it out.
CODE_COLUMNS = 116
# Pages that Sphinx makes of nothing.
MADE = {"genindex", "py-modindex", "search", "index"}


class Page(HTMLParser):
    """What a page links to, the places in it that a link may lead to, and its code."""

    def __init__(self, text):
        super().__init__()
        self.links, self.places, self.code = [], set(), []
        self.in_code = False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        if tag == "pre":
            self.in_code = True
            self.code.append("")
        named = dict(attributes)
        self.places |= {named[key] for key in ("id", "name") if named.get(key)}
        self.links += [named[key] for key in ("href", "src", "srcset") if named.get(key) and tag != "base"]

    handle_startendtag = handle_starttag

    def handle_endtag(self, tag):
        if tag == "pre":
            self.in_code = False

    def handle_data(self, data):
        if self.in_code:
            self.code[-1] += data


def targets(folder, name, page):
    """(link, file, place) of each link of a page that stays on this site."""
    for link in page.links:
        scheme, host, path, _, place = urllib.parse.urlsplit(link)
        if not scheme and not host:
            file = (folder / name).parent / urllib.parse.unquote(path) if path else folder / name
            yield link, file.resolve(), urllib.parse.unquote(place)


def broken_links(folder, pages):
    """Complaints; and which pages link to which."""
    bad, leads_to = [], {name: set() for name in pages}
    for name, page in pages.items():
        for link, file, place in targets(folder, name, page):
            other = file.relative_to(folder).as_posix() if file.is_relative_to(folder) else None
            if other is None or not file.is_file():
                bad.append(f"{name}: link to {link}: there is no such file")
            elif other in pages:
                leads_to[name].add(other)
                if place and place not in pages[other].places:
                    bad.append(f"{name}: link to {link}: there is no such place")
    return bad, leads_to


def unreached(leads_to):
    """Pages to which no way leads from the first one."""
    seen, ahead = set(), {START}
    while ahead:
        seen |= ahead
        ahead = set().union(*(leads_to.get(name, set()) for name in ahead)) - seen
    return [f"{name}: no link leads to it from {START}" for name in leads_to if name not in seen and name != "index.html"]


def wide_code(pages):
    if not any(page.code for page in pages.values()):
        yield "no page has code: the check looks in the wrong place"
    for name, page in pages.items():
        for line in "\n".join(page.code).splitlines():
            if len(line) > CODE_COLUMNS:
                yield f"{name}: {len(line)} columns of code, more than {CODE_COLUMNS}: {line.strip()}"


def search_gaps(folder, pages):
    text = (folder / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(re.fullmatch(r"Search\.setIndex\((.*)\)\s*;?\s*", text, re.S)[1])
    known = set(index["docnames"])
    yield from (f"{name}: the search does not know it" for name in pages if name.removesuffix(".html") not in known | MADE)
    objects = {f"{prefix}.{entry[-1]}" if prefix else entry[-1] for prefix, entries in index["objects"].items() for entry in entries}
    for word, kind in SEARCHED.items():
        if word not in {"object": objects, "word": index["terms"], "title": index["titleterms"]}[kind]:
            yield f"the search does not know the {kind} {word}"


def main(folder):
    folder = pathlib.Path(folder).resolve()
    pages = {path.relative_to(folder).as_posix(): Page(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.html"))
             if not path.is_relative_to(folder / "_downloads")}
    bad, leads_to = broken_links(folder, pages)
    bad += unreached(leads_to)
    bad += search_gaps(folder, pages)
    bad += wide_code(pages)
    links = sum(len(page.links) for page in pages.values())
    print("\n".join(bad) or f"{len(pages)} pages with {links} links in order")
    return bool(bad) or START not in pages


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
