"""Broken links of a built site: missing files and missing anchors.

python scripts/check_links.py FOLDER

Links to other sites are not followed. The exit code is 1 if a link is broken.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """Links and anchors of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the attributes that link or can be linked to."""
        for name, value in attrs:
            if name in ("href", "src") and value and tag != "base":
                self.links.add(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)


def broken_links(site: Path) -> list[str]:
    """Return `page: link` for every link without a target."""
    site = site.resolve()
    pages = {file: Page(file.read_text("utf-8")) for file in site.rglob("*.html")}
    broken = []
    for file, page in pages.items():
        for link in page.links if file.name != "404.html" else ():
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            path = unquote(parts.path)
            target = (file.parent / path).resolve() if path else file
            target = target / "index.html" if target.is_dir() else target
            found = target.is_relative_to(site) and target.is_file()
            anchor = unquote(parts.fragment)
            if found and anchor and target in pages:
                found = anchor in pages[target].anchors
            if not found:
                broken.append(f"{file.relative_to(site)}: {link}")
    return sorted(broken)


if __name__ == "__main__":
    broken = broken_links(Path(sys.argv[1]))
    print("\n".join(broken) or "All links have targets.")
    sys.exit(bool(broken))
