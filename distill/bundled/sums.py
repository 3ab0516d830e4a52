"""Short mathematics: arithmetic, equations, number theory, sequences, probability."""

# ruff: noqa: E501 (templates read better unbroken)

from __future__ import annotations

from distill.bundled.words import Words


def arithmetic(w: Words) -> str:
    a, b, c = w.n(2, 10 ** w.n(1, 5)), w.n(2, 10 ** w.n(1, 5)), w.n(2, 99)
    x, y = w.n(-9999, 9999) / 10 ** w.n(1, 3), w.n(1, 9999) / 10 ** w.n(1, 3)
    d, e = w.n(2, 12), w.n(2, 12)
    return w.pick(
        f"What is {a} + {b}?", f"Calculate {a} - {b}.", f"Work out {w.n(12, 999)} * {c}.", f"What is {a * c} divided by {c}?",
        f"Compute {x} + {y}.", f"What is {x} minus {y}?", f"Evaluate {d} + {e} * {c} - {w.n(2, 50)}.",
        f"What is the value of ({d} + {e}) * {c} / {d}?", f"Calculate {w.n(1, d - 1)}/{d} + {w.n(1, e - 1)}/{e} and simplify.",
        f"What is {w.n(1, 95)}% of {a}?", f"Divide {a} by {d} and give the remainder.", f"Round {abs(x) * y:.5f} to two decimal places.",
        f"{d}^{w.n(2, 4)} - {e}^2 = ?", f"Simplify {w.n(2, 9) * d}/{w.n(2, 9) * d}.", f"What is the square root of {c * c}?",
    )  # fmt: skip


def algebra(w: Words) -> str:
    a, b, x, y = w.n(2, 12), w.n(-20, 30), w.n(-9, 12), w.n(-9, 12)
    p, q = w.n(1, 9), w.n(1, 9)
    var = w.pick("x", "y", "t", "n")
    return w.pick(
        f"Solve {a}*{var} + {b} = {a * x + b} for {var}.", f"Solve for {var}: {a}({var} - {p}) = {q}{var} + {b}.",
        f"Solve the system {a}x + {p}y = {a * x + p * y}, {q}x - y = {q * x - y}.",
        f"Find the roots of x^2 - {p + q}x + {p * q} = 0.", f"Factor x^2 + {p + q}x + {p * q}.", f"Expand (x + {p})(x - {q}).",
        f"If f(x) = {a}x^2 - {p}x + {q}, what is f({w.n(-4, 6)})?", f"Let g(x) = {a}*x + {p} and h(x) = x - {q}. What is g(h({w.n(1, 9)}))?",
        f"Simplify {a}{var} + {p} - ({q}{var} - {b}).", f"Find the derivative of {a}x^3 - {p}x^2 + {q}x with respect to x.",
        f"What is the second derivative of {a}*{var}**4 + {p}*{var}**2 - {q}*{var}?",
        f"If {a} times a number is increased by {p}, the result is {a * abs(x) + p}. What is the number?",
        f"The sum of three consecutive numbers is {3 * w.n(5, 90)}. What are the numbers?",
        f"Two numbers add up to {a + p + 10} and differ by {abs(a - p)}. Find the two numbers.",
        f"Solve the inequality {a}{var} - {p} > {q}.", f"Let {var} = {p} - {q}. What is {a}*{var} + {abs(b)}?",
    )  # fmt: skip


def numbers(w: Words) -> str:
    a, b, n = w.n(4, 120), w.n(4, 120), w.n(50, 2000)
    start, step = w.n(-9, 20), w.n(2, 12)
    line = ", ".join(str(start + i * step) for i in range(4))
    powers = ", ".join(str(w.n(1, 4) * step**i) for i in range(4)) if step < 5 else line
    return w.pick(
        f"What is the greatest common divisor of {a} and {b}?", f"Find the least common multiple of {a} and {b}.",
        f"Is {n} a prime number?", f"List the prime factors of {n}.", f"Does {w.n(2, 9)} divide {n}?", f"How many divisors does {a} have?",
        f"What comes next in the sequence {line}, ...?", f"What is the {w.n(8, 40)}th term of the sequence {line}, ...?",
        f"Find the next term of {powers}, ...", f"What is the sum of the first {w.n(8, 60)} terms of {line}, ...?",
        f"What is the remainder when {n} is divided by {w.n(3, 17)}?", f"Convert {n} to base {w.rng.choice((2, 3, 5, 8, 16))}.",
        f"What is the hundreds digit of {n * 37}?", f"Sort {', '.join(str(w.n(-60, 60)) for _ in range(5))} in increasing order.",
        f"Which is larger, {w.n(1, 9)}/{w.n(10, 19)} or {w.n(1, 9)}/{w.n(10, 19)}?",
        f"How many minutes are there between {w.n(1, 5)}:{w.n(10, 59)} AM and {w.n(6, 11)}:{w.n(10, 59)} AM?",
        f"How many {w.pick('grams are in', 'milligrams are in')} {w.n(1, 90) / 4} kilograms?", f"Convert {w.n(2, 90) * 5} kilometres per hour to metres per second.",
    )  # fmt: skip


def chance(w: Words) -> str:
    red, blue, k = w.n(2, 9), w.n(2, 9), w.n(2, 3)
    return w.pick(
        f"A bag holds {red} red and {blue} blue {w.many}. One is drawn at random. What is the probability that it is red?",
        f"{w.count(k).capitalize()} {w.many} are drawn without replacement from a bag with {red} red and {blue} green ones. What is the probability that all of them are green?",
        f"Two dice are rolled. What is the probability that the sum is {w.n(3, 11)}?",
        f"A coin is tossed {w.n(3, 6)} times. What is the probability of exactly {k} heads?",
        f"In how many ways can {red + 2} people sit in a row?", f"How many committees of {k} people can be formed from {red + blue} people?",
        f"How many different words can be made from the letters of {w.pick('LEVEL', 'BANANA', 'SCHOOL', 'PAPER', 'TOMATO', 'MARKET', 'GARDEN')}?",
        f"The mean of {w.count(red)} numbers is {blue * 3}. When {w.n(20, 60)} is added to them, what is the new mean?",
        f"What are the mean and the median of {', '.join(str(w.n(1, 40)) for _ in range(w.n(4, 6)))}?",
        f"A password has {k} letters followed by {w.n(2, 4)} digits. How many passwords are possible?",
    )  # fmt: skip


SUMS = (arithmetic, algebra, numbers, chance)
