import hashlib
import json
from dataclasses import replace

import pytest

from esper.contracts.errors import BadInput
from esper.experiment.checkpoint import (
    MAX_STEP,
    Manifest,
    made_by,
    read_manifest,
    write_manifest,
)

FACTS = {"config_sha256": "ab", "spec": {"heads": [1, 2], "rate": 0.1}, "none": None}
ONE = Manifest(
    step=7, score=0.25, facts=FACTS, made_by=made_by(), size=12, sha256="c" * 64
)


def sealed(body):
    """A manifest that agrees with itself, by hand."""
    text = json.dumps(body, indent=1, sort_keys=True) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    return (
        json.dumps({**body, "sha256": digest}, indent=1, sort_keys=True) + "\n"
    ).encode()


def body_of(data):
    body = json.loads(data)
    del body["sha256"]
    return body


def test_what_was_written_is_read():
    assert read_manifest("m", write_manifest(ONE)) == ONE
    assert set(ONE.made_by) == {"esper", "torch", "python"}
    without = replace(ONE, score=None)
    assert read_manifest("m", write_manifest(without)) == without


def test_it_is_sealed_as_the_format_says():
    data = write_manifest(ONE)
    assert sealed(body_of(data)) == data


def test_every_changed_bit_shows():
    data = write_manifest(ONE)
    for place in range(len(data)):
        for bit in range(8):
            bad = bytearray(data)
            bad[place] ^= 1 << bit
            with pytest.raises(BadInput):
                read_manifest("m", bytes(bad))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"step": -1}, "not as Esper writes"),
        ({"step": MAX_STEP + 1}, "not as Esper writes"),
        ({"step": "7"}, "not as Esper writes"),
        ({"score": "good"}, "not as Esper writes"),
        ({"facts": [1]}, "not as Esper writes"),
        ({"more": 1}, "not as Esper writes"),
        ({"files": {}}, "not as Esper writes"),
        ({"files": {"/etc/passwd": {"bytes": 1, "sha256": ""}}}, "alone"),
        ({"files": {"../state.safetensors": {"bytes": 1, "sha256": ""}}}, "alone"),
        (
            {
                "files": {
                    "state.safetensors": {"bytes": 1, "sha256": ""},
                    "x": {"bytes": 1, "sha256": ""},
                }
            },
            "alone",
        ),
        (
            {"files": {"state.safetensors": {"bytes": 1 << 40, "sha256": ""}}},
            "at most 4,294,967,296 bytes",
        ),
        ({"schema": 2}, r"schema '2', Esper .* reads 1; use the Esper that wrote it"),
        ({"schema": 0}, "schema '0'"),
        ({"schema": "1"}, "damaged|as Esper"),
    ],
)
def test_a_forged_manifest_is_refused_in_one_line(change, why):
    bad = sealed({**body_of(write_manifest(ONE)), **change})
    with pytest.raises(BadInput, match=why) as error:
        read_manifest("checkpoints/000001/manifest.json", bad)
    assert len(str(error.value)) <= 200
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe{}",
        b"\xef\xbb\xbf{}",
        b"[" * 100_000,
        b'{"schema": ' + b"9" * 5000 + b"}",
        b'{"schema": 1, "sha256": NaN, "step": NaN}',
        b" " * (1 << 21),
        write_manifest(ONE)[:-1],
        write_manifest(ONE) + b" ",
        write_manifest(ONE).replace(b"{", b'{\n "step": 7,', 1),
    ],
)
def test_what_is_no_manifest_is_refused(data):
    with pytest.raises(BadInput, match="use another"):
        read_manifest("m", data)


def test_an_html_page_is_recognised():
    with pytest.raises(BadInput, match="an HTML page"):
        read_manifest("m", b"<html>Not found</html>")


@pytest.mark.parametrize(
    "facts",
    [{"a": float("nan")}, {"a": float("inf")}, {"a": object()}, {"a": {1, 2}}],
)
def test_facts_that_json_cannot_hold_are_refused(facts):
    with pytest.raises(BadInput, match="facts must be what JSON holds"):
        write_manifest(replace(ONE, facts=facts))


def test_large_facts_and_strange_scores_are_refused():
    with pytest.raises(BadInput, match="facts make a manifest of"):
        write_manifest(replace(ONE, facts={"a": "x" * (1 << 20)}))
    with pytest.raises(BadInput, match="score must be finite or None, got nan"):
        write_manifest(replace(ONE, score=float("nan")))
