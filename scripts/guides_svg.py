#!/usr/bin/env python3
"""Draws the pictures of the guides. Those with curves come from runs of the examples, which the script makes (`just guide-pictures`).

    python3 scripts/guides_svg.py target/release/tunesmith docs/guides
"""
import html
import json
import math
import os
import signal
import subprocess
import sys
import tempfile

GREEN, BLUE, ORANGE, GREY, TEXT, DIM, LINE = "#2da44e", "#0969da", "#bf5700", "#d0d7de", "#1f2328", "#59636e", "#eaeef2"


def text(x, y, words, fill=DIM, weight=400, anchor="start"):
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="{fill}" font-weight="{weight}" text-anchor="{anchor}">{html.escape(words)}</text>'


def box(x, y, width, height, fill, stroke="none"):
    return f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="4" fill="{fill}" stroke="{stroke}"/>'


def picture(width, height, parts):
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" font-size="12">'
    return "\n".join([head, f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>', *parts, "</svg>"]) + "\n"


def chart(x, y, width, height, title, series, top, bottom=0.0):
    """Curves in one frame: (points of step and value, colour); `top` and `bottom` are the ends of the axis."""
    last = max(step for points, _ in series for step, _ in points)
    parts = [text(x, y - 8, title, TEXT, 600), box(x, y, width, height, "#ffffff", LINE)]
    for points, colour in series:
        places = [(x + width * step / last, y + height * (top - value) / (top - bottom)) for step, value in points]
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in places)}"/>')
    return parts


def rows(path):
    with open(path) as file:
        return [json.loads(line) for line in file]


def steps(path, key):
    return [(row["step"], row[key]) for row in rows(path) if key in row]


class Program:
    def __init__(self, path, folder):
        self.path, self.folder = path, folder

    def command(self, name, example, *words):
        out = os.path.join(self.folder, name)
        quiet = ["gen.num_samples=0", "logging.report=false", "logging.tensorboard=false"]
        return out, [self.path, "train", f"examples/{example}/{example}.yaml", f"train.output_dir={out}", *quiet, *words]

    def train(self, name, example, *words, wanted=0):
        out, command = self.command(name, example, *words)
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode != wanted:
            sys.exit(done.stderr)
        return os.path.join(out, "metrics.jsonl")

    def stopped(self, name, example, step, *words):
        """A run that gets a signal after this many steps."""
        out, command = self.command(name, example, *words)
        metrics = os.path.join(out, "metrics.jsonl")
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while run.poll() is None:
            if os.path.exists(metrics) and sum(1 for _ in open(metrics)) >= step:
                run.send_signal(signal.SIGINT)
                break
        if run.wait() != 75:
            sys.exit(f"{name} ended with {run.returncode}")
        return metrics


