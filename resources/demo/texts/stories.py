"""Short stories from a grammar: a plot is a list of sentences, each of which has several wordings.

Names, things and places are drawn once for a story and stay what they are to its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from random import Random
from string import Template

SHE = ("Mia", "Lily", "Anna", "Rosa", "Ella", "Nora")
HE = ("Tom", "Ben", "Max", "Leo", "Sam", "Paul")
ANIMALS = ("fox", "rabbit", "bear", "mouse", "duck", "cat", "goat", "frog")
PLACES = (
    "under the bridge",
    "behind the oak tree",
    "in the garden",
    "at the market",
    "beside the well",
    "near the old mill",
    "on the roof",
    "by the lake",
)
POOLS: Mapping[str, tuple[str, ...]] = {
    "name": SHE + HE,
    "friend": SHE + HE,
    "animal": ANIMALS,
    "other": ANIMALS,
    "mood": ("little", "brave", "clever", "shy", "cheerful", "curious"),
    "home": (
        "near a quiet river",
        "at the edge of the forest",
        "in a small village",
        "on a green hill",
        "by the sea",
    ),
    "day": ("sunny morning", "rainy afternoon", "cold evening", "windy day"),
    "colour": ("red", "blue", "green", "yellow", "silver", "white"),
    "thing": ("kite", "drum", "boat", "scarf", "key", "clock", "ball", "lamp"),
    "place": PLACES,
    "second": PLACES,
    "third": PLACES,
    "food": ("honey cake", "apple pie", "warm bread", "carrot soup", "berry jam"),
    "tool": ("a piece of string", "a little glue", "some ribbon", "a bit of wire"),
}
DISTINCT = (("name", "friend"), ("animal", "other"), ("place", "second", "third"))

LOST = (
    (
        "Once upon a time there was a $mood $animal named $name who lived $home.",
        "Long ago a $mood $animal named $name lived $home.",
    ),
    ("$She had a $colour $thing and took it everywhere.", "$Her best toy was a $colour $thing."),
    ("One $day the $thing was gone.", "But one $day $she could not find the $thing."),
    ("$name looked $place, but it was not there.", "First $she looked $place, but found nothing."),
    (
        "Then $she asked $friend the $other for help.",
        'Then $friend the $other came by and said, "I will help you."',
    ),
    ("\n\nTogether they searched $second.", "\n\nThe two friends went to look $second."),
    ("At last they found the $colour $thing $third.", "And there, $third, lay the $colour $thing!"),
    (
        '"Thank you, $friend!" said $name.',
        "$name was so happy that $she danced.",
        "$name gave $friend a big hug.",
    ),
    (
        "From that day on they were best friends.",
        "And the $thing was never lost again.",
        "That evening they shared some $food.",
    ),
)
BROKEN = (
    (
        "One $day $name the $animal heard a loud crack.",
        "One $day $name the $animal fell over a stone.",
    ),
    ("$Her $colour $thing was broken.", "Oh no, the $colour $thing was in two pieces!"),
    ("$name sat down $place and cried.", "$name carried the pieces home and was sad."),
    (
        '"What is wrong?" asked $friend the $other.',
        "Soon $friend the $other came to see what was wrong.",
    ),
    (
        '\n\n"My $thing is broken," said $name.',
        "\n\n$name showed $friend the pieces of the $thing.",
    ),
    ("$friend fetched $tool and they set to work.", "They looked $second and found $tool."),
    (
        "Before dark the $colour $thing was as good as new.",
        "After an hour the $thing was whole again.",
    ),
    ("To say thanks, $name brought $friend some $food.", '"You are a true friend," said $name.'),
    (
        "Then they laughed and played until the stars came out.",
        "And $name was never careless again.",
        "That night $name slept with a smile.",
    ),
)
PRESENT = (
    (
        (
            "It was the birthday of $friend the $other, "
            "and $name the $animal wanted to bring a present."
        ),
        "$name the $animal wanted to make a present for $friend the $other.",
    ),
    ("$She had no money at all.", "But what could it be?"),
    (
        "So $she went to look $place and found some $colour paper.",
        "$She thought for a while $place, and then $she had an idea.",
    ),
    (
        "All day long $she cut and painted, until there was a $colour $thing.",
        "With $tool $she made a $colour $thing.",
    ),
    ("\n\nThe party was $second.", "\n\nIn the evening all the animals met $second."),
    (
        '$friend opened the box and cried, "A $colour $thing!"',
        "When $friend saw the $colour $thing, everyone cheered.",
    ),
    ('"I made it for you," said $name.', '"Nobody ever gave me such a fine $thing," said $friend.'),
    (
        "Then they all had some $food.",
        "$friend has kept the $thing to this day.",
        "It was the best birthday of all.",
    ),
)
RACE = (
    (
        "Every summer the animals held a race, and $name the $animal had never won.",
        "On the day of the big race $name the $animal was very nervous.",
    ),
    ("The prize was a $colour $thing.", "The winner would get a $colour $thing."),
    ("The race began $place.", "They all stood in line $place, and the bell rang."),
    (
        "$name ran as fast as $she could and was soon in front.",
        "At first $name was the last of all, but $she did not give up.",
    ),
    (
        "\n\nThen $she saw $friend the $other, who had fallen $second.",
        "\n\nBut $second $friend the $other lay on the ground with a sore foot.",
    ),
    ("$name stopped and helped $friend to get up.", '"Hold on to me," said $name.'),
    (
        "Side by side they came to the end of the race.",
        "Slowly they walked on together, and the others were long done.",
    ),
    (
        "The judge smiled and gave both of them the $colour $thing.",
        'But everyone clapped, and the judge said, "The $thing goes to $name!"',
    ),
    (
        "A good friend is worth more than a prize.",
        "And then there was $food for everyone.",
        "$name has never been so proud.",
    ),
)
STORM = (
    (
        "All night the wind blew around the house of $name the $animal.",
        "A great storm came to the place where $name the $animal lived.",
    ),
    (
        'Then someone knocked, and a voice called, "Please let me in!"',
        "At midnight there was a knock at the door.",
    ),
    (
        "It was $friend the $other, who was wet and cold.",
        "Outside stood $friend the $other and could hardly speak.",
    ),
    (
        '"My house $place has no roof any more," said $friend.',
        '"I have lost my $colour $thing $place," said $friend.',
    ),
    ("\n\n$name lit a fire and warmed some $food.", "\n\n$name brought a blanket and some $food."),
    ("They told each other stories until the storm was over.", "Soon $friend fell asleep."),
    (
        "In the morning they went out with $tool and put everything right.",
        "In the morning the sun was shining, and they walked out $second.",
    ),
    (
        'At the door $friend said, "You can always count on me."',
        "Later $friend came back with a $colour lamp as a present.",
    ),
    (
        "Since then $name has not been afraid of storms.",
        "Since then they have been neighbours and good friends.",
    ),
)
PLOTS = (LOST, BROKEN, PRESENT, RACE, STORM)


def pronouns(name: str) -> dict[str, str]:
    """What stands for the hero's name."""
    words = ("she", "her") if name in SHE else ("he", "his")
    return {"she": words[0], "She": words[0].title(), "Her": words[1].title()}


def story(rng: Random) -> str:
    """One story."""
    slots = {key: rng.choice(pool) for key, pool in POOLS.items()}
    for keys in DISTINCT:
        slots.update(zip(keys, rng.sample(POOLS[keys[0]], len(keys)), strict=True))
    slots.update(pronouns(slots["name"]))
    sentences = [Template(rng.choice(wordings)) for wordings in rng.choice(PLOTS)]
    return joined(sentence.substitute(slots) for sentence in sentences)


def joined(sentences: Iterable[str]) -> str:
    """Sentences as running text; those that begin a paragraph say so by empty lines."""
    return " ".join(sentences).replace(" \n", "\n")
