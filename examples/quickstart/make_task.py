#!/usr/bin/env python3
"""Writes the quickstart's task: spoken table bookings, each to be turned into one line of strict JSON.

    python3 make_task.py --out data [--train 3000] [--held-out 200] [--seed 7]

Names of the held-out rows occur in no training row, and no held-out sentence does.
"""
import argparse
import json
import os
import random

import world

OPENINGS = ["Hello, ", "Hi, ", "Good evening, ", "Good morning, ", "Hi there, ", "", "", ""]
ASKS = ["I need a table", "we would like a table", "can I book a table", "could you keep a table", "please reserve a table", "I want to book a table"]
WHENS = ["on {day} at {time}", "at {time} on {day}", "for {day}, {time}", "this {day} at {time}", "next {day}, at {time}"]
NAMES = ["The name is {name}.", "My name is {name}.", "It is for {name}.", "Under {name}, please.", "Please put it under {name}.", "{name} is the name."]
SEATS = ["A seat by the {seat}, please.", "We would like to sit by the {seat}.", "If you can, by the {seat}.", "The {seat} would be nice."]
CLOSINGS = ["Thank you.", "Thanks a lot!", "See you then.", "", "", "", ""]
PARTIES = ["for {people}", "for {people} people", "for {people} of us"]


def booking(rng, name):
    """One booking: what is said and what must be written."""
    people, day, seat = rng.randint(1, 12), rng.choice(list(world.DAYS)), rng.choice([*world.SEATS, None, None])
    spoken, written = world.clock(rng, 11, 22)
    party = rng.choice(PARTIES).format(people=world.number(people))
    if people == 1:
        party = rng.choice(["for one", "just for me", "for one person"])
    elif rng.random() < 0.15:
        wrong = rng.choice([n for n in range(2, 13) if n != people])
        party = f"for {world.number(wrong)}, no, sorry, for {world.number(people)}"
    when = rng.choice(WHENS).format(day=day, time=spoken)
    ask = rng.choice(ASKS)
    mark = "?" if ask.startswith(("can", "could")) else "."
    request = rng.choice(OPENINGS) + ask + " " + rng.choice([f"{party} {when}", f"{when} {party}"]) + mark
    parts = [rng.choice(NAMES).format(name=name)]
    if seat:
        parts.append(rng.choice(SEATS).format(seat=seat))
    rng.shuffle(parts)
    said = " ".join([request[0].upper() + request[1:], *parts, rng.choice(CLOSINGS)]).strip()
    form = {"name": name, "people": people, "day": world.DAYS[day], "time": written, "seat": seat}
    answer = json.dumps(form, separators=(",", ":"))
    return {"messages": [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--train", type=int, default=3000)
    parser.add_argument("--held-out", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    names = set()
    while len(names) < args.train // 2 + args.held_out:
        names.add(world.name(rng))
    names = sorted(names)
    rng.shuffle(names)
    held_out_names, train_names = names[: args.held_out], names[args.held_out :]
    os.makedirs(args.out, exist_ok=True)
    splits = {
        "train": [booking(rng, rng.choice(train_names)) for _ in range(args.train)],
        "held_out": [booking(rng, name) for name in held_out_names],
    }
    for split, rows in splits.items():
        with open(os.path.join(args.out, f"{split}.jsonl"), "w", encoding="utf-8") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
