"""Small protocols to try things with."""

from pathlib import Path

from evidence.protocol import protocol_of

TINY = Path(__file__).with_name("tiny.toml")


def text_of(*changes):
    """The tiny protocol with some texts replaced, (old, new) each."""
    text = TINY.read_text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


def tiny(*changes):
    return protocol_of(text_of(*changes).encode())
