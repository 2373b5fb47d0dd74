#!/usr/bin/env python3
"""Writes the text that the quickstart's base model is pretrained on: short chats in plain English about a small world.

    python3 make_corpus.py --out corpus.jsonl [--rows 60000] [--seed 1]

The chats greet, count, tell the time, answer questions about little stories, repeat, quote, spell, and write given values as
JSON. A booking is answered by a friendly sentence: filling in the form of `make_task.py` is what the base model can't do.
"""
import argparse
import json
import random

import world


def story(rng):
    """A little story and the questions that it answers."""
    who, city, day, count = world.name(rng), rng.choice(world.CITIES), rng.choice(list(world.DAYS)), rng.randint(2, 12)
    spoken, _ = world.clock(rng)
    group, food, thing, colour = (rng.choice(x) for x in (world.FRIENDS, world.FOODS, world.THINGS, world.COLOURS))
    facts = [
        (f"{who} went to {city} with {world.number(count)} {group}.",
         [(f"Who went to {city}?", f"{who}."), (f"Where did {who} go?", f"{who} went to {city}."),
          (f"How many {group} were there?", f"{count}."), ("Which city was it?", f"{city}.")]),
        (f"They left on {day} at {spoken}.",
         [("On which day did they leave?", f"{day}."), ("At what time did they leave?", f"At {spoken}."),
          ("When did they leave?", f"On {day} at {spoken}.")]),
        (f"They ate {food}.", [("What did they eat?", f"They ate {food}."), ("Did they eat?", f"Yes, they ate {food}.")]),
        (f"{who} bought a {colour} {thing}.",
         [(f"What did {who} buy?", f"A {colour} {thing}."), (f"Which colour was the {thing}?", f"{colour.capitalize()}."),
          (f"Who bought the {thing}?", f"{who}.")]),
    ]
    chosen = [facts[0]] + sorted(rng.sample(facts[1:], rng.randint(1, 3)), key=facts.index)
    text = " ".join(sentence for sentence, _ in chosen)
    questions = rng.sample([pair for _, pairs in chosen for pair in pairs], 2)
    return text, questions


def words(rng, least, most):
    """Random words, names and numbers: what follows can't be guessed, only copied."""
    pools = [world.CITIES, world.FOODS, world.ANIMALS, world.COLOURS, world.THINGS, world.NUMBERS, list(world.DAYS)]
    return [world.name(rng) if rng.random() < 0.4 else rng.choice(rng.choice(pools)) for _ in range(rng.randint(least, most))]


def greeting(rng):
    who = world.name(rng)
    return rng.choice([
        [("Hello!", "Hello! How can I help you today?")],
        [(f"Hi, I am {who}.", f"Nice to meet you, {who}."), ("What is my name?", f"Your name is {who}.")],
        [(f"Good morning, my name is {who}.", f"Good morning, {who}! What can I do for you?"), ("Do you know my name?", f"Yes, it is {who}.")],
        [("Thank you very much.", "You are welcome!")],
        [("How are you?", "I am fine, thank you. And you?"), ("Good, thanks.", "I am glad to hear that.")],
        [(f"Please say hello to {who}.", f"Hello, {who}!")],
    ])


def repeat(rng):
    text = " ".join(words(rng, 3, 12))
    return rng.choice([
        [(f"Please repeat: {text}", text)],
        [(f"Say this twice: {text}", f"{text}, {text}")],
        [(f"Repeat after me: {text}", text), ("And again?", text)],
    ])


def quote(rng):
    """Copying next to a quotation mark, where a word has no space before it."""
    items = words(rng, 2, 8)
    who, thing = world.name(rng), rng.choice(world.THINGS)
    return rng.choice([
        [(f"Put quotes around each word: {' '.join(items)}", " ".join(f'"{item}"' for item in items))],
        [(f"Quote the name in this sentence: {who} has a {thing}.", f'"{who}"')],
        [(f"Write \"{items[0]}\" without quotes.", items[0])],
        [(f"A sign on the {thing} says {who}. What does it say?", f'It says "{who}".')],
        [(f"Quote the second word: {' '.join(items)}", f'"{items[1]}"')],
    ])


def spell(rng):
    word = world.name(rng)
    return [(rng.choice([f"Spell {word}.", f"How do you spell {word}?"]), "-".join(word))]


def count(rng):
    value, other = rng.randint(0, 99), rng.randint(0, 20)
    return rng.choice([
        [(f"How is {world.number(value)} written in digits?", f"{value}.")],
        [(f"Write {world.number(other)} in digits.", f"{other}.")],
        [(f"What is {value} in words?", f"{world.number(value).capitalize()}.")],
        [(f"Which number comes after {world.number(other)}?", f"{world.number(other + 1).capitalize()}.")],
        [(f"{world.number(other).capitalize()} or {world.number(value)}: which is more?", f"{world.number(max(other, value)).capitalize()}.")],
    ])


def time(rng):
    spoken, written = world.clock(rng)
    return rng.choice([
        [(f"What is {spoken} on a 24 hour clock?", f"{written}.")],
        [(f"Write {spoken} in digits.", f"{written}.")],
        [(f"The clock says {written}. What time is it?", f"It is {spoken}.")],
        [(f"The train leaves at {spoken}. When is that?", f"At {written}.")],
    ])


