"""The demo target's chats: a deterministic generator of multi-turn conversations with real structure.

A laptop without a network has no chat corpus, and a drafter can only be judged on text whose next words
depend on the ones before. So each scene below answers from a small knowledge base or by working something
out (sums, clocks, orderings), in a form that recurs, with follow-up questions that refer back. Prompts are
split into training and held-out by their hash, so that the two can never meet. The module refuses to know
tokenizers, models and file layout; it is pure Python.
"""

# ruff: noqa: E501 - tables and wordings read best on one line each

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

HELDOUT_SHARE = 8  # one prompt in so many is held out, whatever the seed

Turn = tuple[str, str]
"""What the user says and what the assistant answers."""

Scene = Callable[[random.Random], list[Turn]]


@dataclass(frozen=True)
class DemoChat:
    """One conversation; the roles alternate, the user begins."""

    category: str
    turns: tuple[Turn, ...]

    @property
    def prompt(self) -> str:
        """The user's first message, by which the chat is identified."""
        return self.turns[0][0]

    @property
    def prompt_id(self) -> str:
        """SHA-256 of the prompt, as in HuggingFaceH4/ultrachat_200k."""
        return hashlib.sha256(self.prompt.encode()).hexdigest()

    @property
    def is_heldout(self) -> bool:
        """Whether the prompt belongs to the held-out side of the split; a greeting before it changes nothing."""
        question = self.prompt
        for opener in _OPENERS:
            question = question.removeprefix(opener)
        return int(hashlib.sha256(question.encode()).hexdigest()[:8], 16) % HELDOUT_SHARE == 0

    def as_row(self) -> dict[str, object]:
        """The chat in the schema of HuggingFaceH4/ultrachat_200k."""
        messages = [
            {"content": text, "role": role}
            for turn in self.turns
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        return {"prompt": self.prompt, "prompt_id": self.prompt_id, "messages": messages}


def generate_chats(num_chats: int, seed: int, heldout: bool) -> Iterator[DemoChat]:
    """Yield `num_chats` conversations of one side of the split; the same seed gives the same chats."""
    rng = random.Random(f"{seed}/{heldout}")
    categories = list(_SCENES)
    while num_chats > 0:
        category = rng.choice(categories)
        turns = _SCENES[category](rng)
        turns = turns[: rng.randint(1, min(len(turns), 4))]
        if len(turns) < 4 and rng.random() < 0.25:
            turns.append(_thanks(rng, category))
        chat = DemoChat(category, tuple(turns))
        if chat.is_heldout == heldout:
            num_chats -= 1
            yield chat


def generate_questions(num_questions: int, seed: int) -> list[dict[str, object]]:
    """Held-out prompts as Spec-Bench rows, evenly over the categories, no prompt twice.

    Every third question has two turns where its scene offers a second one.
    """
    rows: list[dict[str, object]] = []
    seen: set[str] = set()
    wanted = {category: num_questions // len(_SCENES) for category in _SCENES}
    for category in list(_SCENES)[: num_questions % len(_SCENES)]:
        wanted[category] += 1
    rng = random.Random(f"{seed}/questions")
    for category, count in wanted.items():
        while count > 0:
            chat = DemoChat(category, tuple(_SCENES[category](rng)))
            if not chat.is_heldout or chat.prompt in seen:
                continue
            seen.add(chat.prompt)
            num_turns = 2 if len(rows) % 3 == 2 else 1
            asked = [user for user, _ in chat.turns[:num_turns]]
            rows.append({"question_id": len(rows) + 1, "category": category, "turns": asked})
            count -= 1
    return rows


# --- knowledge -------------------------------------------------------------------------------------------

_NAMES = "Anna Ben Clara David Emma Hugo Mia Paul Rosa Tom".split()
_DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
_OPENERS = ("", "", "Please help me. ", "Hello! ", "Hi there. ", "Good morning. ", "Quick question: ", "I am curious. ")

# country, capital, continent, language, famous for
_COUNTRIES = [
    tuple(line.split("|"))
    for line in """France|Paris|Europe|French|cheese and museums
Italy|Rome|Europe|Italian|pasta and old ruins
Spain|Madrid|Europe|Spanish|music and sunny beaches
Germany|Berlin|Europe|German|bread and forests
Egypt|Cairo|Africa|Arabic|pyramids and a long river
Japan|Tokyo|Asia|Japanese|fast trains and gardens
Brazil|Brasilia|South America|Portuguese|football and rain forests
Peru|Lima|South America|Spanish|mountains and old cities
Australia|Canberra|Oceania|English|beaches and deserts""".splitlines()
]

# animal, group, home, food, habit, weight in kilograms
_ANIMALS = [
    tuple(line.split("|"))
    for line in """elephant|mammal|the savanna|grass and leaves|it lives in a family led by an old mother|5000
horse|mammal|open fields|grass and hay|it can sleep while standing|500
rabbit|mammal|meadows and burrows|grass and carrots|it warns its friends with its feet|2
wolf|mammal|cold forests|meat|it hunts in a pack|40
whale|mammal|the deep ocean|tiny sea animals|it sings long songs under water|90000
owl|bird|old trees|mice|it hunts at night without a sound|1
penguin|bird|icy coasts|fish|it swims well but cannot fly|20
frog|amphibian|ponds and wet grass|insects|it breathes partly through its skin|1
turtle|reptile|the warm sea|plants and jellyfish|it carries its house on its back|120
shark|fish|the open ocean|other fish|it grows new teeth all its life|800""".splitlines()
]

# thing, kind, purpose, made of, place
_THINGS = [
    tuple(line.split("|"))
    for line in """hammer|tool|driving nails into wood|steel and wood|a workshop
compass|instrument|finding the way north|metal and glass|a backpack
violin|instrument|playing music|thin wood and strings|a concert hall
ladder|tool|reaching high places|wood or metal|a garage
umbrella|object|staying dry in the rain|cloth and metal|a hallway
lamp|object|giving light at night|metal and glass|a bedroom
bicycle|vehicle|riding short distances|metal and rubber|a street
boat|vehicle|crossing water|wood|a harbour""".splitlines()
]

# topic, items in alphabetical order
_LISTS = {
    "fruits": "apples bananas cherries grapes lemons oranges pears plums",
    "vegetables": "beans cabbage carrots onions peas potatoes spinach tomatoes",
    "colours": "black blue brown green orange purple red yellow",
    "sports": "basketball cycling football hockey rowing running swimming tennis",
    "jobs": "artist baker doctor farmer nurse pilot sailor teacher",
    "musical instruments": "cello drums flute guitar harp piano trumpet violin",
}
_NUMBERS = {3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight"}
_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")

# big unit, small unit, factor
_UNITS = (
    ("kilometres", "metres", 1000), ("metres", "centimetres", 100), ("hours", "minutes", 60),
    ("weeks", "days", 7), ("litres", "millilitres", 1000), ("years", "months", 12),
)  # fmt: skip

# dish, ingredients, steps, minutes, replaceable ingredient, replacement
_DISHES = [
    ("pancakes", "flour, milk, eggs and butter", ("Mix the flour, milk and eggs in a bowl", "Let the batter rest", "Melt some butter in a pan", "Fry each side until it is golden"), 25, "milk", "oat milk"),
    ("tomato soup", "tomatoes, onions, garlic and cream", ("Chop the onions and garlic", "Fry them softly in a pot", "Add the tomatoes and let them cook", "Blend the soup and stir in the cream"), 35, "cream", "coconut milk"),
    ("fried rice", "rice, peas, eggs and soy sauce", ("Cook the rice and let it cool", "Fry the peas in a hot pan", "Add the rice and the eggs", "Season with soy sauce and serve"), 30, "eggs", "tofu"),
    ("apple pie", "apples, flour, butter and sugar", ("Make a dough with flour and butter", "Slice the apples and add the sugar", "Fill the dough with the apples", "Bake the pie until it is brown"), 70, "sugar", "honey"),
    ("vegetable curry", "potatoes, carrots, onions and spices", ("Fry the onions with the spices", "Add the potatoes and carrots", "Pour in water and let it simmer", "Taste it and serve with rice"), 45, "potatoes", "sweet potatoes"),
    ("omelette", "eggs, cheese, butter and herbs", ("Beat the eggs with a fork", "Melt the butter in a pan", "Pour in the eggs and wait", "Add the cheese and herbs, then fold"), 10, "cheese", "mushrooms"),
    ("bread", "flour, water, yeast and salt", ("Mix the flour, yeast and salt", "Add warm water and knead the dough", "Let the dough rise in a warm place", "Bake it in a hot oven"), 150, "yeast", "sourdough"),
    ("fruit salad", "apples, oranges, bananas and lemon juice", ("Wash and peel the fruit", "Cut everything into small pieces", "Pour the lemon juice over it", "Mix gently and keep it cool"), 15, "bananas", "grapes"),
]  # fmt: skip

# plain request, polite verb phrase, past tense
_REQUESTS = [
    tuple(line.split("|"))
    for line in """send me the report|sent you the report|the report
open the window|opened the window|the window
call the doctor|called the doctor|the doctor
clean the kitchen|cleaned the kitchen|the kitchen
book a table|booked a table|the table
bring the keys|brought the keys|the keys
read the letter|read the letter|the letter
water the plants|watered the plants|the plants""".splitlines()
]
_WHENS = ("today", "tomorrow", "before lunch", "this evening", "next week", "on Friday")

# hobby, why, first step, what you need
_HOBBIES = [
    tuple(line.split("|"))
    for line in """painting|it lets you say things without words|draw one small thing every day|paper, a brush and three colours
running|it clears your head and keeps you fit|run slowly for ten minutes|a pair of good shoes
cooking|you can share the result with friends|learn one simple dish well|a sharp knife and a pan
chess|it trains you to think ahead|solve one small puzzle a day|a board and a friend
singing|it makes you breathe and smile|sing a song you know well|nothing but your voice
reading|every book opens a new world|read ten pages before you sleep|a quiet chair and a good lamp
hiking|you see more when you walk|choose a short path near home|a map, water and warm clothes
swimming|it is gentle and uses the whole body|swim two calm lengths|a towel and a warm pool""".splitlines()
]

_PLACES = (
    "a quiet village",
    "the old forest",
    "a small island",
    "the snowy mountains",
    "a busy harbour",
    "the dusty desert",
)
_FINDS = (
    ("a golden key", "a tiny door in an old oak", "a library full of talking books"),
    ("a torn map", "a cave behind a waterfall", "a chest with letters from long ago"),
    ("a silver whistle", "a herd of white horses", "a valley that no one had seen before"),
    ("a glowing stone", "a stair under the ground", "a lake that shone like the moon"),
    ("a broken clock", "a tower without windows", "a man who repaired lost time"),
    ("a blue feather", "a nest as large as a house", "a bird that could tell the future"),
)  # fmt: skip
_MOODS = (("brave", "took a deep breath"), ("shy", "waited for a while"), ("clever", "made a careful plan"),
          ("curious", "looked at every corner"), ("tired", "sat down to rest first"))  # fmt: skip


# --- scenes ----------------------------------------------------------------------------------------------


def _article(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def _ask(rng: random.Random, *wordings: str) -> str:
    return rng.choice(_OPENERS) + rng.choice(wordings)


def _add_worked(a: int, b: int) -> str:
    tens, ones = a // 10 * 10 + b // 10 * 10, a % 10 + b % 10
    return (
        f"First add the tens: {a // 10 * 10} + {b // 10 * 10} = {tens}. Then add the ones: {a % 10} + {b % 10} = {ones}. "
        f"Together this makes {tens} + {ones} = {a + b}. So {a} + {b} = {a + b}."
    )


def _arithmetic(rng: random.Random) -> list[Turn]:
    a, b, c, factor = rng.randint(11, 59), rng.randint(11, 39), rng.randint(2, 9), rng.randint(2, 5)
    name, item = rng.choice(_NAMES), rng.choice(("coins", "books", "stamps", "shells", "cards", "stones"))
    total = a + b
    first = rng.choice(
        (
            (
                _ask(rng, f"What is {a} + {b}?", f"Add {a} and {b}.", f"Can you work out {a} plus {b}?"),
                _add_worked(a, b),
            ),
            (
                _ask(rng, f"{name} has {a} {item} and gets {b} more. How many {item} does {name} have now?"),
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
            f"Think of it as adding {c} again and again: {' + '.join([str(c)] * factor)} = {c * factor}. "
            f"So {c} x {factor} = {c * factor}.",
        ),
    ]


def _lists(rng: random.Random) -> list[Turn]:
    topic = rng.choice(list(_LISTS))
    items = _LISTS[topic].split()
    count = rng.choice(list(_NUMBERS)[:4])
    start = rng.randint(0, len(items) - count)
    chosen = items[start : start + count]
    after = items[start + count] if start + count < len(items) else items[0]
    numbered = "\n".join(f"{i}. {item}" for i, item in enumerate(chosen, 1))
    number = _NUMBERS[count]
    return [
        (
            _ask(
                rng,
                f"Name {number} {topic} in order, beginning with {chosen[0]}.",
                f"Make a list of {number} {topic} from A to Z. Start at {chosen[0]}.",
            ),
            f"Here are {number} {topic} in alphabetical order:\n{numbered}\nThat makes {number} {topic} in total.",
        ),
        (
            "Which one comes first and which one comes last?",
            f"The first of the {topic} is {chosen[0]} and the last one is {chosen[-1]}. There are {number} in the list.",
        ),
        (
            "What would come next?",
            f"After {chosen[-1]} the next of the {topic} would be {after}. Then the list would have {_NUMBERS[count + 1]}.",
        ),
    ]


def _conversion(rng: random.Random) -> list[Turn]:
    big, small, factor = rng.choice(_UNITS)
    amount, more = rng.randint(2, 12), rng.randint(2, 9)

    def worked(n: int) -> str:
        return f"{n} x {factor} = {n * factor}, so {n} {big} are {n * factor} {small}."

    return [
        (
            _ask(rng, f"How many {small} are {amount} {big}?", f"Convert {amount} {big} to {small}.",
                 f"I have {amount} {big}. What is that in {small}?"),
            f"To turn {big} into {small}, multiply by {factor}. {worked(amount)}",
        ),
        (f"And {more} {big}?", f"The rule stays the same: multiply by {factor}. {worked(more)}"),
        (
            "How do I go back the other way?",
            f"To turn {small} into {big}, divide by {factor}. For example, {more * factor} {small} divided by {factor} "
            f"are {more} {big}.",
        ),
    ]  # fmt: skip


def _facts(rng: random.Random) -> list[Turn]:
    country, capital, continent, language, famous = rng.choice(_COUNTRIES)
    turns = [
        (
            f"What is the capital of {country}?",
            f"The capital of {country} is {capital}. {country} lies in {continent}, and most people there speak {language}.",
        ),
        (
            rng.choice((f"Which language do people speak in {country}?", f"What do they speak in {capital}?")),
            f"Most people in {country} speak {language}. You will hear it in {capital}, the capital, and in the villages.",
        ),
        (
            rng.choice((f"What is {country} known for?", f"Why do people like {country}?")),
            f"{country} is known for {famous}. Many visitors begin in {capital}, the capital, and then see the rest of "
            f"the country.",
        ),
        (
            f"Plan a short trip to {country}.",
            f"Here is a plan for {country}:\n1. Morning: walk through the centre of {capital}.\n2. Afternoon: enjoy "
            f"{famous}.\n3. Evening: have dinner and learn a few words of {language}.\nHave a good time in {country}!",
        ),
    ]
    rng.shuffle(turns)
    turns[0] = (rng.choice(_OPENERS) + turns[0][0], turns[0][1])
    return turns


def _animals(rng: random.Random) -> list[Turn]:
    animal, group, home, food, habit, weight = rng.choice(_ANIMALS)
    the = _article(animal)
    about = (
        f"{the[0].upper()}{the[1:]} is a {group}. It lives in {home} and eats {food}. A special thing about the {animal} is "
        f"that {habit}. A grown one weighs about {weight} kilograms."
    ).replace("a amphibian", "an amphibian")
    return [
        (_ask(rng, f"Tell me about the {animal}.", f"What is {the}?", f"Explain what {the} is, for a child."), about),
        (rng.choice(("What does it eat?", "What is its food?")), f"The {animal} eats {food}. It finds its food in {home}."),
        (rng.choice(("Where does it live?", "Where can I see one?")), f"The {animal} lives in {home}. Go there early, be quiet, and remember that {habit}."),
        ("What is special about it?", f"A special thing about the {animal} is that {habit}. Not every {group} can do that."),
    ]  # fmt: skip


def _comparison(rng: random.Random) -> list[Turn]:
    one, two = rng.sample(_ANIMALS, 2)
    while one[5] == two[5]:
        one, two = rng.sample(_ANIMALS, 2)
    heavy, light = (one, two) if int(one[5]) > int(two[5]) else (two, one)
    return [
        (
            _ask(rng, f"Which is heavier, the {one[0]} or the {two[0]}?",
                 f"Compare the {one[0]} and the {two[0]}. Which one weighs more?"),
            f"The {heavy[0]} is heavier. The {heavy[0]} weighs about {heavy[5]} kilograms, while the {light[0]} weighs only "
            f"about {light[5]} kilograms.",
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
    ]  # fmt: skip


def _definitions(rng: random.Random) -> list[Turn]:
    thing, kind, purpose, material, place = rng.choice(_THINGS)
    a = _article(thing)
    return [
        (
            _ask(rng, f"What is {a}?", f"Define the word {thing}.", f"What does the word {thing} mean?", f"Explain {a} to me."),
            f"{a[0].upper()}{a[1:]} is {_article(kind)} for {purpose}. It is usually made of {material}, and you will often "
            f"find one in {place}.",
        ),
        ("Use it in a sentence.", f"Here is a sentence with the word {thing}: She went to {place} and took {a} for {purpose}."),
        ("What is it made of?", f"Most often {a} is made of {material}. That makes it good for {purpose}."),
    ]  # fmt: skip


def _story(rng: random.Random) -> list[Turn]:
    name, place = rng.choice(_NAMES), rng.choice(_PLACES)
    (found, way, goal), (mood, act) = rng.choice(_FINDS), rng.choice(_MOODS)
    return [
        (
            _ask(rng, f"Tell me a story about {name}, who lives in {place} and finds {found}.",
                 f"Write a short story. The hero is {name}, the place is {place}, and there is {found} in it."),
            f"Once upon a time there lived a child named {name} in {place}. One morning {name} found {found} near the road. "
            f"Nobody knew where it came from. {name} followed the old signs and came to {way}. What could be behind it?",
        ),
        (
            rng.choice((f"What happens next? Make {name} {mood}.", f"Go on, and let {name} be {mood}.")),
            f"{name} was {mood} and {act}. Then, with {found} in one hand, {name} went on from {way} and discovered {goal}. "
            f"It was the most wonderful thing that {name} had ever seen.",
        ),
        (
            rng.choice(("How does it end?", "Give the story a happy end.")),
            f"In the end {name} went home and told everyone about {goal}. From that day on, {found} lay on the table for "
            f"all to see, and {name} was never lonely again. The end.",
        ),
    ]  # fmt: skip


def _rewriting(rng: random.Random) -> list[Turn]:
    (request, done, thing), when, name = rng.choice(_REQUESTS), rng.choice(_WHENS), rng.choice(_NAMES)
    return [
        (
            _ask(rng, f'Make this more polite: "{name}, {request} {when}."', f'Rewrite this kindly: "{name}, {request} {when}."'),
            f'Here is a more polite version: "Dear {name}, could you please {request} {when}? That would be very kind of '
            f'you. Thank you in advance."',
        ),
        ("Make it shorter.", f'Here is a shorter version: "{name}, please {request} {when}. Thanks!"'),
        ("Now write the answer.", f'{name} could answer: "Of course! I have {done}. Let me know if {thing} needs anything else."'),
    ]  # fmt: skip


def _clock(rng: random.Random) -> list[Turn]:
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
                _ask(rng, f"It is {hour}:{minute:02d}. What time is it in {delay} minutes?",
                     f"My train leaves {delay} minutes after {hour}:{minute:02d}. When is that?"),
                f"Start at {hour}:{minute:02d} and add {delay} minutes. {first}",
            ),
            (f"And {delay} minutes after that?", f"Start at {next_hour}:{next_minute:02d} and add {delay} minutes. "
             + later(next_hour, next_minute, delay)[2]),
        ]  # fmt: skip
    day, count = rng.randrange(7), rng.choice(list(_NUMBERS)[:4])
    passed = [_DAYS[(day + i) % 7] for i in range(1, count + 1)]
    return [
        (
            _ask(rng, f"Today is {_DAYS[day]}. Which day is it in {_NUMBERS[count]} days?",
                 f"Which day comes {_NUMBERS[count]} days after {_DAYS[day]}?"),
            f"Count {_NUMBERS[count]} days from {_DAYS[day]}: {', '.join(passed)}. So it will be {passed[-1]}.",
        ),
        ("Is that a weekend?", f"{passed[-1]} is " + ("part of the weekend, so you can rest." if passed[-1][0] == "S"
         else "a working day. The weekend is Saturday and Sunday.")),
    ]  # fmt: skip


def _counting(rng: random.Random) -> list[Turn]:
    start, step, count = rng.randint(1, 30), rng.choice((1, 2, 3, 5, 10)), rng.choice(list(_NUMBERS)[:4])
    numbers = [start + i * step for i in range(count)]
    number = _NUMBERS[count]

    def counted(line: list[int]) -> str:
        # Ordinals let a small model know where it stands, and so when to stop.
        return ", ".join(f"{ordinal} {n}" for ordinal, n in zip(_ORDINALS, line, strict=False))

    return [
        (
            _ask(rng, f"Count {number} numbers from {start} in steps of {step}.", f"Start at {start} and add {step}. Give me {number} numbers."),
            f"Here are {number} numbers in steps of {step}: {counted(numbers)}. We stop at {numbers[-1]}.",
        ),
        ("Now backwards.", f"Here are the {number} numbers backwards: {counted(numbers[::-1])}. We are back at {start}."),
    ]  # fmt: skip


def _recipe(rng: random.Random) -> list[Turn]:
    dish, ingredients, steps, minutes, old, new = rng.choice(_DISHES)
    people = rng.choice(list(_NUMBERS))
    numbered = "\n".join(f"{i}. {step}." for i, step in enumerate(steps, 1))
    return [
        (
            _ask(rng, f"How do I make {dish} for {_NUMBERS[people]} people?", f"Give me a recipe for {dish}. We are {_NUMBERS[people]}.",
                 f"I want to cook {dish} for {_NUMBERS[people]}. What are the steps?"),
            f"For {dish} you need {ingredients}. Follow these steps:\n{numbered}\nEnjoy your {dish}!",
        ),
        ("How long does it take?", f"Making {dish} takes about {minutes} minutes. Take more time if you cook for {_NUMBERS[people]}."),
        (f"I have no {old}. What can I use?", f"You can use {new} instead of {old}. The {dish} will taste a little different, but still good."),
    ]  # fmt: skip


def _small_talk(rng: random.Random) -> list[Turn]:
    (hobby, reason, step, need), name = rng.choice(_HOBBIES), rng.choice(_NAMES)
    return [
        (
            _ask(rng, f"My name is {name} and I love {hobby}.", f"I am {name}. Should I try {hobby}?", f"{name} here. What do you think of {hobby}?"),
            f"Nice to meet you, {name}! {hobby[0].upper()}{hobby[1:]} is a lovely hobby, because {reason}. What do you enjoy "
            f"most about it?",
        ),
        ("I am a beginner. How do I start?", f"Start small, {name}: {step}. For {hobby} you only need {need}. Soon it will feel easy."),
        ("What do I need for it?", f"For {hobby} you need {need}. That is all, {name}. The rest comes with time."),
        ("Do you remember my name and my hobby?", f"Of course! Your name is {name}, and we talked about {hobby}. You can {step}."),
    ]  # fmt: skip


def _thanks(rng: random.Random, category: str) -> Turn:
    topic = category.replace("_", " ")
    return (
        rng.choice(("Thank you!", "Thanks, that helps.", "Great, thanks a lot.")),
        f"You are welcome! I am always happy to help with {topic}. Just ask if you have another question.",
    )


_SCENES: dict[str, Scene] = {
    "arithmetic": _arithmetic,
    "lists": _lists,
    "conversion": _conversion,
    "facts": _facts,
    "animals": _animals,
    "comparison": _comparison,
    "definitions": _definitions,
    "story": _story,
    "rewriting": _rewriting,
    "clock": _clock,
    "counting": _counting,
    "recipes": _recipe,
    "small_talk": _small_talk,
}
