"""Writes the first confusion matrix of a report as a picture: docs/guides/confusion.svg.

    tunesmith eval examples/classification/classification.yaml --split test
    python scripts/confusion_svg.py runs/examples/classification/eval/report.html docs/guides/confusion.svg
"""
import re
import sys

page = open(sys.argv[1], encoding="utf-8").read()
picture = re.search(r"<figure><figcaption><b>[^<]*</b></figcaption>(<svg.*?</svg>)</figure>", page, re.DOTALL).group(1)
with open(sys.argv[2], "w", encoding="utf-8") as out:
    out.write(picture.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1) + "\n")
