"""The text of the small GPT, generated: lines such as "417 four hundred and seventeen"."""

import random

import torch

CHARACTERS = "\n abcdefghijklmnopqrstuvwxyz0123456789"
ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def in_words(n: int) -> str:
    """0 <= n < 10000 as one says it: 417 -> "four hundred and seventeen"."""
    if n < 20:
        return ONES[n]
    if n < 100:
        return TENS[n // 10] + (f" {ONES[n % 10]}" if n % 10 else "")
    size, name, glue = (1000, "thousand", " ") if n >= 1000 else (100, "hundred", " and ")
    rest = n % size
    if name == "thousand" and 0 < rest < 100:
        glue = " and "
    return f"{in_words(n // size)} {name}" + (glue + in_words(rest) if rest else "")


def lines(*, held_out: bool) -> list[str]:
    """Every number below 10000 with its name, shuffled; each tenth line is held out of the training text."""
    numbers = list(range(10_000))
    random.Random(0).shuffle(numbers)
    return [f"{n} {in_words(n)}\n" for place, n in enumerate(numbers) if (place % 10 == 0) == held_out]


def encode(text: str) -> torch.Tensor:
    return torch.tensor([CHARACTERS.index(c) for c in text])


def decode(tokens: torch.Tensor) -> str:
    return "".join(CHARACTERS[t] for t in tokens.tolist())
