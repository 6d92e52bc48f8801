"""A long document with one fact hidden in it: the log of a harbour, made from parts, the same each time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

FACT = "The pass key of the harbour office is 48217. Remember it. 48217 is the pass key."
QUESTION = "What is the pass key of the harbour office?"

_DEPTH = 0.4
"""Where the fact lies, as a share of the document."""

_TIMES = ("At dawn", "Before noon", "Around midday", "In the afternoon", "Towards evening", "After dark")
_SHIPS = (
    "the ferry",
    "a grain barge",
    "the mail boat",
    "an old trawler",
    "a timber ship",
    "the pilot cutter",
)
_PLACES = ("Aldmoor", "Fennick", "Saint Orren", "Westerholm", "Greyhaven", "the outer islands")
_EVENTS = (
    "came in from {place} with a light wind behind her",
    "waited off {place} until the fog had lifted",
    "took on water and left for {place}",
    "asked for a berth near the fish market after a slow trip from {place}",
    "unloaded timber that was meant for {place}",
    "was held at the quay, since the weather off {place} was poor",
)
_REMARKS = (
    "The keeper noted it and went back to his tea.",
    "Nobody on the quay was in a hurry.",
    "The customs clerk signed the papers without a word.",
    "Two gulls watched from the roof of the ice house.",
    "The tide was half out by then.",
    "Later the church bell rang and the street filled with people.",
    "A boy from the market carried the ropes.",
)


def harbour_log(count_tokens: Callable[[str], int], tokens: int) -> str:
    """A document of about `tokens` tokens, as `count_tokens` counts them, with FACT inside."""
    sample = " ".join(_take(50))
    per_sentence = count_tokens(sample) / 50
    sentences = _take(max(int(tokens / per_sentence), 1))
    sentences.insert(int(len(sentences) * _DEPTH), FACT)
    return "\n\n".join(" ".join(sentences[i : i + 6]) for i in range(0, len(sentences), 6))


def prompt(document: str, question: str) -> str:
    """What the model reads: the question last, so that all of the document is a prefix."""
    return f"{document}\n\nQuestion: {question} Answer from the text above, in one short sentence."


def _take(count: int) -> list[str]:
    sentences = _sentences()
    return [next(sentences) for _ in range(count)]


def _sentences() -> Iterator[str]:
    choose = random.Random(0).choice
    while True:
        event = choose(_EVENTS).format(place=choose(_PLACES))
        yield f"{choose(_TIMES)} {choose(_SHIPS)} {event}."
        yield choose(_REMARKS)
