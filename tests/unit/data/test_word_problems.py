"""Two-step word problems: right answers, disjoint splits, fixed lengths."""

import pytest

from nemo_rl_dsv4.data import build_dataset, encode_chat, make_tiny_tokenizer, word_problems
from nemo_rl_dsv4.data.word_problems import TEMPLATES, count_words, split_of
from nemo_rl_dsv4.errors import UserError


def make(split="train", seed=0, size=300, **settings):
    return build_dataset({"dataset_name": "word_problems", **settings}, split, seed, size)


@pytest.mark.parametrize("difficulty", [1, 2, 3])
def test_worked_answer_computes_the_answer_from_the_numbers_of_the_question(difficulty):
    for problem in make(difficulty=difficulty):
        a, b, c = problem.metadata["operands"]
        first, second = problem.metadata["ops"]
        value = eval(f"({a} {first} {b}) {second} {c}")
        assert problem.answer == str(value)
        assert problem.worked.endswith(f"= {value}. \\boxed{{ {value} }}")
        assert [int(word) for word in problem.prompt.replace(".", " ").split() if word.isdigit()] == [a, b, c]
        for step in problem.worked.split(". ")[:-1]:
            left, right = step.split(" = ")
            assert eval(left) == int(right)
            assert 0 <= int(right) <= 20


def test_no_operands_are_shared_between_training_and_validation_over_everything_generated():
    train, validation = set(), set()
    for difficulty in (1, 2, 3):
        for seed in range(3):
            train |= {p.metadata["operands"] for p in make("train", seed, 1500, difficulty=difficulty)}
            validation |= {p.metadata["operands"] for p in make("validation", seed, 512, difficulty=difficulty)}
    assert len(train) > 700 and len(validation) > 150
    assert not train & validation
    assert {split_of(t) for t in train} == {"train"} and {split_of(t) for t in validation} == {"validation"}


def test_validation_prompts_are_all_different():
    assert len({p.metadata["question"] for p in make("validation", size=512)}) == 512


def test_short_prompts_have_one_length_and_long_ones_another_beyond_128_tokens():
    tokenizer = make_tiny_tokenizer(characters=False)
    for difficulty in (1, 2, 3):
        problems = make(difficulty=difficulty, size=600)
        lengths = {p.metadata["long"]: set() for p in problems}
        for problem in problems:
            ids = tokenizer.encode(encode_chat([{"role": "user", "content": problem.prompt}]))
            lengths[problem.metadata["long"]].add(len(ids))
            assert len(ids) == count_words(problem.prompt) + 4
        assert lengths == {False: {27}, True: {148}}
        assert 0.08 < sum(p.metadata["long"] for p in problems) / 600 < 0.18


@pytest.mark.parametrize("long_fraction", [0.0, 1.0])
def test_long_fraction_at_its_ends(long_fraction):
    assert {p.metadata["long"] for p in make(size=50, long_fraction=long_fraction)} == {bool(long_fraction)}


@pytest.mark.parametrize("long_words", range(30, 60))
def test_long_prompts_have_exactly_the_words_asked_for(long_words):
    for problem in make(size=5, long_fraction=1.0, long_words=long_words):
        assert count_words(problem.prompt) == long_words


def test_same_seed_same_problems_other_seed_other_problems():
    assert list(make(seed=3)) == list(make(seed=3))
    assert [p.prompt for p in make(seed=3)] != [p.prompt for p in make(seed=4)]


def test_difficulty_adds_templates():
    assert {p.metadata["ops"] for p in make(difficulty=1)} == {"--", "+-", "-+", "++"}
    assert {p.metadata["ops"] for p in make(difficulty=3)} == {t.ops for t in TEMPLATES}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dificulty": 2}, "did you mean 'difficulty'"),
        ({"difficulty": 9}, "difficulty is 9"),
        ({"max_number": 2}, "max_number is 2"),
        ({"kwargs": {"max_nunber": 30}}, "did you mean 'max_number'"),
        ({"kwargs": {"difficulty": 2}, "difficulty": 2}, "set twice"),
        ({"long_fraction": 1.5}, "long_fraction is 1.5"),
        ({"long_words": 3}, "long_words is 3"),
    ],
)
def test_bad_settings_are_refused_with_the_key(settings, message):
    with pytest.raises(UserError, match=message):
        make(**settings)


@pytest.mark.parametrize("long_fraction", [0.0, 0.5])
def test_more_problems_than_exist_is_an_error_with_both_counts(monkeypatch, long_fraction):
    """Long prompts must not fill up what short ones cannot: their distracting sentences never repeat."""
    monkeypatch.setattr(word_problems, "THINGS", ("pens",))
    monkeypatch.setattr(word_problems, "NAMES", ("Ana", "Ben", "Cora"))
    with pytest.raises(UserError, match=r"has about \d+ different problems of this kind, not 20000"):
        make("validation", size=20000, max_number=10, difficulty=1, long_fraction=long_fraction)


@pytest.mark.parametrize("size", [0, -1, 1.5, "many"])
def test_empty_dataset_is_refused(size):
    with pytest.raises(UserError, match="size"):
        make(size=size)
