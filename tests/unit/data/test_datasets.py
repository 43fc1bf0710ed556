"""Datasets chosen by one key: reasoning-gym, files, callables, prompt files, and validation apart from training."""

import json
import sys

import pytest

from nemo_rl_dsv4.data import Problem, build_dataset, build_datasets
from nemo_rl_dsv4.data.spec import read_spec
from nemo_rl_dsv4.errors import UserError

CHAIN_SUM = "reasoning_gym:chain_sum"
KWARGS = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}


def test_reasoning_gym_problem_carries_entry_and_asks_for_a_box():
    problem = build_dataset({"dataset_name": CHAIN_SUM, "kwargs": KWARGS}, "train", 0, 5)[0]
    assert problem.prompt == problem.metadata["entry"]["question"] + "\nPut the final answer in \\boxed{}."
    assert problem.answer == problem.metadata["entry"]["answer"]
    assert problem.worked == f"\\boxed{{ {problem.answer} }}"
    assert 2 <= problem.metadata["entry"]["metadata"]["num_terms"] <= 3


def test_reasoning_gym_is_reproducible_and_seeded():
    def make(seed):
        return build_dataset({"dataset_name": CHAIN_SUM}, "train", seed, 20)

    assert make(1) == make(1) and make(1) != make(2)


def test_reasoning_gym_validation_shares_no_question_with_training_even_where_few_exist():
    """One-digit sums of two terms repeat quickly: seeds alone would not keep the sides apart."""
    section = {"dataset_name": CHAIN_SUM, "kwargs": {**KWARGS, "max_terms": 2}}
    raw = {p.prompt for p in build_dataset(section, "validation", 0, 40)}
    train, validation = build_datasets({**section, "size": 100}, {**section, "size": 40}, 0)
    assert validation is not None and len(validation) == 40
    assert raw & {p.prompt for p in train}, "this case needs an overlap to remove"
    assert not {p.prompt for p in validation} & {p.prompt for p in train}


def test_reasoning_gym_without_enough_new_questions_is_an_error():
    section = {"dataset_name": "reasoning_gym:chain_sum", "kwargs": {**KWARGS, "max_terms": 2}}
    with pytest.raises(UserError, match=r"gave \d+ problems that are not in the training set, of 40 wanted"):
        build_datasets({**section, "size": 3000}, {**section, "size": 40}, 0)


def test_training_and_validation_draw_from_disjoint_reasoning_gym_seeds(monkeypatch):
    from nemo_rl_dsv4.data import reasoning_gym_problems

    ranges = []
    original = reasoning_gym_problems.open_dataset

    def watch(*args, **fixed):
        ranges.append((fixed["seed"], fixed["seed"] + fixed["size"]))
        return original(*args, **fixed)

    monkeypatch.setattr(reasoning_gym_problems, "open_dataset", watch)
    for seed in range(20):
        for split in ("train", "validation"):
            build_dataset({"dataset_name": CHAIN_SUM}, split, seed, 2)
    assert all(high < 2**30 for _, high in ranges[::2]) and all(low >= 2**30 for low, _ in ranges[1::2])


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"dataset_name": "reasoning_gym:chain_sums"}, r"no dataset 'chain_sums' \(did you mean 'chain_sum'\?\)"),
        ({"dataset_name": "word_problem"}, r"did you mean 'word_problems'"),
        ({"dataset_name": None}, "dataset_name is None"),
        ({"dataset_name": "gsm8k"}, "runtime: nemo_rl"),
        ({"dataset_name": CHAIN_SUM, "kwargs": {"max_term": 3}}, r"kwargs.max_term .*did you mean 'max_terms'"),
        ({"dataset_name": CHAIN_SUM, "kwargs": {"min_terms": 9}}, "refuses them"),
        ({"dataset_name": CHAIN_SUM, "kwargs": {"seed": 9}}, "write it as data.train.seed"),
        ({"dataset_name": CHAIN_SUM, "difficulty": 2}, "difficulty is not a setting of reasoning_gym:chain_sum"),
        ({"dataset_name": CHAIN_SUM, "kwargs": 3}, "kwargs is int"),
        ({"dataset_name": CHAIN_SUM, "size": 0}, "size is 0"),
        ({"dataset_name": "no.such.module"}, "cannot import no.such"),
        ({"dataset_name": "json.dump_s"}, "no callable 'dump_s'"),
        ({"dataset_name": "word_problems", "data_path": "x"}, "data_path is not a setting of word_problems"),
        ({"dataset_name": "word_problems", "prompt_file": "/absent"}, "prompt_file '/absent' cannot be read"),
        ({"dataset_name": "ResponseDataset"}, "needs data_path"),
        ({"dataset_name": "ResponseDataset", "data_path": "/absent"}, "data_path '/absent' cannot be read"),
    ],
)
def test_bad_sections_are_refused_with_key_and_fix(section, message):
    with pytest.raises(UserError, match=message):
        build_dataset(section, "train", 0)


