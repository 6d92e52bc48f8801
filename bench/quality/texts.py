"""What the model reads: text that comes with Python, and pass keys hidden in it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle

from bench.traces.record import TEXTS, text

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Form:
    """How a key is hidden and asked for. answer: begins the answer; what follows it is the key."""

    head: str
    needle: str
    question: str
    answer: str
    paragraphs: Callable[[], list[str]]


def _filler() -> list[str]:
    return ["The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "]


def _prose() -> list[str]:
    """Paragraphs of Python's documentation without digits or code, in which keys would drown."""
    from pydoc_data.topics import topics

    parts = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    wanted = [p for p in parts if p.strip() and p[0] != " " and not any(c.isdigit() for c in p)]
    return [part + "\n\n" for part in wanted]


FORMS = {
    "filler": Form(
        head="There is an important pass key hidden in the text below. Remember it.\n",
        needle="The pass key is {key}. Remember it, {key} is the pass key. ",
        question="\nWhat is the pass key?",
        answer=" The pass key is",
        paragraphs=_filler,
    ),
    "prose": Form(
        head="<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n<|im_start|>user\n",
        needle="The special magic number is {key}. Remember: the special magic number is {key}.\n\n",
        question="What is the special magic number?<|im_end|>\n<|im_start|>assistant\n",
        answer="The special magic number is",
        paragraphs=_prose,
    ),
}
"""filler: a few sentences again and again, in which a small model finds a key at any length. prose: text that
draws attention to itself, in which it misses keys with dense attention, too."""


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


def cases(encode: Encode, form: str, tokens: int, depths: int, documents: int) -> Iterator[Case]:
    """`depths` x `documents` prompts of about `tokens` tokens, a new key in each, in one of FORMS. Deep ones
    first: the next case of a document begins as the one before, up to its key."""
    how = FORMS[form]
    paragraphs = [encode(part) for part in how.paragraphs()]
    head, question, answer = encode(how.head), encode(how.question), encode(how.answer)
    for number in range(documents):
        rng = random.Random(number)
        at = rng.randrange(len(paragraphs))
        for step in reversed(range(depths)):
            depth = step / max(1, depths - 1)
            key = "".join(rng.choices("123456789", k=5))
            needle = encode(how.needle.format(key=key))
            room = tokens - len(head) - len(needle) - len(question)
            before, after, taken = [], [], 0
            for paragraph in cycle(paragraphs[at:] + paragraphs[:at]):
                if taken + len(paragraph) > room:
                    break
                (before if taken < depth * room else after).extend(paragraph)
                taken += len(paragraph)
            document = head + before + needle + after
            yield Case(tokens, depth, document, question, answer, encode(" " + key))


def stretch(encode: Encode, name: str, tokens: int) -> list[int]:
    """The first `tokens` tokens of the text of that name, one of TEXTS."""
    return encode(text(name))[:tokens]


__all__ = ["FORMS", "TEXTS", "Case", "Form", "cases", "stretch"]
