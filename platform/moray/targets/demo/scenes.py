"""Scenes of the demo's chats with answers from a table of facts, in recurring wordings.

A scene draws its facts and returns a question with its answer, and follow-up questions that refer back. This module
does not know how scenes are mixed, cut and split into training and held-out; scenes with answers that are worked out
are in `exercises`.
"""

import random
from collections.abc import Callable

from moray.targets.demo.facts import (
    ANIMALS,
    COUNTRIES,
    DISHES,
    FINDS,
    HOBBIES,
    MOODS,
    NAMES,
    NUMBERS,
    OPENERS,
    PLACES,
    REQUESTS,
    THINGS,
    WHENS,
)

Turn = tuple[str, str]
"""What the user says and what the assistant answers."""

Scene = Callable[[random.Random], list[Turn]]


def _article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def ask(rng: random.Random, *wordings: str) -> str:
    """One of the wordings after one of the openers, which make prompts differ."""
    return rng.choice(OPENERS) + rng.choice(wordings)


def facts(rng: random.Random) -> list[Turn]:
    """Countries: capital, language, fame and a trip."""
    country, capital, continent, language, famous = rng.choice(COUNTRIES)
    turns = [
        (
            f"What is the capital of {country}?",
            f"The capital of {country} is {capital}. {country} lies in {continent}, and most people there speak "
            f"{language}.",
        ),
        (
            rng.choice((f"Which language do people speak in {country}?", f"What do they speak in {capital}?")),
            f"Most people in {country} speak {language}. You will hear it in {capital}, the capital, and in the "
            f"villages.",
        ),
        (
            rng.choice((f"What is {country} known for?", f"Why do people like {country}?")),
            f"{country} is known for {famous}. Many visitors begin in {capital}, the capital, and then see the rest "
            f"of the country.",
        ),
        (
            f"Plan a short trip to {country}.",
            f"Here is a plan for {country}:\n1. Morning: walk through the centre of {capital}.\n2. Afternoon: enjoy "
            f"{famous}.\n3. Evening: have dinner and learn a few words of {language}.\nHave a good time in {country}!",
        ),
    ]
    rng.shuffle(turns)
    turns[0] = (rng.choice(OPENERS) + turns[0][0], turns[0][1])
    return turns


def animals(rng: random.Random) -> list[Turn]:
    """One animal: what it is, what it eats and where it lives."""
    animal, group, home, food, habit, weight = rng.choice(ANIMALS)
    the = _article(animal)
    about = (
        f"{the[0].upper()}{the[1:]} is a {group}. It lives in {home} and eats {food}. A special thing about the "
        f"{animal} is that {habit}. A grown one weighs about {weight} kilograms."
    ).replace("a amphibian", "an amphibian")
    return [
        (ask(rng, f"Tell me about the {animal}.", f"What is {the}?", f"Explain what {the} is, for a child."), about),
        (
            rng.choice(("What does it eat?", "What is its food?")),
            f"The {animal} eats {food}. It finds its food in {home}.",
        ),
        (
            rng.choice(("Where does it live?", "Where can I see one?")),
            f"The {animal} lives in {home}. Go there early, be quiet, and remember that {habit}.",
        ),
        (
            "What is special about it?",
            f"A special thing about the {animal} is that {habit}. Not every {group} can do that.",
        ),
    ]


def comparison(rng: random.Random) -> list[Turn]:
    """Two animals: which one is heavier, and their food and homes."""
    one, two = rng.sample(ANIMALS, 2)
    while one[5] == two[5]:
        one, two = rng.sample(ANIMALS, 2)
    heavy, light = (one, two) if int(one[5]) > int(two[5]) else (two, one)
    return [
        (
            ask(
                rng,
                f"Which is heavier, the {one[0]} or the {two[0]}?",
                f"Compare the {one[0]} and the {two[0]}. Which one weighs more?",
            ),
            f"The {heavy[0]} is heavier. The {heavy[0]} weighs about {heavy[5]} kilograms, while the {light[0]} "
            f"weighs only about {light[5]} kilograms.",
        ),
        (
            "And what do they eat?",
            f"They eat different things. The {heavy[0]} eats {heavy[3]}, while the {light[0]} eats {light[3]}.",
        ),
        (
            "Do they live in the same place?",
            f"The {heavy[0]} lives in {heavy[2]}, and the {light[0]} lives in {light[2]}. "
            + ("So yes, they could meet." if heavy[2] == light[2] else "So no, they would rarely meet."),
        ),
    ]


def definitions(rng: random.Random) -> list[Turn]:
    """A thing: what it is for, a sentence with it, its material."""
    thing, kind, purpose, material, place = rng.choice(THINGS)
    a = _article(thing)
    return [
        (
            ask(
                rng,
                f"What is {a}?",
                f"Define the word {thing}.",
                f"What does the word {thing} mean?",
                f"Explain {a} to me.",
            ),
            f"{a[0].upper()}{a[1:]} is {_article(kind)} for {purpose}. It is usually made of {material}, and you "
            f"will often find one in {place}.",
        ),
        (
            "Use it in a sentence.",
            f"Here is a sentence with the word {thing}: She went to {place} and took {a} for {purpose}.",
        ),
        ("What is it made of?", f"Most often {a} is made of {material}. That makes it good for {purpose}."),
    ]


