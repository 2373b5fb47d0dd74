"""The small world that the quickstart's texts talk about: names, places, numbers, days and times of day.

Everything is made from lists and a seeded `random.Random`, so the same seed gives the same text everywhere.
"""

ONSETS = "B Br C Ch D Dr F Fl G Gr H J K Kl L M N P Pr R S Sh St T Th Tr V W Y Z".split()
VOWELS = "a e i o u ai ea ie o u a e".split()
MIDDLES = "b d f g k l ll m n nd nt r rn rr s st t tt v lv mb rk".split()
ENDINGS = "a ah an ar e ek el en er ett i in is ko la low man na o on or ow son us y ya".split()

CITIES = (
    "Oslo Lima Cairo Quito Paris Rome Delhi Accra Seoul Turin Porto Basel Lagos Kyoto Perth Dublin Riga Graz "
    "Tunis Havana Milan Ghent Malmo Nice Leeds Sofia Minsk Hanoi Dakar Tampa"
).split()
FOODS = (
    "soup bread rice beans cheese fish pasta salad cake pears apples honey plums lentils noodles eggs olives "
    "mushrooms pancakes dumplings potatoes cherries"
).split()
ANIMALS = "cat dog horse goat duck rabbit parrot turtle donkey pony".split()
COLOURS = "red blue green yellow white black brown orange purple grey".split()
THINGS = "lamp chair kite coat drum boat cup hat bag bike book key clock scarf bell rope".split()
FRIENDS = "friends cousins neighbours sisters brothers colleagues".split()
SEATS = ["window", "garden", "bar", "terrace", "corner"]

NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
).split()
TENS = {20: "twenty", 30: "thirty", 40: "forty", 50: "fifty", 60: "sixty", 70: "seventy", 80: "eighty", 90: "ninety"}
DAYS = {
    "Monday": "mon", "Tuesday": "tue", "Wednesday": "wed", "Thursday": "thu", "Friday": "fri", "Saturday": "sat",
    "Sunday": "sun",
}
MONTHS = "January February March April May June July August September October November December".split()
MINUTES = {0: "", 15: "quarter past ", 30: "half past ", 45: "quarter to "}


def number(value):
    """`value` below 100 in words: `number(42) == "forty-two"`."""
    if value <= 20:
        return NUMBERS[value]
    tens, ones = value - value % 10, value % 10
    return TENS[tens] + (f"-{NUMBERS[ones]}" if ones else "")


def name(rng):
    """A family name from syllables, e.g. `Marlow`; several thousand are possible."""
    middle = rng.choice(MIDDLES) + (rng.choice("aeiou") + rng.choice("b d k l m n r s t v".split()) if rng.random() < 0.3 else "")
    return rng.choice(ONSETS) + rng.choice(VOWELS) + middle + rng.choice(ENDINGS)


def clock(rng, first=7, last=22):
    """A time of day as spoken and as written: `("half past seven in the evening", "19:30")`."""
    hour, minute = rng.randint(first, last), rng.choice([0, 0, 15, 30, 45])
    if (hour, minute) == (12, 0):
        return rng.choice(["noon", "twelve noon"]), "12:00"
    spoken_hour = hour + 1 if minute == 45 else hour
    part = "morning" if hour < 12 else "afternoon" if hour < 17 else "evening"
    words = MINUTES[minute] + NUMBERS[(spoken_hour - 1) % 12 + 1]
    return f"{words} in the {part}", f"{hour:02}:{minute:02}"
