"""Eight prompts beside the bundled ones, of which no text of the training begins."""

FURTHER = (
    "def find_max(data):",
    "class Queue:\n    def __init__(self):\n        self._values = []\n\n    def put(self, item):",
    "def is_prime(number):",
    "def count_words(line):",
    "def gcd(a, b):",
    "Once upon a time there was a curious duck named Paul",
    "All night the wind blew around the house of Nora the goat.",
    "One rainy afternoon Leo the cat fell over a stone.",
)
