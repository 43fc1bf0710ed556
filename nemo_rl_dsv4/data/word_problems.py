"""Two-step arithmetic word problems that a model of a few million parameters can learn.

Every problem is a template filled with names, things and three operands. Two properties hold by construction:

- Validation and training never share operands. A hash of the triple (a, b, c) alone decides the side, so no training
  problem of any template, name or seed has the three numbers of a validation problem.
- All short prompts have the same number of words, and all long ones too (long ones carry distracting sentences in
  front, to reach past 128 tokens), so that a batch falls into two groups of equal length.
"""

import dataclasses
import hashlib
import random
import re
from dataclasses import dataclass

from nemo_rl_dsv4.data.problem import Problem
from nemo_rl_dsv4.data.spec import DatasetSpec, nearest
from nemo_rl_dsv4.errors import UserError

NAMES = ("Ana", "Ben", "Cora", "Dan", "Eli", "Fay", "Gus", "Ida")
THINGS = ("apples", "books", "coins", "cups", "eggs", "pens", "shells", "stamps")
PLACES = ("farm", "lake", "market", "park", "school", "shop")
LOOKS = ("big", "busy", "new", "old", "quiet", "small")


@dataclass(frozen=True)
class Template:
    """A question about (a op1 b) op2 c."""

    text: str
    ops: str


# Level 1 is the first four, level 2 the first eight, level 3 all. Each has SHORT_WORDS words, numbers and signs.
TEMPLATES = (
    Template("{n} has {a} {t}. {n} gives away {b} {t}. Then {n} loses {c} {t}. How many {t} are left?", "--"),
    Template("{n} has {a} {t}. {n} picks up {b} {t}. Then {n} loses {c} {t}. How many {t} are left?", "+-"),
    Template("{n} has {a} {t}. {n} gives away {b} {t}. Then {n} buys {c} {t}. How many {t} are there?", "-+"),
    Template("{n} has {a} {t}. {n} picks up {b} {t}. Then {n} buys {c} {t}. How many {t} are there?", "++"),
    Template("There are {a} {t}. {n} takes {b} of them. {m} takes {c} of them. How many {t} are left?", "--"),
    Template("There are {a} {t}. {n} adds {b} more {t}. {m} takes {c} of them. How many {t} are left?", "+-"),
    Template("There are {a} {t}. {n} takes {b} of them. {m} adds {c} more {t}. How many {t} are there?", "-+"),
    Template("{n} has {a} {t}. And {m} has {b} {t}. And {o} has {c} {t}. How many {t} in total?", "++"),
    Template("{n} has {a} bags. Each bag holds {b} {t}. Then {n} loses {c} {t}. How many {t} are left?", "*-"),
    Template("{n} has {a} bags. Each bag holds {b} {t}. Then {n} buys {c} {t}. How many {t} are there?", "*+"),
)
TEMPLATES_OF_DIFFICULTY = {1: 4, 2: 8, 3: 10}

DISTRACTORS = {
    5: ("{n} likes the {p}.",),
    6: ("The {p} is very {l}.", "{n} and {m} are friends."),
    7: ("{n} went to the {p} today.", "{n} saw {m} near the {p}."),
    8: ("The {p} is near the {l} {q}.",),
    9: ("{n} went to the {p} with {m} today.",),
}
"""Sentences to put before a question, by their number of words and signs: they hold no numbers."""

SHORT_WORDS = 23
SMALLEST_OPERAND = 2  # "1 apples" would be wrong
VALIDATION_SHARE = 5  # one triple in this many is for validation
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class WordProblemSettings:
    """What ``data.train`` and ``data.validation`` may set beside ``dataset_name: word_problems``.

    In a recipe `difficulty` and `long_fraction` stand beside it, the others under its ``kwargs``.

    Attributes:
        difficulty: 1 (four templates of + and -), 2 (eight, with several people) or 3 (ten, also *).
        max_number: the largest number in a question or its solution; intermediate results are never negative.
        long_fraction: share of prompts, 0 to 1, that are `long_words` long.
        long_words: words, numbers and signs of a long prompt (at least 30). The tiny tokenizer gives each one token.
    """

    difficulty: int = 1
    max_number: int = 20
    long_fraction: float = 0.125
    long_words: int = 144

    def __post_init__(self):
        if self.difficulty not in TEMPLATES_OF_DIFFICULTY:
            raise UserError(f"word_problems: difficulty is {self.difficulty!r}; valid: 1, 2, 3")
        if not isinstance(self.max_number, int) or self.max_number < 10:
            raise UserError(
                f"word_problems: max_number is {self.max_number!r}; it must be a whole number of 10 or more"
            )
        if not isinstance(self.long_fraction, int | float) or not 0 <= self.long_fraction <= 1:
            raise UserError(f"word_problems: long_fraction is {self.long_fraction!r}; it must lie in 0 to 1")
        if not isinstance(self.long_words, int) or self.long_words < SHORT_WORDS + 7:
            raise UserError(f"word_problems: long_words is {self.long_words!r}; it must be {SHORT_WORDS + 7} or more")


DEFAULT_SIZES = {"train": 4096, "validation": 512}
_MISSES = 1000  # this many repeated problems in a row mean that there are hardly any new ones


