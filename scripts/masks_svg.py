#!/usr/bin/env python3
"""Draws which turns of a conversation carry the loss: `python3 scripts/masks_svg.py > docs/guides/masks.svg`."""
import html

TURNS = [
    ("system", "You are a telephone."), ("user", "Is there a table?"), ("assistant", "For how many?"), ("user", "For two."),
    ("tool", '{"free": true}'), ("assistant", "Yes, for two."),
]
COLUMNS = [
    ("assistant (default)", lambda index, role: role == "assistant"),
    ("completion", lambda index, role: index == len(TURNS) - 1),
    ("all", lambda index, role: True),
    ('with "train": false', lambda index, role: index == len(TURNS) - 1),
]
LEARNED, READ, TEXT, DIM = "#2da44e", "#d0d7de", "#1f2328", "#59636e"
LEFT, TOP, ROW, WIDTH = 250, 44, 30, 170


def main():
    height, width = TOP + ROW * len(TURNS) + 40, LEFT + WIDTH * len(COLUMNS) + 10
    print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" font-size="13">')
    print(f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>')
    for column, (title, _) in enumerate(COLUMNS):
        print(f'<text x="{LEFT + column * WIDTH + 8}" y="26" fill="{TEXT}" font-weight="600">{html.escape(title)}</text>')
    for index, (role, said) in enumerate(TURNS):
        y = TOP + index * ROW
        print(f'<text x="14" y="{y + 18}" fill="{DIM}">{role}</text><text x="84" y="{y + 18}" fill="{TEXT}">{html.escape(said)}</text>')
        for column, (_, learned) in enumerate(COLUMNS):
            fill = LEARNED if learned(index, role) else READ
            print(f'<rect x="{LEFT + column * WIDTH + 8}" y="{y + 4}" width="{WIDTH - 24}" height="{ROW - 10}" rx="4" fill="{fill}"/>')
    y = TOP + ROW * len(TURNS) + 10
    for x, fill, word in [(14, LEARNED, "trained on, with its end token"), (260, READ, "context only")]:
        print(f'<rect x="{x}" y="{y}" width="14" height="14" rx="3" fill="{fill}"/><text x="{x + 22}" y="{y + 12}" fill="{DIM}">{word}</text>')
    print(f'<text x="{LEFT + 2 * WIDTH + 8}" y="{y + 12}" fill="{DIM}">last column: the field is in the first answer</text>')
    print("</svg>")


if __name__ == "__main__":
    main()
