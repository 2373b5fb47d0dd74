#!/usr/bin/env python3
"""Turns what a command printed into an SVG picture of a terminal, for the README.

    script -qec "scripts/just quickstart" /dev/null | python3 scripts/terminal_svg.py --title "scripts/just quickstart" > docs/quickstart.svg

It handles colours, bold, dim, and redrawn lines (carriage return, cursor up, erase line).
"""
import argparse
import html
import re
import sys

COLOURS = {30: "#484f58", 31: "#ff7b72", 32: "#3fb950", 33: "#d29922", 34: "#58a6ff", 35: "#bc8cff", 36: "#39c5cf", 37: "#b1bac4", 90: "#6e7681"}
TEXT, BACKGROUND, BAR = "#e6edf3", "#0d1117", "#161b22"
CHARACTER, LINE, MARGIN, HEAD = 7.8, 18, 16, 34
CONTROL = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\][^\x07]*\x07")


class Screen:
    """Lines of (character, style); enough of a terminal for a progress bar."""

    def __init__(self):
        self.lines, self.row, self.column, self.style = [[]], 0, 0, (None, False, False)

    def put(self, character):
        line = self.lines[self.row]
        line.extend([(" ", (None, False, False))] * (self.column + 1 - len(line)))
        line[self.column] = (character, self.style)
        self.column += 1

    def move_to_row(self, row):
        self.row = max(0, row)
        while self.row >= len(self.lines):
            self.lines.append([])

    def control(self, parameters, command):
        numbers = [int(number) if number.isdigit() else 0 for number in parameters.split(";")]
        if command == "m":
            self.paint(numbers)
        elif command == "K":
            self.lines[self.row] = [] if numbers[0] == 2 else self.lines[self.row][: self.column]
        elif command == "J":
            del self.lines[self.row + 1 :]
            self.lines[self.row] = self.lines[self.row][: self.column]
        elif command in "AB":
            self.move_to_row(self.row + (max(1, numbers[0]) if command == "B" else -max(1, numbers[0])))
        elif command == "G":
            self.column = max(0, numbers[0] - 1)

    def paint(self, numbers):
        colour, bold, dim = self.style
        for number in numbers:
            if number == 0:
                colour, bold, dim = None, False, False
            elif number == 1:
                bold = True
            elif number == 2:
                dim = True
            elif number in COLOURS:
                colour = COLOURS[number]
            elif number == 39:
                colour = None
        self.style = (colour, bold, dim)

    def feed(self, text):
        at = 0
        while at < len(text):
            found = CONTROL.match(text, at)
            if found:
                if found.group(2):
                    self.control(found.group(1), found.group(2))
                at = found.end()
                continue
            if text[at] == "\n":
                self.move_to_row(self.row + 1)
                self.column = 0
            elif text[at] == "\r":
                self.column = 0
            elif text[at] >= " ":
                self.put(text[at])
            at += 1


def spans(line):
    """A line as SVG text, one `tspan` a run of one style."""
    parts, start = [], 0
    while start < len(line):
        end = start
        while end < len(line) and line[end][1] == line[start][1]:
            end += 1
        colour, bold, dim = line[start][1]
        style = (f' fill="{colour}"' if colour else "") + (' font-weight="bold"' if bold else "") + (' opacity="0.6"' if dim else "")
        text = html.escape("".join(character for character, _ in line[start:end]), quote=False)
        parts.append(f"<tspan{style}>{text}</tspan>" if style else text)
        start = end
    return "".join(parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--title", default="")
    parser.add_argument("--columns", type=int, default=110, help="longer lines are cut")
    parser.add_argument("--skip", help="leave out lines that match this regular expression; a run of them becomes one `…`")
    args = parser.parse_args()
    screen = Screen()
    screen.feed(sys.stdin.buffer.read().decode("utf-8", "replace"))
    lines, skipping = [], False
    for line in screen.lines:
        text = "".join(character for character, _ in line)
        if args.skip and re.search(args.skip, text):
            if not skipping:
                lines.append([("…", (None, False, True))])
            skipping = True
            continue
        skipping = False
        lines.append(line[: args.columns])
    while lines and not lines[-1]:
        lines.pop()
    width, height = args.columns * CHARACTER + 2 * MARGIN, HEAD + len(lines) * LINE + MARGIN
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height}" viewBox="0 0 {width:.0f} {height}">',
        # On the elements themselves: browsers set it anew there, so that it is not inherited.
        "<style>text, tspan { white-space: pre }</style>",
        f'<rect width="100%" height="100%" rx="8" fill="{BACKGROUND}"/>',
        f'<path d="M0 {HEAD - 8}V8a8 8 0 0 1 8-8h{width - 16:.0f}a8 8 0 0 1 8 8v{HEAD - 16}z" fill="{BAR}"/>',
        *(f'<circle cx="{MARGIN + 18 * place}" cy="13" r="5" fill="{fill}"/>' for place, fill in enumerate(("#ff5f56", "#ffbd2e", "#27c93f"))),
        f'<g font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="13" fill="{TEXT}">',
        f'<text x="{width / 2:.0f}" y="17" text-anchor="middle" opacity="0.6">{html.escape(args.title)}</text>',
    ]
    for number, line in enumerate(lines):
        if line:
            out.append(f'<text x="{MARGIN}" y="{HEAD + (number + 0.8) * LINE:.0f}">{spans(line)}</text>')
    print("\n".join([*out, "</g>", "</svg>"]))


if __name__ == "__main__":
    main()
