"""HTML in which text stays text.

    element("p", "1 < 2", classes="note")   ->   <p class="note">1 &lt; 2</p>

Whatever is a plain string is escaped; only what `element` or `raw` made is not.
"""

import re
from html import escape
from typing import Final

VOID: Final = frozenset({"meta", "br", "col"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def raw(text: str) -> Markup:
    """Our own text as HTML; never use it on a name."""
    return Markup(text)


def escaped(content: object) -> Markup:
    """Content as HTML: markup as it is, all else as visible text."""
    if isinstance(content, Markup):
        return content
    # Unseen signs could turn the direction of a line, or end the file for a reader.
    shown = "".join(
        sign if sign.isprintable() or sign in "\n\t" else "�" for sign in str(content)
    )
    return Markup(escape(shown))


def element(
    tag: str, *contents: object, classes: str | None = None, **attributes: str
) -> Markup:
    """One element; an underscore in an attribute's name is a hyphen."""
    pairs = {"class": classes} if classes is not None else {}
    pairs |= {name.rstrip("_").replace("_", "-"): v for name, v in attributes.items()}
    written = "".join(f' {name}="{escaped(value)}"' for name, value in pairs.items())
    if tag in VOID:
        return Markup(f"<{tag}{written}>")
    return Markup(f"<{tag}{written}>{together(*contents)}</{tag}>")


def together(*contents: object) -> Markup:
    """Contents one after the other."""
    return Markup("".join(map(escaped, contents)))


def table(
    caption: object,
    headers: list[str],
    rows: list[list[object]],
    *,
    numbers: bool = True,
    strong: int | None = None,
) -> Markup:
    """A table that scrolls by itself if the screen is narrow.

    Args:
        caption: What it shows.
        headers: Of its columns.
        rows: Each begins with what it is called.
        numbers: Whether all columns but the first hold numbers.
        strong: A row to look at first.
    """
    head = element("tr", *(element("th", text, scope="col") for text in headers))
    body = [
        element(
            "tr",
            element("th", first, scope="row"),
            *(element("td", cell) for cell in rest),
            **({"classes": "strong"} if index == strong else {}),
        )
        for index, (first, *rest) in enumerate(rows)
    ]
    whole = element(
        "table",
        element("caption", caption),
        element("thead", head),
        element("tbody", *body),
        classes="numbers" if numbers else "words",
    )
    return element(
        "div",
        whole,
        classes="scroll",
        tabindex="0",
        role="group",
        aria_label=_text_of(caption),
    )


def _text_of(content: object) -> str:
    return (
        re.sub("<[^>]*>", "", content) if isinstance(content, Markup) else str(content)
    )
