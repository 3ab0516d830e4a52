"""Word problems of several steps: one kind grows from random events, the others are scenes of everyday life."""

# ruff: noqa: E501 (templates read better unbroken)

from __future__ import annotations

from distill.bundled.words import Words


def story(w: Words) -> str:
    """Somebody has a number of things and two to four events change it."""
    have = w.n(3, 12) * w.n(2, 10)
    text = w.pick(
        f"{w.who} has {have} {w.many}.", f"{w.who} starts the week with {have} {w.many}.",
        f"There are {have} {w.many} in {w.who}'s {w.pick('room', 'bag', 'kitchen', 'garage')}.",
        f"{w.who} collects {w.many} and already owns {have}.",
    )  # fmt: skip
    for _ in range(w.n(2, 4)):
        have, event = _event(w, have)
        text += " " + event
    if w.rng.random() < 0.15:
        return (
            text
            + f" If {w.he} then shares what is left equally with {w.other}, how many {w.many} does each of them get?"
        )
    return text + " " + w.pick(
        f"How many {w.many} does {w.who} have now?", f"How many {w.many} are left?",
        f"How many {w.many} does {w.he} have in the end?", f"Find the number of {w.many} that {w.who} has now.",
    )  # fmt: skip


def _event(w: Words, have: int) -> tuple[int, str]:
    kind = w.n(0, 9)
    few = w.n(2, max(2, have // 3))
    if kind == 0:
        packs, size = w.n(2, 6), w.n(3, 12)
        return have + packs * size, f"{w.He} buys {w.count(packs)} {w.packs} with {size} {w.many} in each."
    if kind == 1 and have > 6:
        return have - few, w.pick(
            f"{w.He} gives {few} of them to {w.other}.", f"{w.He} loses {few} on the way to the {w.place}."
        )
    if kind == 2 and have % 2 == 0 and have > 4:
        return have // 2, w.pick(
            f"{w.He} sells half of the {w.many}.",
            f"Half of them go to {w.his} {w.pick('sister', 'brother', 'neighbour')}.",
        )
    if kind == 3 and have % 3 == 0 and have > 6:
        return have - have // 3, f"Then {w.he} gives a third of what {w.he} has to {w.third}."
    if kind == 4:
        return have + 2 * few, f"{w.other} gives {w.him} {few} {w.many}, and {w.third} gives {w.him} just as many."
    if kind == 5 and have < 80:
        return have * 2, f"By {w.day} {w.he} has doubled {w.his} {w.many}."
    if kind == 6 and have % 4 == 0 and have > 8:
        return (
            have - have // 4,
            f"On {w.day} {w.he} finds that 25% of {w.his} {w.many} are broken and throws those away.",
        )
    if kind == 7:
        days, daily = w.n(2, 6), w.n(2, 7)
        return (
            have + days * daily,
            f"For the next {w.count(days)} days {w.he} gets {w.count(daily)} more {w.many} every day.",
        )
    if kind == 8 and few > 5:
        ((_, many),) = w.others(1)
        gone = 2 * (few // 3)
        return have - gone, f"{w.He} trades {gone} {w.many} for {few // 3 + 1} {many}."
    return have + few, w.pick(f"{w.He} finds {few} more at the {w.place}.", f"Then {w.he} makes {few} more.")


def shopping(w: Words) -> str:
    (_, many), (_, third) = w.others(2)
    a, b, c = w.n(2, 9), w.n(2, 6), w.n(2, 5)
    q, r = w.n(2, 9), w.n(3, 15)
    total = a * w.price + b * q + c * r
    paid = -(-total // 20) * 20
    text = f"{w.who} buys {w.count(a)} {w.many} at ${w.price} each, {w.count(b)} {many} at ${q} each and {c} {third} at ${r} each."
    return text + " " + w.pick(
        f"{w.He} pays with ${paid}. How much change does {w.he} get?", "What is the total cost?",
        f"{w.He} has a coupon for 10% off the whole purchase. How much does {w.he} pay?",
        f"How much more does {w.he} spend on {w.many} than on {many}?",
    )  # fmt: skip


def wages(w: Words) -> str:
    rate, hours, days, extra = w.n(9, 30), w.n(4, 9), w.n(3, 6), w.n(2, 8)
    text = f"{w.who} earns ${rate} an hour and works {hours} hours a day, {w.count(days)} days a week."
    return text + " " + w.pick(
        f"For every hour of overtime {w.he} gets 1.5 times the usual pay. How much does {w.he} earn in a week with {extra} hours of overtime?",
        f"How much does {w.he} earn in {w.count(w.n(2, 6))} weeks?",
        f"If {w.he} saves a quarter of {w.his} pay, how many weeks does {w.he} need to save ${rate * hours * w.n(3, 9)}?",
        f"{w.He} pays 20% of {w.his} income in taxes. How much is left of a week's pay?",
    )  # fmt: skip


def travel(w: Words) -> str:
    speed, hours, second, more = w.n(4, 14) * 5, w.n(2, 6), w.n(4, 14) * 5, w.n(2, 4)
    if w.rng.random() < 0.4:
        return w.pick(
            f"{w.who} walks {w.n(2, 6)} miles to the {w.place} in {w.n(3, 9) * 10} minutes and takes the bus back, which goes 4 times as fast. How many minutes does the whole way take?",
            f"{w.who} runs {w.count(w.n(2, 8))} laps of {w.n(2, 9) * 100} metres every day. How many kilometres does {w.he} run in {w.count(w.n(2, 4))} weeks?",
            f"A plane leaves at {w.n(1, 11)}:{w.n(10, 59)} in the morning and flies {hours} hours and {w.n(5, 55)} minutes. {w.who} then needs {w.n(2, 9) * 5} minutes for the luggage and {w.n(2, 9) * 5} minutes for the taxi. When does {w.he} get home?",
            f"{w.who} and {w.other} live {speed * 3} miles apart and start towards each other at the same time, at {speed} and {second} miles per hour. After how many hours do they meet?",
            f"The distance from {w.who}'s house to the {w.place} is {w.n(3, 40)} km. {w.He} has gone 3/{w.n(4, 8)} of the way. How far does {w.he} still have to go?",
        )
    text = f"{w.who} drives for {w.count(hours)} hours at {speed} miles per hour and then for {w.count(more)} hours at {second} miles per hour."
    return text + " " + w.pick(
        "How far does the trip go in total?", "What is the average speed of the whole trip?",
        f"The car needs one gallon for every {w.n(20, 40)} miles and a gallon costs ${w.n(3, 5)}. How much does the fuel cost?",
        f"How many miles are left if the whole way is {speed * hours + second * more + w.n(10, 200)} miles long?",
    )  # fmt: skip


def ages(w: Words) -> str:
    young, times, years = w.n(4, 15), w.n(2, 4), w.n(3, 12)
    return w.pick(
        f"{w.who} is {young} years old. {w.other} is {w.count(times)} times as old as {w.who}, and {w.third} is {years} years younger than {w.other}. How old is {w.third}?",
        f"{w.other} is {times} times as old as {w.who}. In {years} years the sum of their ages will be {young * (times + 1) + 2 * years}. How old is {w.who} now?",
        f"{w.who} is {years} years older than {w.other}. Together they are {2 * young + years} years old. How old is each of them?",
        f"{years} years ago {w.who} was {young} years old. How old will {w.he} be in {w.n(2, 20)} years?",
        f"The ages of {w.who}, {w.other} and {w.third} add up to {3 * young + 3 * years}. {w.other} is {years} years older than {w.who} and {w.third} is {2 * years} years older than {w.who}. How old is {w.third}?",
    )  # fmt: skip


def sharing(w: Words) -> str:
    friends, each, left = w.n(3, 9), w.n(4, 15), w.n(1, 2)
    total = friends * each + left
    return w.pick(
        f"{w.who} wants to share {total} {w.many} equally among {w.count(friends)} friends. How many does each friend get and how many are left over?",
        f"{w.who}, {w.other} and {w.third} share {6 * each} {w.many}. {w.other} gets twice as many as {w.who}, and {w.third} gets as many as the two others together. How many does {w.who} get?",
        f"{w.count(friends).capitalize()} friends have {friends * each} {w.many} together. {w.who} joins them with {each + friends + 1} {w.many}. If they now share everything equally, how many {w.many} does each of them get?",
    )  # fmt: skip


def factory(w: Words) -> str:
    machines, rate, hours, bad = w.n(2, 9), w.n(3, 20) * 5, w.n(4, 10), w.rng.choice((4, 5, 10, 20))
    items = w.pick("bottles", "boxes", "toys", "screws", "loaves of bread", "pairs of shoes", "chairs", "bags", "cups")
    text = f"A {w.pick('factory', 'workshop', 'plant')} has {w.count(machines)} machines. Each machine makes {rate} {items} an hour and runs {hours} hours a day."
    return text + " " + w.pick(
        f"{bad}% of the {items} are faulty. How many good {items} are made in a day?",
        f"How many {items} are made in a week of 5 working days?",
        f"How many days does it take to make {machines * rate * hours * w.n(2, 9)} {items}?",
        f"One machine breaks down for a day. How many {items} are made on that day?",
    )  # fmt: skip


def percent(w: Words) -> str:
    base, rate, second = w.n(2, 40) * 20, w.rng.choice((5, 10, 15, 20, 25, 30, 40)), w.rng.choice((5, 10, 20))
    return w.pick(
        f"A {w.one} stand took in ${base} on {w.day}. The next day it took in {rate}% more. How much did it take in on both days together?",
        f"The price of a jacket is ${base}. It is reduced by {rate}% and then by another {second}%. What is the final price?",
        f"In a {w.place} with {base} {w.pick('visitors', 'people', 'guests')}, {rate}% are children and the rest are adults. A ticket costs ${second} for an adult and half of that for a child. How much do all the tickets cost?",
        f"{w.who} scored {base * (100 - rate) // 100} out of {base} points. What percentage is that?",
        f"{w.who} puts ${base} into a savings account with {second}% interest a year. How much is in the account after {w.count(w.n(2, 3))} years?",
        f"After a discount of {rate}% a bicycle costs ${base * (100 - rate) // 100}. What did it cost before?",
    )  # fmt: skip


def geometry(w: Words) -> str:
    a, b, c = w.n(3, 25), w.n(3, 25), w.n(2, 12)
    return w.pick(
        f"A rectangular garden is {a} metres long and {b} metres wide. {w.who} wants to put a fence around it that costs ${c} per metre. What does the fence cost?",
        f"A room is {a} feet long and {b} feet wide. How many square tiles with a side of 1 foot are needed to cover the floor, and what do they cost at ${c} each?",
        f"The perimeter of a rectangle is {2 * (a + b)} cm. Its length is {a} cm. What is its area?",
        f"A water tank is {a} cm long, {b} cm wide and {c} cm high. It is filled to half of its height. How many cubic centimetres of water are in it?",
        f"The two shorter sides of a right triangle are {3 * c} cm and {4 * c} cm long. How long is the longest side, and what is the area?",
        f"A square has the same area as a rectangle of {c * c} by {w.n(2, 5) ** 2} units. How long is the side of the square?",
        f"A circle has a radius of {c} inches. Find its circumference and its area in terms of pi.",
        f"The angles of a triangle are in the ratio {w.n(1, 3)}:{w.n(2, 4)}:{w.n(3, 5)}. Find the largest angle.",
    )  # fmt: skip


def rates(w: Words) -> str:
    a, b, k = w.n(2, 9), w.n(2, 9), w.n(2, 8)
    return w.pick(
        f"{w.who} can paint a wall in {a * k} hours and {w.other} can paint the same wall in {b * k} hours. How long does it take them together?",
        f"One pipe fills a pool in {a} hours, another one empties it in {a + b} hours. How long does it take to fill the pool when both are open?",
        f"{w.count(a).capitalize()} workers need {b * k} days for a job. How many days do {a * k} workers need?",
        f"A recipe for {w.count(a)} people needs {a * k} eggs and {b * a} cups of flour. How many eggs and cups of flour are needed for {a * b} people?",
        f"A printer prints {a * 10} pages in {b} minutes. How many pages does it print in {b * k} minutes?",
        f"{w.who} reads {a * 5} pages every day. {w.He} has read {w.count(k)} days and has {b * 20} pages to go. How many pages does the book have, and how many more days does {w.he} need?",
        f"Two trains leave the same station in opposite directions at {a * 10} and {b * 10} miles per hour. How far apart are they after {k} hours?",
        f"A car uses {a} litres of fuel for every {b * 10} kilometres. How many litres does it use for {b * 10 * k} kilometres?",
    )  # fmt: skip


def comparing(w: Words) -> str:
    a, more, times = w.n(5, 40), w.n(3, 20), w.n(2, 5)
    return w.pick(
        f"{w.who} has {a} {w.many}. {w.other} has {more} more than {w.who}, and {w.third} has {w.count(times)} times as many as {w.other}. How many {w.many} do they have altogether?",
        f"{w.other} picked {w.count(times)} times as many {w.many} as {w.who}. Together they picked {a * (times + 1)}. How many {w.many} did {w.who} pick?",
        f"There are {a + more} {w.many} in the first {w.pack} and {a} in the second. How many must be moved so that both hold the same number?",
        f"{w.who} had {a + more} {w.many}. After giving some to {w.other} {w.he} has {a} left. How many did {w.he} give away?",
        f"A {w.place} has {a} red and {a + more} blue {w.many}. How many more blue ones than red ones are there?",
        f"{w.who} baked {a + more} pies and sold {a} of them. {w.He} then baked {more} more. How many pies does {w.he} have now?",
    )  # fmt: skip


def school(w: Words) -> str:
    classes, each, boys = w.n(3, 9), w.n(18, 32), w.n(5, 15)
    scores = [w.n(60, 99) for _ in range(w.n(3, 5))]
    return w.pick(
        f"A school has {w.count(classes)} classes with {each} students each. {boys} students in each class are boys. How many girls go to the school?",
        f"{w.who} got the scores {', '.join(map(str, scores))} in {w.his} tests. What is {w.his} average, and what does {w.he} need in the next test for an average of {w.n(80, 95)}?",
        f"{classes * each} students go on a trip. Each bus has {w.n(30, 50)} seats. How many buses are needed?",
        f"On {w.day} {w.n(2, 6)} of the {each} students of a class are ill. The others form groups of {w.n(2, 4)}. How many full groups are there?",
        f"{w.who} spends {w.n(2, 6) * 10} minutes a day on homework, and twice as long on {w.day}. How many hours is that in a week?",
    )  # fmt: skip


def farm(w: Words) -> str:
    hens, eggs, cows, milk = w.n(5, 40), w.n(3, 6), w.n(3, 20), w.n(8, 25)
    return w.pick(
        f"{w.who} keeps {hens} hens that lay {eggs} eggs a week each. {w.He} keeps {w.n(5, 12)} eggs for {w.him}self and sells the rest at ${w.n(2, 5)} a dozen. How much does {w.he} earn in a week?",
        f"A farm has {hens} chickens and {cows} cows. How many legs do the animals have together?",
        f"There are chickens and rabbits on a farm, {hens + cows} heads and {2 * hens + 4 * cows} legs. How many rabbits are there?",
        f"Each of {cows} cows gives {milk} litres of milk a day. The farmer sells the milk in bottles of {w.n(2, 5)} litres. How many bottles can be filled in {w.count(w.n(2, 7))} days?",
        f"{w.who} plants {w.count(eggs)} rows of {milk} trees. {w.n(2, 9)} trees do not survive the winter. How many trees are left?",
    )  # fmt: skip


def saving(w: Words) -> str:
    goal, week, have, cost = w.n(10, 60) * 10, w.n(5, 25), w.n(10, 60), w.n(3, 15)
    return w.pick(
        f"{w.who} wants to buy a {w.pick('bicycle', 'tablet', 'guitar', 'camera')} that costs ${goal}. {w.He} has ${have} and saves ${week} a week. After how many weeks can {w.he} buy it?",
        f"{w.who} gets ${week} pocket money a week and spends ${min(cost, week - 1)} of it. {w.other} saves twice as much as {w.who}. How much have they saved together after {w.count(w.n(3, 12))} weeks?",
        f"{w.who} had ${goal}. {w.He} spent 1/{w.rng.choice((2, 4, 5))} of it on {w.many} and ${cost} on lunch. How much money does {w.he} have left?",
        f"{w.who} sells {w.many} for ${w.price + 3} each. Making one costs {w.him} ${w.price}. How many does {w.he} have to sell for a profit of ${goal}?",
        f"A phone plan costs ${week} a month and {cost} cents for every minute over {goal} minutes. {w.who} talked for {goal + have} minutes. How high is the bill?",
        f"{w.who} bought {have} {w.many} for ${have * w.price} and sold them all for ${w.price + w.n(1, 4)} each. How much profit did {w.he} make?",
        f"The entrance to the {w.place} costs ${cost} for adults and ${max(1, cost - 3)} for children. A group of {w.n(2, 6)} adults and {w.n(3, 20)} children pays with a ${goal} voucher. How much of the voucher is left?",
        f"{w.who} borrows ${goal} from {w.other} and pays back ${week} a month. How much does {w.he} still owe after {w.count(w.n(2, 5))} months?",
    )  # fmt: skip


def fractions(w: Words) -> str:
    total, part, more = w.n(4, 40) * 12, w.rng.choice((2, 3, 4, 6)), w.n(2, 9)
    return w.pick(
        f"1/{part} of the {total} {w.many} in a {w.pack} are red, half of the rest are blue and the others are green. How many are green?",
        f"{w.who} read 1/{part} of a book of {total} pages on {w.day} and {more * 2} pages the day after. How many pages are left?",
        f"A {w.place} has {total} seats. 3/4 of them are taken, and 1/{part} of the people in them are children. How many adults are there?",
        f"{w.who} cut a rope of {total} cm into two pieces. One piece is {w.count(part)} times as long as the other, and a bit of {more} cm is left over. How long is the longer piece?",
        f"A tank holds {total} litres and is 1/{part} full. Every minute {more} litres flow in. After how many minutes is it full?",
        f"{w.who} ate 2/{w.rng.choice((5, 7, 8, 9))} of a cake and {w.other} ate 1/{part} of it. What fraction of the cake is left?",
        f"Of {total} people asked, {total // part} like tea, {total // 3} like coffee and {total // 12} like both. How many like neither?",
        f"The ratio of {w.many} to boxes is {more}:{part}. There are {part * 12} boxes. How many {w.many} are there?",
        f"{w.who} and {w.other} split ${total} in the ratio {part}:{more}. How much does {w.other} get?",
    )  # fmt: skip


def everyday(w: Words) -> str:
    a, b, c = w.n(2, 9), w.n(2, 12), w.n(2, 7)
    weight = w.n(120, 260)
    return w.pick(
        f"{w.who}'s dog eats {a * 50} grams of food {w.count(c)} times a day. A bag holds {b} kilograms. How many days does a bag last?",
        f"{w.who} drinks {a} glasses of water a day, each of {b * 20} millilitres. How many litres does {w.he} drink in {w.count(c)} weeks?",
        f"{w.who} watches {w.count(a)} episodes of {b + 20} minutes every evening. How many hours does {w.he} spend on it in {w.count(c)} days?",
        f"{w.who} weighs {weight} pounds and loses {c} pounds a month. {w.other} weighs {weight + 30} pounds and loses {c + a} pounds a month. What do they weigh together after {w.count(b)} months?",
        f"A hotel has {b} floors with {a + 10} rooms each. {c * 10} rooms are empty and every other room has 2 guests. How many guests are there?",
        f"In a basketball game {w.who} scored {a} two-point shots, {c} three-point shots and {b} free throws of one point each. {w.other} scored {a * 2} points less. How many points did they score together?",
        f"{w.who}'s team won {a + b} games and lost {c}. How many of the next {b + 10} games must it win to have won {60 + a}% of all its games?",
        f"{w.who} makes necklaces. Each one needs {a * 5} small beads and {c} large beads. {w.He} has {a * 5 * b + c} small and {c * b + a} large beads. How many necklaces can {w.he} make?",
        f"It rained {a} inches on Monday, {w.count(c)} times as much on Tuesday and {b} inches less on Wednesday than on both days together. How much did it rain in the three days?",
        f"{w.who} waters {w.count(b)} plants every {c} days with {a * 100} millilitres each. How many litres does {w.he} use in {c * 10} days?",
        f"A baker makes {a * 12} rolls an hour from {c} in the morning until noon. {w.He} puts {b} rolls in a bag. How many full bags does {w.he} have at noon?",
        f"{w.who} typed {a * 10} words a minute for {b * 5} minutes and then {c * 10} words a minute for half an hour. How many words is the text long?",
        f"A building is {a * 10 + c} metres high. A ladder of {b} steps of {c * 10} cm each stands against it. How many metres are missing to the top?",
    )  # fmt: skip


STORIES = (
    shopping, wages, travel, ages, sharing, factory, percent, geometry, rates, comparing, school, farm, saving, fractions,
    everyday, everyday,
)  # fmt: skip
