"""A drawing as SVG: every mark becomes an element, and texts stay texts."""

from __future__ import annotations

from xml.etree import ElementTree

from zbsolve.show.pictures.drawing import Area, Box, Dot, Drawing, Line, Row, Words, to_svg

HOSTILE = "</svg><script>\"&'\x1b[31m\u2028"


def test_every_mark_is_drawn_and_texts_stay_texts() -> None:
    marks = (
        Box(1, 2, 3.456, 4, "#111", radius=2),
        Row(0, 5, "#222", ((0, 1), (2.5, 1))),
        Area(((0, 0), (1, 0), (1, 1)), "#333"),
        Line(((0, 0), (1, 1)), "#444", 2, dashes=(4, 4)),
        Dot(5, 5, 2, "#555", "#666", 1.5),
        Words(1, 1, HOSTILE, 12, bold=True, halo=True),
    )
    root = ElementTree.fromstring(to_svg(Drawing(100, 50, HOSTILE, HOSTILE, marks)))
    tags = [one.tag.rpartition("}")[2] for one in root]
    assert tags == ["title", "desc", "rect", "rect", "path", "path", "path", "circle", "text"]
    assert [root[i].text for i in (0, 1, 8)] == ["</svg><script>\"&' [31m "] * 3
    assert root.attrib["viewBox"] == "0 0 100 50"
    assert (root[3].attrib["width"], root[3].attrib["rx"]) == ("3.46", "2")
    assert root[4].attrib["d"] == "M0 0h1v5h-1zM2.5 0h1v5h-1z"
    assert root[5].attrib["d"].endswith("z")
    assert root[6].attrib["stroke-dasharray"] == "4 4"
    assert root[8].attrib["font-weight"] == "600"
