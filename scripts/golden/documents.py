#!/usr/bin/env python3
"""Makes tests/golden/documents/report.docx: a file as python-docx writes it, with the styles and lists of its template.

    pip install python-docx==1.2.0
    python3 scripts/golden/documents.py --out tests/golden/documents
"""
import argparse
import os
import zipfile

import docx


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    document = docx.Document()
    document.add_heading("Report on α & ω", 0)
    document.add_heading("First part", 1)
    paragraph = document.add_paragraph("Some ")
    paragraph.add_run("bold").bold = True
    paragraph.add_run(" text,\twith a tab\nand a break.")
    for text, style in [("one", "List Bullet"), ("within", "List Bullet 2"), ("first", "List Number"), ("second", "List Number")]:
        document.add_paragraph(text, style=style)
    document.add_heading("A table", 3)
    table = document.add_table(rows=2, cols=2)
    for number, text in enumerate(["key", "value", "a | b", "two\nlines"]):
        table.cell(number // 2, number % 2).text = text
    document.add_paragraph("  The   end.  ")
    os.makedirs(args.out, exist_ok=True)
    made, path = os.path.join(args.out, "made.docx"), os.path.join(args.out, "report.docx")
    document.save(made)
    # The same file every time, and without the parts that hold a picture and the theme.
    with zipfile.ZipFile(made) as archive, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for name in sorted(archive.namelist()):
            if name.startswith("word/") and name.endswith(".xml") and "theme" not in name:
                info = zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0))
                info.compress_type = zipfile.ZIP_DEFLATED
                out.writestr(info, archive.read(name))
    os.remove(made)


if __name__ == "__main__":
    main()
