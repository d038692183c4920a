"""Scenes of the demo's chats with an answer that is worked out: sums, units, clocks, sequences.

The answers show the way to the result, because a small model can only calculate by writing its steps down. This module
does not know how scenes are mixed, cut and split into training and held-out.
"""

import random

from moray.targets.demo.facts import DAYS, LISTS, NAMES, NUMBERS, ORDINALS, UNITS
from moray.targets.demo.scenes import Turn, ask


def _add_worked(a: int, b: int) -> str:
    tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
    return (
        f"First add the tens: {a // 10 * 10} + {b // 10 * 10} = {tens}. Then add the ones: {a % 10} + {b % 10} = "
        f"{ones}. Together this makes {tens} + {ones} = {a + b}. So {a} + {b} = {a + b}."
    )


def arithmetic(rng: random.Random) -> list[Turn]:
    """A sum by tens and ones, then a difference and a product."""
    a, b, c, factor = rng.randint(11, 59), rng.randint(11, 39), rng.randint(2, 9), rng.randint(2, 5)
    name, item = rng.choice(NAMES), rng.choice(("coins", "books", "stamps", "shells", "cards", "stones"))
    total = a + b
    first = rng.choice(
        (
            (
                ask(rng, f"What is {a} + {b}?", f"Add {a} and {b}.", f"Can you work out {a} plus {b}?"),
                _add_worked(a, b),
            ),
            (
                ask(rng, f"{name} has {a} {item} and gets {b} more. How many {item} does {name} have now?"),
                f"{name} starts with {a} {item} and gets {b} more. {_add_worked(a, b)} {name} now has {total} {item}.",
            ),
        )
    )
    return [
        first,
        (
            rng.choice((f"And if you take away {c}?", f"Now subtract {c} from that.")),
            f"We had {total} before. Taking away {c} gives {total} - {c} = {total - c}. The new result is {total - c}.",
        ),
        (
            rng.choice((f"Now multiply {c} by {factor}.", f"What is {c} times {factor}?")),
            f"Think of it as adding {c} again and again: {' + '.join([str(c)] * factor)} = {c * factor}. So {c} x "
            f"{factor} = {c * factor}.",
        ),
    ]


def lists(rng: random.Random) -> list[Turn]:
    """Items in alphabetical order, the first and last of them, and the next one."""
    topic = rng.choice(list(LISTS))
    items = LISTS[topic].split()
    count = rng.choice(list(NUMBERS)[:4])
    start = rng.randint(0, len(items) - count)
    chosen = items[start : start + count]
    after = items[start + count] if start + count < len(items) else items[0]
    numbered = "\n".join(f"{i}. {item}" for i, item in enumerate(chosen, 1))
    number = NUMBERS[count]
    return [
        (
            ask(
                rng,
                f"Name {number} {topic} in order, beginning with {chosen[0]}.",
                f"Make a list of {number} {topic} from A to Z. Start at {chosen[0]}.",
            ),
            f"Here are {number} {topic} in alphabetical order:\n{numbered}\nThat makes {number} {topic} in total.",
        ),
        (
            "Which one comes first and which one comes last?",
            f"The first of the {topic} is {chosen[0]} and the last one is {chosen[-1]}. There are {number} in the "
            f"list.",
        ),
        (
            "What would come next?",
            f"After {chosen[-1]} the next of the {topic} would be {after}. Then the list would have "
            f"{NUMBERS[count + 1]}.",
        ),
    ]


def conversion(rng: random.Random) -> list[Turn]:
    """A quantity in a smaller unit, and the way back."""
    big, small, factor = rng.choice(UNITS)
    amount, more = rng.randint(2, 12), rng.randint(2, 9)

    def worked(n: int) -> str:
        return f"{n} x {factor} = {n * factor}, so {n} {big} are {n * factor} {small}."

    return [
        (
            ask(
                rng,
                f"How many {small} are {amount} {big}?",
                f"Convert {amount} {big} to {small}.",
                f"I have {amount} {big}. What is that in {small}?",
            ),
            f"To turn {big} into {small}, multiply by {factor}. {worked(amount)}",
        ),
        (f"And {more} {big}?", f"The rule stays the same: multiply by {factor}. {worked(more)}"),
        (
            "How do I go back the other way?",
            f"To turn {small} into {big}, divide by {factor}. For example, {more * factor} {small} divided by "
            f"{factor} are {more} {big}.",
        ),
    ]


def clock(rng: random.Random) -> list[Turn]:
    """A time some minutes later, or a weekday some days later."""
    if rng.random() < 0.5:
        hour, minute, delay = rng.randint(1, 10), 5 * rng.randint(0, 11), 5 * rng.randint(1, 11)

        def later(h: int, m: int, d: int) -> tuple[int, int, str]:
            end = m + d
            if end < 60:
                return h, end, f"{m} + {d} = {end} minutes, which is less than an hour. The time will be {h}:{end:02d}."
            rest = end - 60
            text = (
                f"{m} + {d} = {end} minutes, which is one hour and {rest} minutes. The time will be {h + 1}:{rest:02d}."
            )
            return h + 1, rest, text

        next_hour, next_minute, first = later(hour, minute, delay)
        return [
            (
                ask(
                    rng,
                    f"It is {hour}:{minute:02d}. What time is it in {delay} minutes?",
                    f"My train leaves {delay} minutes after {hour}:{minute:02d}. When is that?",
                ),
                f"Start at {hour}:{minute:02d} and add {delay} minutes. {first}",
            ),
            (
                f"And {delay} minutes after that?",
                f"Start at {next_hour}:{next_minute:02d} and add {delay} minutes. "
                + later(next_hour, next_minute, delay)[2],
            ),
        ]
    day, count = rng.randrange(7), rng.choice(list(NUMBERS)[:4])
    passed = [DAYS[(day + i) % 7] for i in range(1, count + 1)]
    return [
        (
            ask(
                rng,
                f"Today is {DAYS[day]}. Which day is it in {NUMBERS[count]} days?",
                f"Which day comes {NUMBERS[count]} days after {DAYS[day]}?",
            ),
            f"Count {NUMBERS[count]} days from {DAYS[day]}: {', '.join(passed)}. So it will be {passed[-1]}.",
        ),
        (
            "Is that a weekend?",
            f"{passed[-1]} is "
            + (
                "part of the weekend, so you can rest."
                if passed[-1][0] == "S"
                else "a working day. The weekend is Saturday and Sunday."
            ),
        ),
    ]


def counting(rng: random.Random) -> list[Turn]:
    """Numbers in equal steps, forwards and backwards."""
    start, step, count = rng.randint(1, 30), rng.choice((1, 2, 3, 5, 10)), rng.choice(list(NUMBERS)[:4])
    numbers = [start + i * step for i in range(count)]
    number = NUMBERS[count]

    def counted(line: list[int]) -> str:
        # Ordinals tell a small model how far it is, and so when to stop.
        return ", ".join(f"{ordinal} {n}" for ordinal, n in zip(ORDINALS, line, strict=False))

    return [
        (
            ask(
                rng,
                f"Count {number} numbers from {start} in steps of {step}.",
                f"Start at {start} and add {step}. Give me {number} numbers.",
            ),
            f"Here are {number} numbers in steps of {step}: {counted(numbers)}. We stop at {numbers[-1]}.",
        ),
        (
            "Now backwards.",
            f"Here are the {number} numbers backwards: {counted(numbers[::-1])}. We are back at {start}.",
        ),
    ]