def calendar(rng):
    days = list(world.DAYS)
    at, month = rng.randrange(7), rng.randrange(12)
    return rng.choice([
        [(f"Which day comes after {days[at]}?", f"{days[(at + 1) % 7]}.")],
        [(f"Which day comes before {days[at]}?", f"{days[(at - 1) % 7]}.")],
        [(f"What is short for {days[at]}?", f"{world.DAYS[days[at]]}.")],
        [(f"Which day is {world.DAYS[days[at]]}?", f"{days[at]}.")],
        [(f"Which month comes after {world.MONTHS[month]}?", f"{world.MONTHS[(month + 1) % 12]}.")],
    ])


def read(rng):
    text, questions = story(rng)
    first, second = questions
    return [(f"{text} {first[0]}", first[1]), second]


def table(rng):
    """Talk at a restaurant's telephone, answered as a person would."""
    who, day, people = world.name(rng), rng.choice(list(world.DAYS)), rng.randint(1, 12)
    spoken, written = world.clock(rng, 11, 22)
    seat, party = rng.choice(world.SEATS), world.number(people)
    return rng.choice([
        [(f"I need a table for {party} on {day}.", f"A table for {party} on {day}, of course. At what time?"),
         (f"At {spoken}.", f"Very well, {spoken}. Under which name?"), (f"{who}.", f"Thank you, {who}. See you on {day}.")],
        [(f"Do you have a seat by the {seat}?", f"Yes, we have a seat by the {seat}."), ("For how many?", f"For {party}.")],
        [(f"The table is for {party}, the name is {who}.", f"A table for {party}, under {who}."), ("What was the name?", f'"{who}".'),
         ("How many people, in digits?", f"{people}.")],
        [(f"We come at {spoken} on {day}.", f"Good, {day} at {written}."), ("Which day, in short?", f"{world.DAYS[day]}.")],
    ])


def order(rng):
    """A whole booking in one breath; the answer is a friendly sentence, then come questions about it."""
    who, day, people = world.name(rng), rng.choice(list(world.DAYS)), rng.randint(1, 12)
    spoken, written = world.clock(rng, 11, 22)
    seat, party = rng.choice([*world.SEATS, None]), world.number(people)
    if rng.random() < 0.1:
        party = f"{world.number(rng.randint(1, 12))}, no, for {party}"
    opening = rng.choice(["Hello, ", "Hi, ", "Good evening, ", "Good day, ", "", ""])
    wish = rng.choice(["I need a table", "we want a table", "do you have a table", "please keep us a table", "I would like to book a table", "reserve a table"])
    when = rng.choice([f"on {day} at {spoken}", f"at {spoken} on {day}", f"{day}, {spoken}", f"next {day} at {spoken}"])
    request = opening + wish + " " + rng.choice([f"for {party} {when}", f"{when} for {party}", f"for {party} people, {when}"]) + rng.choice(".?")
    sentences = [request[0].upper() + request[1:], rng.choice([f"My name is {who}.", f"The name is {who}.", f"It is for {who}.", f"Please note it for {who}."])]
    if seat:
        sentences.append(rng.choice([f"By the {seat}, please.", f"We like the {seat}.", f"A seat by the {seat} would be nice."]))
    if rng.random() < 0.3:
        sentences.reverse()
    if rng.random() < 0.3:
        sentences.append(rng.choice(["Thank you.", "Thanks!", "Goodbye."]))
    questions = [
        ("What was the name?", f'"{who}".'), ("Who called?", f"{who}."), ("How many people, in digits?", f"{people}."),
        ("At what time, in digits?", f"{written}."), ("Which day, in short?", f"{world.DAYS[day]}."), ("Which day?", f"{day}."),
        ("Where do they want to sit?", f"By the {seat}." if seat else "They did not say."),
    ]
    reply = f"Very well, {who}, a table for {world.number(people)} on {day} at {spoken}."
    return [(" ".join(sentences), reply), *rng.sample(questions, rng.randint(1, 3))]


def data(rng):
    """Given values as JSON: the punctuation of data, never a booking."""
    pools = {
        "city": world.CITIES, "food": world.FOODS, "animal": world.ANIMALS, "colour": world.COLOURS, "thing": world.THINGS,
        "month": world.MONTHS, "owner": None, "count": range(100), "price": range(1, 30), "note": [None],
    }
    keys = rng.sample(list(pools), rng.randint(1, 5))
    form = {key: world.name(rng) if pools[key] is None else rng.choice(pools[key]) for key in keys}
    said = ", ".join(f"{key} {'nothing' if value is None else value}" for key, value in form.items())
    items = words(rng, 1, 6)
    return rng.choice([
        [(f"Write as JSON: {said}", json.dumps(form, separators=(",", ":")))],
        [(f"As JSON, please: {said}.", json.dumps(form, separators=(",", ":")))],
        [(f"Write as a JSON list: {' '.join(items)}", json.dumps(items, separators=(",", ":")))],
    ])


KINDS = [
    (greeting, 4), (repeat, 20), (quote, 16), (data, 12), (spell, 3), (count, 8), (time, 8), (calendar, 5), (read, 12), (table, 6),
    (order, 18),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--rows", type=int, default=60_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    makers, weights = zip(*KINDS)
    with open(args.out, "w", encoding="utf-8") as out:
        for _ in range(args.rows):
            turns = [turn for maker in rng.choices(makers, weights, k=rng.randint(1, 2)) for turn in maker(rng)]
            messages = [{"role": role, "content": text} for turn in turns for role, text in zip(("user", "assistant"), turn)]
            out.write(json.dumps({"messages": messages}) + "\n")


if __name__ == "__main__":
    main()