def optimizers(program):
    """The learning rate over sixty steps, by schedule."""
    forms = [
        ("constant_with_warmup", ""), ("linear", ""), ("cosine", ""), ("cosine_with_restarts", "num_cycles=3"), ("polynomial", "power=3"),
        ("inverse_sqrt", ""), ("cosine_with_min_lr", "min_lr_rate=0.2"), ("warmup_stable_decay", "num_decay_steps=20"),
    ]
    parts = []
    for index, (form, arguments) in enumerate(forms):
        words = [f"train.lr_scheduler_type={form}", f"train.lr_scheduler_kwargs={arguments}", "train.warmup_ratio=0", "train.warmup_steps=6"]
        path = program.train(form, "instruction", "train.max_steps=60", "train.learning_rate=0.001", "train.eval_strategy=no", *words)
        x, y = 16 + 196 * (index % 4), 36 + 120 * (index // 4)
        parts += chart(x, y, 180, 70, form, [(steps(path, "learning_rate"), BLUE)], 0.00105)
        parts.append(text(x, y + 86, arguments))
    return picture(808, 256, parts)


def resume(program):
    """The loss of a run, and of the same run stopped by a signal and finished with `--resume`."""
    words = ["train.max_steps=80", "train.eval_strategy=no"]
    whole = steps(program.train("whole", "instruction", *words), "loss")
    path = program.stopped("parts", "instruction", 30, *words)
    before = len(steps(path, "loss"))
    parts = steps(program.train("parts", "instruction", *words, "--resume"), "loss")
    if parts != whole:
        sys.exit(f"{path}: the resumed run is another one")
    top = max(loss for _, loss in whole) * 1.02
    drawn = chart(16, 36, 370, 150, "uninterrupted", [(whole, BLUE)], top)
    drawn += chart(416, 36, 370, 150, f"Ctrl-C after step {before}, then --resume", [(parts[:before], ORANGE), (parts[before - 1:], GREEN)], top)
    drawn.append(text(16, 206, "training loss by step; both runs have the same losses, to the last bit"))
    return picture(802, 220, drawn)


def dapt(program):
    """The perplexity of held-out documents."""
    path = program.train("dapt", "dapt", "train.eval_strategy=steps", "train.eval_steps=7")
    points = [(row["step"], row["eval_loss"]) for row in rows(path) if "eval_loss" in row]
    top = max(value for _, value in points) * 1.05
    parts = chart(60, 36, 700, 150, "perplexity of the held-out documents (examples/dapt), on a logarithmic axis", [(points, BLUE)], top)
    parts += [text(52, 40 + 150 * (top - value) / top, f"{math.exp(value):.1f}", anchor="end") for _, value in (points[0], points[-1])]
    parts.append(text(60, 206, f"steps {points[0][0]} to {points[-1][0]}"))
    return picture(802, 220, parts)


def table(head, lines, note, left=170, width=88):
    """A table with a row per part and a column per setting. Trained parts are green."""
    parts = [text(left + index * width + width / 2, 24, word, TEXT, 600, "middle") for index, word in enumerate(head)]
    for number, (name, marks) in enumerate(lines):
        y = 36 + 26 * number
        parts.append(text(14, y + 15, name, TEXT))
        for index, mark in enumerate(marks):
            fill = {"#": GREEN, ".": GREY, "+": "#ffffff"}[mark]
            parts.append(box(left + index * width + 6, y + 2, width - 12, 18, fill))
            if mark == "+":
                parts += [box(left + index * width + 6, y + 2, width - 34, 18, GREY), box(left + (index + 1) * width - 24, y + 2, 18, 18, GREEN)]
    y = 46 + 26 * len(lines)
    for x, fill, word in note:
        parts += [box(x, y, 14, 14, fill), text(x + 20, y + 12, word)]
    return picture(left + width * len(head) + 14, y + 26, parts)


def modes(_):
    head = ["lora", "qlora", "oft", "ia3", "freeze: 1 layer", "freeze: norms", "full"]
    lines = [
        ("embedding", "......#"), ("blocks 0 … n-2: norms", ".....##"), ("… q_proj, o_proj, up, gate", "+++...#"), ("… k_proj, v_proj, down_proj", "++++..#"),
        ("last block: norms", "....###"), ("… its linear layers", "++++#.#"), ("last norm", ".....##"), ("head", "......#"),
    ]
    return table(head, lines, [(14, GREEN, "trained"), (110, GREY, "frozen (with qlora in 4 bits)"), (360, GREEN, "narrow: an adapter beside the weight")], 190, 104)


def instruction(_):
    head = ["alpaca", "instruction", "chat_triple", "prompt_completion", "loss_on: all"]
    lines = [("template: begin of turn", "....#"), ("system", "....#"), ("question", "....#"), ("answer", "#####"), ("end of the answer", "#####")]
    return table(head, lines, [(14, GREEN, "trained on"), (110, GREY, "context only (absent without a template or a system message)")], 170, 122)


def big_data(_):
    stations = [
        ("files", "JSONL, CSV, Parquet", "gz, zst, patterns"), ("rows", "one by one", "form, length, repeats"), ("tokens", "in parallel", "template, mask"),
        ("cache", "a file, by content", "about 4 bytes per token"), ("batches", "shuffled, packed", "24 bytes per row"),
    ]
    parts = []
    for index, (name, first, second) in enumerate(stations):
        x = 14 + 158 * index
        parts += [box(x, 20, 134, 70, "#f6f8fa", GREY), text(x + 67, 42, name, TEXT, 600, "middle"), text(x + 67, 60, first, anchor="middle"), text(x + 67, 77, second, anchor="middle")]
        if index:
            parts.append(f'<path d="M{x - 20} 55h12m-5 -5l5 5l-5 5" fill="none" stroke="{DIM}" stroke-width="1.5"/>')
    parts.append(text(14, 112, "done once: the second run starts from the cache"))
    return picture(802, 124, parts)


def main():
    program, folder = sys.argv[1:]
    with tempfile.TemporaryDirectory() as runs:
        for draw in (optimizers, resume, dapt, modes, instruction, big_data):
            drawn = draw(Program(program, runs))
            with open(os.path.join(folder, draw.__name__.replace("_", "-") + ".svg"), "w") as file:
                file.write(drawn)


if __name__ == "__main__":
    main()
