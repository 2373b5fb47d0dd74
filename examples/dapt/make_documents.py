#!/usr/bin/env python3
"""Writes the documents of the example, one of each kind that `tunesmith ingest` reads: `python3 examples/dapt/make_documents.py`.

They are about the harbour of Greta Bay, as the rows are; the same files come out every time.
"""
import random
import sys
import zipfile
from pathlib import Path
from xml.sax.saxutils import escape

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "quickstart"))
import world  # noqa: E402

WORD = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'


def arrivals(rng, count):
    for _ in range(count):
        _, written = world.clock(rng)
        yield rng.choice(list(world.DAYS)), written, world.name(rng), rng.randint(2, 40), rng.choice(world.FOODS)


def paragraph(text, style=None, number=None):
    properties = f'<w:pStyle w:val="{style}"/>' if style else ""
    if number:
        properties += f'<w:numPr><w:ilvl w:val="0"/><w:numId w:val="{number}"/></w:numPr>'
    return f'<w:p><w:pPr>{properties}</w:pPr><w:r><w:t xml:space="preserve">{escape(text)}</w:t></w:r></w:p>'


def table(rows):
    cell = lambda text: f"<w:tc>{paragraph(str(text))}</w:tc>"  # noqa: E731
    return "<w:tbl>" + "".join("<w:tr>" + "".join(map(cell, row)) + "</w:tr>" for row in rows) + "</w:tbl>"


def docx(path, body):
    """A DOCX file with what a program needs to open it."""
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    package = "http://schemas.openxmlformats.org/package/2006"
    main = "application/vnd.openxmlformats-officedocument.wordprocessingml"
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{package}/content-types">'
        '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
        f'<Override PartName="/word/document.xml" ContentType="{main}.document.main+xml"/>'
        f'<Override PartName="/word/styles.xml" ContentType="{main}.styles+xml"/>'
        f'<Override PartName="/word/numbering.xml" ContentType="{main}.numbering+xml"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{package}/relationships">'
        f'<Relationship Id="r1" Type="{office}/officeDocument" Target="word/document.xml"/></Relationships>',
        "word/_rels/document.xml.rels": f'<Relationships xmlns="{package}/relationships">'
        f'<Relationship Id="r1" Type="{office}/styles" Target="styles.xml"/>'
        f'<Relationship Id="r2" Type="{office}/numbering" Target="numbering.xml"/></Relationships>',
        "word/styles.xml": f"<w:styles {WORD}>" + "".join(
            f'<w:style w:type="paragraph" w:styleId="Kop{level}"><w:name w:val="heading {level}"/></w:style>' for level in (1, 2)
        ) + "</w:styles>",
        "word/numbering.xml": f"<w:numbering {WORD}>" + "".join(
            f'<w:abstractNum w:abstractNumId="{kind}"><w:lvl w:ilvl="0"><w:start w:val="1"/><w:numFmt w:val="{form}"/>'
            f'<w:lvlText w:val="{text}"/></w:lvl></w:abstractNum>' for kind, form, text in [(0, "bullet", "•"), (1, "decimal", "%1.")]
        ) + "".join(f'<w:num w:numId="{kind + 1}"><w:abstractNumId w:val="{kind}"/></w:num>' for kind in (0, 1)) + "</w:numbering>",
        "word/document.xml": f"<w:document {WORD}><w:body>{body}</w:body></w:document>",
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in parts.items():
            # A fixed date, so that the file is the same every time.
            info = zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0))
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, '<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n' + text)


def main():
    rng = random.Random("tunesmith documents")
    folder = HERE / "documents"
    folder.mkdir(exist_ok=True)

    rules = ["Boats come in by the north gate.", "The toll is paid before a box is landed.", "Names & numbers go into the book."]
    tolls = [("boxes", "toll")] + [(f"up to {most}", f"{price} coins") for most, price in [(10, 2), (20, 3), (40, 5)]]
    docx(folder / "rules.docx", "".join([
        paragraph("The harbour of Greta Bay", "Kop1"),
        paragraph("The harbour is open from seven to eleven. Whoever brings boxes pays a toll."),
        paragraph("Rules", "Kop2"), *(paragraph(rule, number=2) for rule in rules),
        paragraph("Goods that are known", "Kop2"), *(paragraph(food, number=1) for food in world.FOODS[:6]),
        paragraph("Tolls", "Kop2"), table(tolls),
    ]))

    rows = "\n".join(
        f"<tr><td>{day}</td><td>{time}</td><td>{name}</td><td>{boxes} boxes of {food}</td></tr>" for day, time, name, boxes, food in arrivals(rng, 12)
    )
    (folder / "week.html").write_text(
        "<!doctype html>\n<html><head><title>Arrivals</title><style>td { padding: 4px }</style></head>\n<body>\n"
        '<nav><a href="/">Home</a> <a href="/tolls">Tolls</a></nav>\n<h1>Arrivals of the&nbsp;week</h1>\n'
        "<p>Boats that came in, as the <em>harbour book</em> has them. Times are&mdash;as ever&mdash;those of the tower clock.</p>\n"
        f"<table><tr><th>day</th><th>time</th><th>boat of</th><th>load</th></tr>\n{rows}\n</table>\n"
        "<script>count(document.rows)</script>\n<footer>Harbour office</footer>\n</body></html>\n", encoding="utf-8")

    lines = "\n".join(f"- {day}, {time}: the boat of {name}" for day, time, name, _, _ in arrivals(rng, 8))
    (folder / "watch.md").write_text(
        f"---\ntitle: Watch\nauthor: harbour office\n---\n# The watch\n\n<!-- checked in spring -->\nWho keeps the watch writes down every sail.\n\n"
        f"## Last week\n\n{lines}\n", encoding="utf-8")

    book = "\r\n".join(
        f"{day}, {time}: the boat of {name} brings {boxes} boxes of {food}; toll paid.  " for day, time, name, boxes, food in arrivals(rng, 40)
    )
    (folder / "book.txt").write_bytes(f"Harbour book of Greta Bay\r\n\r\n\r\n\r\n{book}\r\n".encode())


if __name__ == "__main__":
    main()