def test_null_keys_count_as_absent_and_the_sections_own_seed_and_size_win():
    section = {
        "dataset_name": "word_problems",
        "size": 7,
        "seed": 3,
        "difficulty": None,
        "kwargs": {},
        "data_path": None,
    }
    assert build_dataset(section, "train", 0, 99) == build_dataset({"dataset_name": "word_problems"}, "train", 3, 7)


def test_prompt_and_system_files_go_around_the_question(tmp_path):
    (tmp_path / "prompt.txt").write_text("Think.\n{}\nAnswer in \\boxed{{}}.")
    (tmp_path / "system.txt").write_text("Be brief.")
    section = {"prompt_file": str(tmp_path / "prompt.txt"), "system_prompt_file": str(tmp_path / "system.txt")}
    plain = build_dataset({"dataset_name": "word_problems"}, "train", 0, 3)
    dressed = build_dataset({"dataset_name": "word_problems", **section}, "train", 0, 3)
    for before, after in zip(plain, dressed, strict=True):
        assert after.prompt == f"Think.\n{before.prompt}\nAnswer in \\boxed{{}}."
        assert after.system == "Be brief." and after.answer == before.answer


@pytest.mark.parametrize(
    ("template", "message"), [("{} {}", "2 places|bad braces"), ("none", "0 places"), ("{x}", "bad")]
)
def test_prompt_file_without_one_place_for_the_question_is_refused(tmp_path, template, message):
    path = tmp_path / "prompt.txt"
    path.write_text(template)
    with pytest.raises(UserError, match=message):
        read_spec({"dataset_name": "word_problems", "prompt_file": str(path)}, "train", 0, None)


def write_lines(path, records):
    path.write_text("\n".join(json.dumps(record) for record in records))
    return str(path)


def test_file_dataset_reads_its_keys_and_samples_by_seed(tmp_path):
    records = [{"question": f"What is {i}?", "gold": i} for i in range(20)]
    section = {"dataset_name": "ResponseDataset", "data_path": write_lines(tmp_path / "a.jsonl", records)}
    section |= {"input_key": "question", "output_key": "gold"}
    everything = build_dataset(section, "train", 0)
    assert [(p.prompt, p.answer) for p in everything] == [(f"What is {i}?", str(i)) for i in range(20)]
    some = build_dataset({**section, "size": 5}, "train", 0)
    assert len(some) == 5 and set(map(repr, some)) < set(map(repr, everything))
    assert some != build_dataset({**section, "size": 5}, "train", 1)
    with pytest.raises(UserError, match="size is 21, but the file has 20"):
        build_dataset({**section, "size": 21}, "train", 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no problems"),
        ('{"input": "a", "output": 1}\n{"inpt": 2}', r"a.jsonl:2 has no key 'input' \(did you mean 'inpt'\?\)"),
        ('{"input": "a", ', "a.jsonl:1 is not JSON"),
        ("[1]", "a.jsonl:1 holds list"),
        ('{"input": 1, "output": 1}', "input is int, not text"),
    ],
)
def test_damaged_file_is_refused_with_the_line(tmp_path, text, message):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        build_dataset({"dataset_name": "ResponseDataset", "data_path": str(path)}, "train", 0)


