"""Names and things for word problems."""

# ruff: noqa: E501 (tables read better unbroken)

from __future__ import annotations

import random

from distill.bundled.split import is_heldout

SHE = "Anna Maya Leila Sofia Grace Yuki Priya Fatima Ingrid Chloe Nora Zoe Amara Elena Ruth Hannah Mei Carmen Olivia Tessa"
SHE += (
    " Julia Aisha Bella Nadia Paula Rosa Vera Wendy Iris Dora Keiko Lucia Martha Naomi Petra Sara Tanya Ursula Violet"
)
HE = "Ben Omar Liam Diego Kofi Ravi Hugo Peter Samuel Tariq Viktor Wei Adam Carlos David Emil Felix George Henry Ivan Jamal"
HE += " Kenji Leo Marco Nathan Oscar Pablo Quentin Rafael Stefan Thomas Umar Vincent Walter Yusuf Zach Andre Boris Chen Dylan"
EVERYBODY = [(name, "he", "his", "him") for name in HE.split()] + [(name, "she", "her", "her") for name in SHE.split()]
# The people of held-out problems occur in no training problem.
PEOPLE = {
    heldout: [person for person in EVERYBODY if is_heldout(f"name {person[0]}", 0.15) == heldout]
    for heldout in (False, True)
}
# singular, plural, price range in dollars, how they come
THINGS = (
    ("apple", "apples", (1, 3), "bag"), ("orange", "oranges", (1, 3), "crate"), ("pencil", "pencils", (1, 2), "box"),
    ("notebook", "notebooks", (2, 6), "pack"), ("marble", "marbles", (1, 2), "bag"), ("sticker", "stickers", (1, 2), "sheet"),
    ("cookie", "cookies", (1, 3), "tray"), ("muffin", "muffins", (2, 4), "tray"), ("book", "books", (5, 20), "box"),
    ("stamp", "stamps", (1, 3), "album"), ("shell", "shells", (1, 2), "bucket"), ("balloon", "balloons", (1, 2), "pack"),
    ("candle", "candles", (2, 6), "box"), ("flower", "flowers", (2, 5), "bunch"), ("egg", "eggs", (1, 2), "carton"),
    ("toy car", "toy cars", (3, 9), "box"), ("postcard", "postcards", (1, 3), "pack"), ("button", "buttons", (1, 2), "jar"),
    ("photo", "photos", (1, 4), "album"), ("ticket", "tickets", (4, 15), "booklet"), ("brick", "bricks", (1, 3), "pallet"),
    ("tomato", "tomatoes", (1, 2), "basket"), ("pear", "pears", (1, 3), "crate"), ("bead", "beads", (1, 2), "string"),
    ("coin", "coins", (2, 9), "roll"), ("chair", "chairs", (15, 40), "stack"), ("bottle", "bottles", (2, 5), "case"),
    ("crayon", "crayons", (1, 2), "box"), ("card", "cards", (1, 4), "deck"), ("plant", "plants", (4, 12), "tray"),
    ("comic book", "comic books", (3, 8), "stack"), ("sandwich", "sandwiches", (4, 8), "platter"),
)  # fmt: skip
PLACES: tuple[str, ...] = (
    "school",
    "library",
    "bakery",
    "market",
    "museum",
    "farm",
    "factory",
    "park",
    "theatre",
    "office",
    "hospital",
)
PLACES += ("hotel", "stadium", "garden", "bookshop", "harbour", "zoo", "gym", "station", "beach", "cafe")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
SMALL = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")


class Words:
    """Random choices for one problem: people of one split, things and numbers.

    Attributes:
        rng: where the choices come from.
        who, he, his, him: the first person and the pronouns.
        other: a second person.
        one, many, price, pack: a thing, its plural, a price in dollars and what it comes in.
    """

    def __init__(self, rng: random.Random, heldout: bool) -> None:
        self.rng = rng
        people = [(name, "he", "his", "him") for name in HE.split()] + [
            (name, "she", "her", "her") for name in SHE.split()
        ]
        people = [person for person in people if is_heldout(f"name {person[0]}", 0.15) == heldout]
        (self.who, self.he, self.his, self.him), (self.other, *_), (self.third, *_) = rng.sample(people, 3)
        self.one, self.many, prices, self.pack = rng.choice(THINGS)
        self.price = rng.randint(*prices)
        self.place = rng.choice(PLACES)
        self.day = rng.choice(DAYS)

    @property
    def packs(self) -> str:
        """What the thing comes in, plural."""
        return self.pack + ("es" if self.pack.endswith(("x", "ch")) else "s")

    @property
    def He(self) -> str:
        """The pronoun at the start of a sentence."""
        return self.he.capitalize()

    def n(self, low: int, high: int) -> int:
        """A whole number from low to high."""
        return self.rng.randint(low, high)

    def pick(self, *options: str) -> str:
        """One of several ways to say it."""
        return self.rng.choice(options)

    def count(self, number: int) -> str:
        """A number, small ones sometimes as a word."""
        return SMALL[number] if 2 <= number <= 12 and self.rng.random() < 0.3 else str(number)

    def others(self, number: int) -> list[tuple[str, str]]:
        """Other things (singular, plural), all different."""
        return [(one, many) for one, many, *_ in self.rng.sample([t for t in THINGS if t[0] != self.one], number)]