def word_problems(spec: DatasetSpec) -> list[Problem]:
    """``spec.size`` problems whose questions, distracting sentences aside, are all different.

    Raises:
        UserError: a bad setting, or fewer different problems than asked for.
    """
    fields = [field.name for field in dataclasses.fields(WordProblemSettings)]
    arguments = spec.generator_arguments(own=fields)
    for key in arguments:
        if key not in fields:
            raise UserError(
                f"{spec.where}.kwargs.{key} is not a setting{nearest(key, fields)}; valid: {', '.join(fields)}"
            )
    settings = WordProblemSettings(**arguments)
    size = spec.size_or(DEFAULT_SIZES[spec.split])
    problems: dict[str, Problem] = {}
    index = misses = 0
    while len(problems) < size:
        problem = make_problem(settings, spec.split, f"{spec.seed}/{spec.split}/{index}")
        question = problem.metadata["question"]
        misses = misses + 1 if question in problems else 0
        problems.setdefault(question, problem)
        index += 1
        if misses == _MISSES:
            raise spec.error(
                f"word_problems has about {len(problems)} different problems of this kind, not {size}; "
                "raise max_number or difficulty, or lower size"
            )
    return list(problems.values())


def make_problem(settings: WordProblemSettings, split: str, key: str) -> Problem:
    """The problem that `key` names: the same key always gives the same problem.

    Args:
        split: ``train`` or ``validation``; decides which operand triples may occur.
        key: any text, such as seed and index.
    """
    rng = random.Random(key)
    template = rng.choice(TEMPLATES[: TEMPLATES_OF_DIFFICULTY[settings.difficulty]])
    operands, steps = _draw_operands(rng, template.ops, settings.max_number, split)
    fill = _draw_words(rng)
    question = template.text.format(a=operands[0], b=operands[1], c=operands[2], **fill)
    metadata = {"dataset": "word_problems", "question": question, "operands": operands, "ops": template.ops}
    is_long = rng.random() < settings.long_fraction
    if is_long:
        question = _distractors(rng, settings.long_words - SHORT_WORDS) + " " + question
    answer = str(steps[-1][-1])
    worked = " ".join(f"{x} {op} {y} = {z}." for x, op, y, z in steps) + f" \\boxed{{ {answer} }}"
    return Problem(question, answer, worked, metadata={**metadata, "long": is_long})


def split_of(operands: tuple[int, int, int]) -> str:
    """The side, ``train`` or ``validation``, that a triple of operands belongs to, whatever the template or seed."""
    digest = hashlib.sha256(repr(tuple(operands)).encode()).digest()
    return "validation" if int.from_bytes(digest[:8], "big") % VALIDATION_SHARE == 0 else "train"


def count_words(text: str) -> int:
    """Words, numbers and signs in `text`: its length in tokens of the tiny tokenizer."""
    return len(_WORD.findall(text))


def vocabulary_words() -> list[str]:
    """Every word and sign, without numbers, that a prompt or a worked answer can hold, in a fixed order."""
    fixed = [template.text for template in TEMPLATES] + [text for group in DISTRACTORS.values() for text in group]
    words = [word for text in fixed for word in _WORD.findall(re.sub(r"\{\w\}", " ", text)) if word not in ".?"]
    return [*dict.fromkeys([*words, *NAMES, *THINGS, *PLACES, *LOOKS]), "+", "-", "*", "=", "\\boxed{", "}"]


Step = tuple[int, str, int, int]


def _draw_operands(rng: random.Random, ops: str, limit: int, split: str) -> tuple[tuple[int, int, int], list[Step]]:
    for _ in range(10_000):
        first = rng.randint(SMALLEST_OPERAND, limit)
        second = _draw_operand(rng, first, ops[0], limit)
        if second is None:
            continue
        middle = _apply(first, ops[0], second)
        third = _draw_operand(rng, middle, ops[1], limit)
        if third is None:
            continue
        operands = (first, second, third)
        if split_of(operands) == split:
            return operands, [(first, ops[0], second, middle), (middle, ops[1], third, _apply(middle, ops[1], third))]
    raise UserError(f"word_problems: no {split} operands for {ops!r} up to {limit}; raise max_number")


def _draw_operand(rng: random.Random, left: int, op: str, limit: int) -> int | None:
    """A right operand that keeps the result within 0 to `limit`, or None where there is none."""
    largest = {"+": limit - left, "-": left, "*": limit // left if left else 0}[op]
    return rng.randint(SMALLEST_OPERAND, largest) if largest >= SMALLEST_OPERAND else None


def _apply(left: int, op: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right}[op]


def _draw_words(rng: random.Random) -> dict[str, str]:
    n, m, o = rng.sample(NAMES, 3)
    p, q = rng.sample(PLACES, 2)
    return {"n": n, "m": m, "o": o, "p": p, "q": q, "l": rng.choice(LOOKS), "t": rng.choice(THINGS)}


def _distractors(rng: random.Random, words: int) -> str:
    """Sentences without numbers that hold exactly `words` words and signs (`words` is 7 or more)."""
    shortest = min(DISTRACTORS)
    sentences = []
    while words:
        lengths = [length for length in DISTRACTORS if words == length or words - length >= shortest]
        length = rng.choice(lengths)
        sentences.append(rng.choice(DISTRACTORS[length]).format(**_draw_words(rng)))
        words -= length
    return " ".join(sentences)