def story(rng: random.Random) -> list[Turn]:
    """A story in three parts that keeps its name, place and find throughout."""
    name, place = rng.choice(NAMES), rng.choice(PLACES)
    (found, way, goal), (mood, act) = rng.choice(FINDS), rng.choice(MOODS)
    return [
        (
            ask(
                rng,
                f"Tell me a story about {name}, who lives in {place} and finds {found}.",
                f"Write a short story. The hero is {name}, the place is {place}, and there is {found} in it.",
            ),
            f"Once upon a time there lived a child named {name} in {place}. One morning {name} found {found} near "
            f"the road. Nobody knew where it came from. {name} followed the old signs and came to {way}. What could "
            f"be behind it?",
        ),
        (
            rng.choice((f"What happens next? Make {name} {mood}.", f"Go on, and let {name} be {mood}.")),
            f"{name} was {mood} and {act}. Then, with {found} in one hand, {name} went on from {way} and discovered "
            f"{goal}. It was the most wonderful thing that {name} had ever seen.",
        ),
        (
            rng.choice(("How does it end?", "Give the story a happy end.")),
            f"In the end {name} went home and told everyone about {goal}. From that day on, {found} lay on the table "
            f"for all to see, and {name} was never lonely again. The end.",
        ),
    ]


def rewriting(rng: random.Random) -> list[Turn]:
    """A request made polite, then short, then answered."""
    (request, done, thing), when, name = rng.choice(REQUESTS), rng.choice(WHENS), rng.choice(NAMES)
    return [
        (
            ask(
                rng,
                f'Make this more polite: "{name}, {request} {when}."',
                f'Rewrite this kindly: "{name}, {request} {when}."',
            ),
            f'Here is a more polite version: "Dear {name}, could you please {request} {when}? That would be very '
            f'kind of you. Thank you in advance."',
        ),
        ("Make it shorter.", f'Here is a shorter version: "{name}, please {request} {when}. Thanks!"'),
        (
            "Now write the answer.",
            f'{name} could answer: "Of course! I have {done}. Let me know if {thing} needs anything else."',
        ),
    ]


def recipe(rng: random.Random) -> list[Turn]:
    """A dish: numbered steps, the time it takes, a replacement."""
    dish, ingredients, steps, minutes, old, new = rng.choice(DISHES)
    people = rng.choice(list(NUMBERS))
    numbered = "\n".join(f"{i}. {step}." for i, step in enumerate(steps, 1))
    return [
        (
            ask(
                rng,
                f"How do I make {dish} for {NUMBERS[people]} people?",
                f"Give me a recipe for {dish}. We are {NUMBERS[people]}.",
                f"I want to cook {dish} for {NUMBERS[people]}. What are the steps?",
            ),
            f"For {dish} you need {ingredients}. Follow these steps:\n{numbered}\nEnjoy your {dish}!",
        ),
        (
            "How long does it take?",
            f"Making {dish} takes about {minutes} minutes. Take more time if you cook for {NUMBERS[people]}.",
        ),
        (
            f"I have no {old}. What can I use?",
            f"You can use {new} instead of {old}. The {dish} will taste a little different, but still good.",
        ),
    ]


def small_talk(rng: random.Random) -> list[Turn]:
    """A hobby and a name that later turns remember."""
    (hobby, reason, step, need), name = rng.choice(HOBBIES), rng.choice(NAMES)
    return [
        (
            ask(
                rng,
                f"My name is {name} and I love {hobby}.",
                f"I am {name}. Should I try {hobby}?",
                f"{name} here. What do you think of {hobby}?",
            ),
            f"Nice to meet you, {name}! {hobby[0].upper()}{hobby[1:]} is a lovely hobby, because {reason}. What do "
            f"you enjoy most about it?",
        ),
        (
            "I am a beginner. How do I start?",
            f"Start small, {name}: {step}. For {hobby} you only need {need}. Soon it will feel easy.",
        ),
        ("What do I need for it?", f"For {hobby} you need {need}. That is all, {name}. The rest comes with time."),
        (
            "Do you remember my name and my hobby?",
            f"Of course! Your name is {name}, and we talked about {hobby}. You can {step}.",
        ),
    ]


def thanks(rng: random.Random, category: str) -> Turn:
    """A friendly last turn that names the category."""
    topic = category.replace("_", " ")
    return (
        rng.choice(("Thank you!", "Thanks, that helps.", "Great, thanks a lot.")),
        f"You are welcome! I am always happy to help with {topic}. Just ask if you have another question.",
    )