def test_file_that_validation_shares_with_training_is_refused(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"input": f"q{i}", "output": i} for i in range(3)])
    section = {"dataset_name": "ResponseDataset", "data_path": path}
    with pytest.raises(UserError, match="3 of 3 questions are also training questions, the first 'q0'"):
        build_datasets(section, section, 0)


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_tasks.py").write_text(
        "from nemo_rl_dsv4.data import Problem\n"
        "def double(split, seed, size, start=0):\n"
        "    return [Problem(f'{split} {seed} twice {i}?', str(2 * i)) for i in range(start, start + (size or 4))]\n"
        "def wrong(split, seed, size):\n    return ['text']\n"
        "def nothing(split, seed, size):\n    return []\n"
    )
    yield "my_tasks"
    sys.modules.pop("my_tasks", None)


def test_dotted_path_calls_the_users_function(module):
    section = {"dataset_name": f"{module}.double", "kwargs": {"start": 5}}
    assert build_dataset({**section, "size": 2}, "train", 7) == [
        Problem("train 7 twice 5?", "10"),
        Problem("train 7 twice 6?", "12"),
    ]
    assert len(build_dataset(section, "train", 7)) == 4


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("wrong", {}, "returned str as item 0"),
        ("nothing", {}, "has no problems"),
        ("double", {"begin": 1}, "cannot be called"),
        ("doubled", {}, r"no callable 'doubled' \(did you mean 'double'\?\)"),
    ],
)
def test_bad_callables_are_refused(module, name, kwargs, message):
    with pytest.raises(UserError, match=message):
        build_dataset({"dataset_name": f"{module}.{name}", "kwargs": kwargs}, "train", 0)


def test_word_problems_of_both_sides_share_no_operands_through_build_datasets():
    train, validation = build_datasets({"dataset_name": "word_problems"}, {"dataset_name": "word_problems"}, 0)
    assert validation is not None and (len(train), len(validation)) == (4096, 512)
    assert not {p.metadata["operands"] for p in train} & {p.metadata["operands"] for p in validation}


def test_no_validation_section_gives_none():
    train, validation = build_datasets({"dataset_name": "word_problems", "size": 3}, None, 0)
    assert len(train) == 3 and validation is None


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def make(**_):\n    return 1 / 0\n", r"raised ZeroDivisionError: division by zero at .*broken_set.py:2"),
        ("def make(**_):\n    yield {}['question']\n", r"raised KeyError: 'question' at .*broken_set.py:2"),
        ("raise RuntimeError('no data here')\n", r"cannot import broken_set \(RuntimeError: no data here\)"),
        ("def make(:\n", r"cannot import broken_set \(SyntaxError"),
        ("import not_there_at_all\n", r"cannot import broken_set \(ModuleNotFoundError"),
    ],
    ids=["a call", "a generator", "an import", "syntax", "a missing module"],
)
def test_whatever_a_users_module_raises_is_one_line(tmp_path, monkeypatch, code, message):
    """An exception inside a user's dataset function was a traceback of the whole run."""
    (tmp_path / "broken_set.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_set", raising=False)
    with pytest.raises(UserError, match=message) as caught:
        build_dataset({"dataset_name": "broken_set.make"}, "train", 0)
    assert "data.train.dataset_name" in str(caught.value)
    sys.modules.pop("broken_set", None)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"input": "a", "output": null}', "output is None; wanted an answer"),
        ('{"input": "a", "output": [1]}', r"output is \[1\]; wanted an answer"),
        ('{"input": "a", "output": " "}', "output is ' '; wanted an answer"),
        ('{"input": "", "output": "1"}', "input is ''; wanted a question"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_line_that_cannot_be_scored_is_refused(tmp_path, line, message):
    """A null answer became the text None, and no response could ever be right."""
    path = tmp_path / "a.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UserError, match=rf"a.jsonl:1.* {message}"):
        build_dataset({"dataset_name": "ResponseDataset", "data_path": str(path)}, "train", 0)


def test_a_text_may_hold_any_line_separator_of_unicode(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"input": "a\u2028b\x85c", "output": 1}\r\n', encoding="utf-8", newline="")
    (problem,) = build_dataset({"dataset_name": "ResponseDataset", "data_path": str(path)}, "train", 0)
    assert problem.prompt == "a\u2028b\x85c" and problem.answer == "1"
