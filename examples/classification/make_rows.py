"""The rows of the classification example: messages to a restaurant and their topics, of very different frequency.

    python examples/classification/make_rows.py

Seven of ten are bookings, three of a hundred complaints. Each kind has words of its own, and sentences that any message may have;
some messages begin as one kind and end as another, which is then their label. Seeded: the same rows everywhere.
"""
import json
import os
import random
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "quickstart"))
import world  # noqa: E402

SHARES = {"booking": 0.70, "change": 0.18, "cancellation": 0.09, "complaint": 0.03}


def sentence(rng, kind):
    name, day, time = world.name(rng), rng.choice(list(world.DAYS)), world.clock(rng)[0]
    people, city, food = world.number(rng.randint(2, 12)), rng.choice(world.CITIES), rng.choice(world.FOODS)
    return rng.choice({
        "booking": [
            f"A table for {people} on {day} at {time}, please.",
            f"We would like to come on {day}, {people} of us, under the name {name}.",
            f"Is there a table in the {rng.choice(world.SEATS)} for {people} at {time}?",
            f"My name is {name} and I want to eat {food} with {people} {rng.choice(world.FRIENDS)} on {day}.",
        ],
        "change": [
            f"We have a table on {day}; could it be {time} now?",
            f"There will be {people} of us on {day}, not two.",
            f"Please move the table of {name} to {day}.",
        ],
        "cancellation": [
            f"We cannot come on {day} after all.",
            f"Please take the name {name} off the list for {day}.",
            f"The table for {people} at {time} is no longer needed.",
        ],
        "complaint": [
            f"The {food} was cold and nobody said a word.",
            f"We waited for {people} hours and then the table was gone.",
            f"The bill for {name} was wrong on {day}.",
        ],
    }[kind])


def filler(rng):
    city, friend = rng.choice(world.CITIES), world.name(rng)
    return rng.choice([
        f"We are coming from {city}.", f"Say hello to {friend}.", "Thank you!", "Good morning.", "I hope that you are well.",
        f"It is {rng.choice(world.MONTHS)} already.",
    ])


def row(rng):
    kind = rng.choices(list(SHARES), SHARES.values())[0]
    parts = [sentence(rng, kind)]
    if kind != "booking" and rng.random() < 0.5:
        parts.insert(0, sentence(rng, "booking"))
    for _ in range(rng.randint(0, 2)):
        parts.insert(rng.randint(0, len(parts)), filler(rng))
    return {"text": " ".join(parts), "label": kind}


def main():
    for name, count, seed in (("train", 480, 1), ("val", 400, 2), ("test", 400, 3)):
        rng = random.Random(seed)
        with open(os.path.join(HERE, "data", f"{name}.jsonl"), "w", encoding="utf-8") as out:
            for _ in range(count):
                out.write(json.dumps(row(rng)) + "\n")


if __name__ == "__main__":
    main()
