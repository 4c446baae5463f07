"""HTML in which text stays text."""

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from esper.report.markup import element, raw, table, together

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


class Reader(HTMLParser):
    """All tags and all text of a piece of HTML."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text, self.attributes = [], "", {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes |= dict(attrs)

    def handle_data(self, data):
        self.text += data


def seen(text):
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)


@given(TEXT, TEXT)
def test_any_text_is_read_back_as_text(content, attribute):
    found = Reader(element("p", content, title=attribute))
    assert found.tags == ["p"]
    assert found.text == seen(content)
    assert found.attributes["title"] == seen(attribute)


def test_only_what_was_made_here_is_markup():
    inner = element("b", "<i>")
    assert element("p", inner, "<i>") == "<p><b>&lt;i&gt;</b>&lt;i&gt;</p>"
    assert together(raw("<hr>"), "<hr>") == "<hr>&lt;hr&gt;"


def test_an_attribute_may_have_a_hyphen_and_an_element_no_end():
    found = element("meta", http_equiv="x", content="y")
    assert found == '<meta http-equiv="x" content="y">'
    assert element("p", classes="a") == '<p class="a"></p>'


def test_a_table_has_a_caption_and_heads_of_rows_and_columns():
    found = table("<All>", ["who", "how"], [["<a>", 1], ["b", 2]], strong=1)
    parsed = Reader(found)
    assert parsed.tags.count("caption") == 1
    assert parsed.tags.count("th") == 4
    assert found.count('scope="col"') == found.count('scope="row"') == 2
    assert "<a>" in parsed.text
    assert "<All>" in parsed.text
    assert found.index('class="strong"') > found.index("&lt;a&gt;")
