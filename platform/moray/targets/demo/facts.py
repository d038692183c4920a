"""What the demo's scenes know: small tables of places, animals, things, dishes and wordings.

They are separate so that a scene can be read without its facts, and a fact added without touching code. This module
does not know how chats are built from them.
"""

NAMES = "Anna Ben Clara David Emma Hugo Mia Paul Rosa Tom".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
OPENERS = ("", "", "Please help me. ", "Hello! ", "Hi there. ", "Good morning. ", "Quick question: ", "I am curious. ")

# country, capital, continent, language, famous for
COUNTRIES = [
    tuple(line.split("|"))
    for line in """\
France|Paris|Europe|French|cheese and museums
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
ANIMALS = [
    tuple(line.split("|"))
    for line in """\
elephant|mammal|the savanna|grass and leaves|it lives in a family led by an old mother|5000
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
THINGS = [
    tuple(line.split("|"))
    for line in """\
hammer|tool|driving nails into wood|steel and wood|a workshop
compass|instrument|finding the way north|metal and glass|a backpack
violin|instrument|playing music|thin wood and strings|a concert hall
ladder|tool|reaching high places|wood or metal|a garage
umbrella|object|staying dry in the rain|cloth and metal|a hallway
lamp|object|giving light at night|metal and glass|a bedroom
bicycle|vehicle|riding short distances|metal and rubber|a street
boat|vehicle|crossing water|wood|a harbour""".splitlines()
]

# topic, items in alphabetical order
LISTS = {
    "fruits": "apples bananas cherries grapes lemons oranges pears plums",
    "vegetables": "beans cabbage carrots onions peas potatoes spinach tomatoes",
    "colours": "black blue brown green orange purple red yellow",
    "sports": "basketball cycling football hockey rowing running swimming tennis",
    "jobs": "artist baker doctor farmer nurse pilot sailor teacher",
    "musical instruments": "cello drums flute guitar harp piano trumpet violin",
}
NUMBERS = {3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight"}
ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")

# big unit, small unit, factor
UNITS = (
    ("kilometres", "metres", 1000),
    ("metres", "centimetres", 100),
    ("hours", "minutes", 60),
    ("weeks", "days", 7),
    ("litres", "millilitres", 1000),
    ("years", "months", 12),
)

# dish, ingredients, steps, minutes, replaceable ingredient, replacement
DISHES = [
    (
        "pancakes",
        "flour, milk, eggs and butter",
        (
            "Mix the flour, milk and eggs in a bowl",
            "Let the batter rest",
            "Melt some butter in a pan",
            "Fry each side until it is golden",
        ),
        25,
        "milk",
        "oat milk",
    ),
    (
        "tomato soup",
        "tomatoes, onions, garlic and cream",
        (
            "Chop the onions and garlic",
            "Fry them softly in a pot",
            "Add the tomatoes and let them cook",
            "Blend the soup and stir in the cream",
        ),
        35,
        "cream",
        "coconut milk",
    ),
    (
        "fried rice",
        "rice, peas, eggs and soy sauce",
        (
            "Cook the rice and let it cool",
            "Fry the peas in a hot pan",
            "Add the rice and the eggs",
            "Season with soy sauce and serve",
        ),
        30,
        "eggs",
        "tofu",
    ),
    (
        "apple pie",
        "apples, flour, butter and sugar",
        (
            "Make a dough with flour and butter",
            "Slice the apples and add the sugar",
            "Fill the dough with the apples",
            "Bake the pie until it is brown",
        ),
        70,
        "sugar",
        "honey",
    ),
    (
        "vegetable curry",
        "potatoes, carrots, onions and spices",
        (
            "Fry the onions with the spices",
            "Add the potatoes and carrots",
            "Pour in water and let it simmer",
            "Taste it and serve with rice",
        ),
        45,
        "potatoes",
        "sweet potatoes",
    ),
    (
        "omelette",
        "eggs, cheese, butter and herbs",
        (
            "Beat the eggs with a fork",
            "Melt the butter in a pan",
            "Pour in the eggs and wait",
            "Add the cheese and herbs, then fold",
        ),
        10,
        "cheese",
        "mushrooms",
    ),
    (
        "bread",
        "flour, water, yeast and salt",
        (
            "Mix the flour, yeast and salt",
            "Add warm water and knead the dough",
            "Let the dough rise in a warm place",
            "Bake it in a hot oven",
        ),
        150,
        "yeast",
        "sourdough",
    ),
    (
        "fruit salad",
        "apples, oranges, bananas and lemon juice",
        (
            "Wash and peel the fruit",
            "Cut everything into small pieces",
            "Pour the lemon juice over it",
            "Mix gently and keep it cool",
        ),
        15,
        "bananas",
        "grapes",
    ),
]

# request, the same when done, what it was about
REQUESTS = [
    tuple(line.split("|"))
    for line in """\
send me the report|sent you the report|the report
open the window|opened the window|the window
call the doctor|called the doctor|the doctor
clean the kitchen|cleaned the kitchen|the kitchen
book a table|booked a table|the table
bring the keys|brought the keys|the keys
read the letter|read the letter|the letter
water the plants|watered the plants|the plants""".splitlines()
]
WHENS = ("today", "tomorrow", "before lunch", "this evening", "next week", "on Friday")

# hobby, why, first step, what you need
HOBBIES = [
    tuple(line.split("|"))
    for line in """\
painting|it lets you say things without words|draw one small thing every day|paper, a brush and three colours
running|it clears your head and keeps you fit|run slowly for ten minutes|a pair of good shoes
cooking|you can share the result with friends|learn one simple dish well|a sharp knife and a pan
chess|it trains you to think ahead|solve one small puzzle a day|a board and a friend
singing|it makes you breathe and smile|sing a song you know well|nothing but your voice
reading|every book opens a new world|read ten pages before you sleep|a quiet chair and a good lamp
hiking|you see more when you walk|choose a short path near home|a map, water and warm clothes
swimming|it is gentle and uses the whole body|swim two calm lengths|a towel and a warm pool""".splitlines()
]

PLACES = (
    "a quiet village",
    "the old forest",
    "a small island",
    "the snowy mountains",
    "a busy harbour",
    "the dusty desert",
)
FINDS = (
    ("a golden key", "a tiny door in an old oak", "a library full of talking books"),
    ("a torn map", "a cave behind a waterfall", "a chest with letters from long ago"),
    ("a silver whistle", "a herd of white horses", "a valley that no one had seen before"),
    ("a glowing stone", "a stair under the ground", "a lake that shone like the moon"),
    ("a broken clock", "a tower without windows", "a man who repaired lost time"),
    ("a blue feather", "a nest as large as a house", "a bird that could tell the future"),
)
MOODS = (
    ("brave", "took a deep breath"),
    ("shy", "waited for a while"),
    ("clever", "made a careful plan"),
    ("curious", "looked at every corner"),
    ("tired", "sat down to rest first"),
)
