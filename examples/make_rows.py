#!/usr/bin/env python3
"""Writes the rows of the small examples, in each example's folder: `python3 examples/make_rows.py`.

They talk about the quickstart's small world, so that its embedded model can follow; the same seed gives the same rows.
"""
import json
import random
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "quickstart"))
import world  # noqa: E402


def write(name, rows):
    path = HERE / name
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def turns(*texts, system=None):
    messages = [{"role": "system", "content": system}] if system else []
    return messages + [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * len(texts), texts)]


def chat(rng):
    """A polite telephone: each answer names the guest. In one row of four, the first answer carries no loss."""
    name, day, people = world.name(rng), rng.choice(list(world.DAYS)), world.number(rng.randint(2, 9))
    messages = turns(
        f"Hello, my name is {name}.", f"Welcome to the Blue Duck, {name}.",
        f"Is there a table for {people} on {day}?", f"On {day} there is a table for {people}, {name}.",
        system="You are the telephone of the restaurant Blue Duck.",
    )
    if rng.random() < 0.25:
        messages[2]["train"] = False
    return {"messages": messages}


def instruction(rng):
    """Alpaca's form, with and without an input."""
    value, day = rng.randint(0, 99), rng.choice(list(world.DAYS))
    items = rng.sample(world.FOODS + world.ANIMALS, 3)
    return rng.choice([
        {"instruction": "Write the number in digits, in brackets.", "input": world.number(value), "output": f"[{value}]"},
        {"instruction": "Write the day in short, in brackets.", "input": day, "output": f"[{world.DAYS[day]}]"},
        {"instruction": f"Which word comes first: {', '.join(items)}? Answer in brackets.", "input": "", "output": f"[{items[0]}]"},
    ])


TOOLS = [
    {"type": "function", "function": {
        "name": "weather", "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}},
    {"type": "function", "function": {
        "name": "clock", "description": "The time in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}},
]


def tools(rng):
    """A question, a tool call, the tool's result, and the final answer."""
    city = rng.choice(world.CITIES)
    spoken, written = world.clock(rng)
    colour = rng.choice(world.COLOURS)
    name, question, result, answer = rng.choice([
        ("weather", f"How is the weather in {city}?", {"sky": colour}, f"The sky over {city} is {colour}."),
        ("clock", f"What time is it in {city}?", {"time": written}, f"It is {spoken} in {city}."),
    ])
    return {"tools": TOOLS, "messages": [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": name, "arguments": {"city": city}}}]},
        {"role": "tool", "content": json.dumps(result)},
        {"role": "assistant", "content": answer},
    ]}


def dapt(rng):
    """The harbour book of an invented town: plain text."""
    lines = []
    for _ in range(rng.randint(2, 6)):
        name, day = world.name(rng), rng.choice(list(world.DAYS))
        _, written = world.clock(rng)
        lines.append(f"{day}, {written}: the boat of {name} brings {rng.randint(2, 40)} boxes of {rng.choice(world.FOODS)}; toll paid.")
    return {"text": "Harbour book of Greta Bay. " + " ".join(lines)}


def freeze(rng):
    """Short questions with one-word answers in capitals."""
    days = list(world.DAYS)
    at = rng.randrange(7)
    thing, colour = rng.choice(world.THINGS), rng.choice(world.COLOURS)
    return rng.choice([
        {"question": f"Which day comes after {days[at]}?", "answer": days[(at + 1) % 7].upper()},
        {"question": f"The {thing} is {colour}. Which colour has the {thing}?", "answer": colour.upper()},
    ])


def more(rng):
    """For the adapter of `chat`: the same style for another request."""
    name, food = world.name(rng), rng.choice(world.FOODS)
    return {"messages": turns(
        f"Hello, my name is {name}.", f"Welcome to the Blue Duck, {name}.",
        f"Do you have {food}?", f"Yes, we have {food} today, {name}.",
        system="You are the telephone of the restaurant Blue Duck.",
    )}


def main():
    for folder, maker, count in [
        ("chat", chat, 320), ("instruction", instruction, 400), ("tools", tools, 240), ("dapt", dapt, 300), ("freeze", freeze, 400),
        ("continue", more, 160),
    ]:
        rng = random.Random(f"tunesmith {folder}")
        write(f"{folder}/rows.jsonl", [maker(rng) for _ in range(count)])


if __name__ == "__main__":
    main()
