"""What the model reads: text that comes with Python, and pass keys hidden in it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from bench.traces.record import TEXTS, text

Encode = Callable[[str], list[int]]

_HEAD = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n"
)
_NEEDLE = "The special magic number is {key}. Remember: the special magic number is {key}.\n\n"
_QUESTION = "What is the special magic number?<|im_end|>\n<|im_start|>assistant\n"
_ANSWER = "The special magic number is"
"""Begins the answer, in the needle's own words; what follows is the key."""


@dataclass(frozen=True)
class Case:
    """A pass key at a depth (0 to 1) of a text. document and question: the prompt's tokens. answer: what
    decode is given. key: what it should say after that, from the answer's last token on."""

    tokens: int
    depth: float
    document: list[int]
    question: list[int]
    answer: list[int]
    key: list[int]

    @property
    def prompt(self) -> list[int]:
        return self.document + self.question


def cases(encode: Encode, tokens: int, depths: int, documents: int) -> Iterator[Case]:
    """`depths` x `documents` prompts of about `tokens` tokens, a new key in each. Deep ones first: the next
    case of a document begins as the one before, up to its key."""
    paragraphs = [encode(part + "\n\n") for part in _prose()]
    for number in range(documents):
        rng = random.Random(number)
        at = rng.randrange(len(paragraphs))
        head, question, answer = encode(_HEAD), encode(_QUESTION), encode(_ANSWER)
        for step in reversed(range(depths)):
            depth = step / max(1, depths - 1)
            key = "".join(rng.choices("123456789", k=5))
            needle = encode(_NEEDLE.format(key=key))
            room = tokens - len(head) - len(needle) - len(question)
            before, after, taken = [], [], 0
            for paragraph in paragraphs[at:] + paragraphs[:at]:
                if taken + len(paragraph) > room:
                    break
                (before if taken < depth * room else after).extend(paragraph)
                taken += len(paragraph)
            document = head + before + needle + after
            yield Case(tokens, depth, document, question, answer, encode(" " + key))


def _prose() -> list[str]:
    """Paragraphs of Python's documentation without digits or code, in which keys would drown."""
    from pydoc_data.topics import topics

    found = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    return [part for part in found if part.strip() and part[0] != " " and not any(c.isdigit() for c in part)]


def stretch(encode: Encode, name: str, tokens: int) -> list[int]:
    """The first `tokens` tokens of the text of that name, one of TEXTS."""
    return encode(text(name))[:tokens]


__all__ = ["TEXTS", "Case", "cases", "stretch"]
