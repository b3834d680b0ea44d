"""Short stories from a grammar: a plot is a list of sentences, each of which has several wordings.

Names, things and places are drawn once for a story and stay what they are to its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from random import Random
from string import Template

SHE = ("Mia", "Lily", "Ella", "Nora")
HE = ("Tom", "Ben", "Leo", "Paul")
# pools have nothing in common: a model this small does not learn to leave out what came before
POOLS: Mapping[str, tuple[str, ...]] = {
    "name": SHE + HE,
    "friend": ("Rosa", "Anna", "Max", "Sam", "Clara", "Finn"),
    "animal": ("fox", "rabbit", "mouse", "duck", "cat", "goat", "frog"),
    "other": ("bear", "dog", "horse", "squirrel", "bird", "lion"),
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
    "place": ("under the bridge", "in the garden", "beside the well", "near the old mill"),
    "second": ("behind the oak tree", "at the market", "by the lake", "at the end of the road"),
    "third": ("on the roof", "in a bush", "between two stones", "on top of a fence"),
    "food": ("honey cake", "apple pie", "warm bread", "carrot soup", "berry jam"),
    "tool": ("a piece of string", "a little glue", "some ribbon", "a bit of wire"),
}

LOST = (
    (
        "Once upon a time there was a $mood $animal named $name who lived $home.",
        "Long ago a $mood $animal named $name lived $home.",
    ),
    (
        "$She had a $colour $thing and took it everywhere.",
        "$Her best toy was a $colour $thing.",
        "What $she loved most was a $colour $thing.",
    ),
    (
        "One $day the $thing was gone.",
        "But one $day $she could not find the $thing.",
        "Then, on a $day, somebody took the $thing.",
    ),
    (
        "$name looked $place, but it was not there.",
        "First $she looked $place, but found nothing.",
        "Had $she left it $place? No, it was not there.",
    ),
    (
        "Then $she asked $friend the $other for help.",
        'Then $friend the $other came by and said, "I will help you."',
        "Luckily $she met $friend the $other, who had sharp eyes.",
    ),
    (
        "\n\nTogether they searched $second.",
        "\n\nThe two friends went to look $second.",
        "\n\nSo both of them walked on and looked $second.",
    ),
    (
        "At last they found the $colour $thing $third.",
        "And there, $third, lay the $colour $thing!",
        "It was late when $friend saw something $colour $third.",
    ),
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
    (
        "$Her $colour $thing was broken.",
        "Oh no, the $colour $thing was in two pieces!",
        "Now there was a big hole in the $colour $thing.",
    ),
    (
        "$name sat down $place and cried.",
        "$name carried the pieces home and was sad.",
        "For an hour $she did not say a word.",
    ),
    (
        '"What is wrong?" asked $friend the $other.',
        "Soon $friend the $other came to see what was wrong.",
        "By chance $friend the $other was not far away.",
    ),
    (
        '\n\n"My $thing is broken," said $name.',
        "\n\n$name showed $friend the pieces of the $thing.",
        "\n\nThey both looked at the poor $thing.",
    ),
    (
        "$friend fetched $tool and they set to work.",
        "They looked $second and found $tool.",
        '"All we need is $tool," said $friend.',
    ),
    (
        "Before dark the $colour $thing was as good as new.",
        "After an hour the $thing was whole again.",
        "Nobody could see any more where the $thing had been broken.",
    ),
    (
        "To say thanks, $name brought $friend some $food.",
        '"You are a true friend," said $name.',
        "$name did not know how to thank $friend.",
    ),
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
    ("$She had no money at all.", "But what could it be?", "It had to be something special."),
    (
        "So $she went to look $place and found some $colour paper.",
        "$She thought for a while $place, and then $she had an idea.",
        "An old raven who lived $place gave $name good advice.",
    ),
    (
        "All day long $she cut and painted, until there was a $colour $thing.",
        "With $tool $she made a $colour $thing.",
        "It took three days, and then a $colour $thing was ready.",
    ),
    (
        "\n\nThe party was $second.",
        "\n\nIn the evening all the animals met $second.",
        "\n\nThere was music and dancing $second.",
    ),
    (
        '$friend opened the box and cried, "A $colour $thing!"',
        "When $friend saw the $colour $thing, everyone cheered.",
        "$friend looked at the $colour $thing for a long time and smiled.",
    ),
    (
        '"I made it for you," said $name.',
        '"Nobody ever gave me such a fine $thing," said $friend.',
        "$friend had never been so happy.",
    ),
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
    (
        "The prize was a $colour $thing.",
        "The winner would get a $colour $thing.",
        "How $she wanted to win the $colour $thing!",
    ),
    (
        "The race began $place.",
        "They all stood in line $place, and the bell rang.",
        "Many had come to watch $place.",
    ),
    (
        "$name ran as fast as $she could and was soon in front.",
        "At first $name was the last of all, but $she did not give up.",
        "Step by step $she left the others behind.",
    ),
    (
        "\n\nThen $she saw $friend the $other, who had fallen $second.",
        "\n\nBut $second $friend the $other lay on the ground with a sore foot.",
        "\n\nAll at once $friend the $other called for help $second.",
    ),
    (
        "$name stopped and helped $friend to get up.",
        '"Hold on to me," said $name.',
        "$name forgot the race and turned around.",
    ),
    (
        "Side by side they came to the end of the race.",
        "Slowly they walked on together, and the others were long done.",
        "$name even carried $friend on the last part of the way.",
    ),
    (
        "The judge smiled and gave both of them the $colour $thing.",
        'But everyone clapped, and the judge said, "The $thing goes to $name!"',
        "The winner came to them and gave $name the $thing.",
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
        "Between two flashes of lightning $name heard somebody cry.",
    ),
    (
        "It was $friend the $other, who was wet and cold.",
        "Outside stood $friend the $other and could hardly speak.",
        "And who came in? It was $friend the $other.",
    ),
    (
        '"My house $place has no roof any more," said $friend.',
        '"I have lost my $colour $thing $place," said $friend.',
        '"The water is rising $place," said $friend.',
    ),
    (
        "\n\n$name lit a fire and warmed some $food.",
        "\n\n$name brought a blanket and some $food.",
        '\n\n"Sit down and have some $food," said $name.',
    ),
    (
        "They told each other stories until the storm was over.",
        "Soon $friend fell asleep.",
        "Outside the thunder grew louder and louder.",
    ),
    (
        "In the morning they went out with $tool and put everything right.",
        "In the morning the sun was shining, and they walked out $second.",
        "When day came, the sky was blue and a rainbow stood $second.",
    ),
    (
        'At the door $friend said, "You can always count on me."',
        "Later $friend came back with a $colour lamp as a present.",
        "$friend thanked $name and went home.",
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
    slots.update(pronouns(slots["name"]))
    sentences = [Template(rng.choice(wordings)) for wordings in rng.choice(PLOTS)]
    return joined(sentence.substitute(slots) for sentence in sentences)


def joined(sentences: Iterable[str]) -> str:
    """Sentences as running text; those that begin a paragraph say so by empty lines."""
    return " ".join(sentences).replace(" \n", "\n")
