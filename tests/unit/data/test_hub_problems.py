"""Published sets read from copies on disk; nothing is downloaded."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from nemo_rl_dsv4.data import build_dataset, build_datasets
from nemo_rl_dsv4.data.hub_problems import HUB_SETS
from nemo_rl_dsv4.errors import UserError

ASK = "Solve it. The last line of your response should be of the form Answer: $Answer.\n\n{}"


def record(question, answer, **changed):
    """A record as the two DAPO sets publish it."""
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": ASK.format(question), "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": question},
        **changed,
    }


RECORDS = [record("1+1?", "2"), record("2+2?", "4"), record("1+1?", "2")]


@pytest.fixture
def load(tmp_path):
    """Writes records as a file of a kind and builds the set from it."""

    def build(records, kind="jsonl", split="train", name="DAPOMath17K", **section):
        import datasets

        path = tmp_path / f"set.{kind}"
        rows = datasets.Dataset.from_list(records)
        if kind == "parquet":
            rows.to_parquet(path)
        elif kind == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in records))
        elif kind == "saved":
            rows.save_to_disk(path)
        section = {"dataset_name": name, "data_path": str(path), "download_dir": str(tmp_path / "cache"), **section}
        return build_dataset(section, split, 0)

    return build


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "saved"])
def test_a_copy_gives_prompts_and_answers_and_training_has_each_once(load, kind):
    problems = load(RECORDS, kind)
    assert [(problem.prompt, problem.answer) for problem in problems] == [
        (ASK.format("1+1?"), "2"),
        (ASK.format("2+2?"), "4"),
    ]
    assert problems[0].metadata == {"dataset": "DAPOMath17K", "source": "DAPOMath17K, record 0"}


def test_validation_keeps_repeats_after_the_distinct_problems(load):
    problems = load(RECORDS, split="validation", name="DAPOMathAIME2024")
    assert [problem.answer for problem in problems] == ["2", "4", "2"]


def test_a_question_with_two_answers_is_left_out_of_training_and_refused_in_validation(load):
    records = [*RECORDS, record("1+1?", "3")]
    with pytest.warns(UserWarning, match="1 questions have two answers, .*record 0 says '2' and .*record 3 '3'"):
        assert [problem.answer for problem in load(records)] == ["4"]
    with pytest.raises(UserError, match="data.validation: 1 questions have two answers"):
        load(records, split="validation")


def test_plain_fields_and_own_keys(load):
    rows = [{"problem": "1+1?", "answer": 2, "id": 7}, {"problem": "2+2?", "answer": 4, "id": 8}]
    assert [p.answer for p in load(rows, name="AIME2024", size=2, split="validation")] == ["2", "4"]
    renamed = [{"q": "1+1?", "result": {"value": "2"}}]
    assert load(renamed, name="AIME2024", input_key="q", output_key="result.value")[0].answer == "2"


def test_a_folder_of_parquet_files_is_one_set(tmp_path):
    import datasets

    for number, row in enumerate(RECORDS[:2]):
        datasets.Dataset.from_list([row]).to_parquet(tmp_path / f"part-{number}.parquet")
    section = {"dataset_name": "DAPOMath17K", "data_path": str(tmp_path), "download_dir": str(tmp_path / "cache")}
    assert len(build_dataset(section, "train", 0)) == 2


@pytest.mark.parametrize(
    ("records", "section", "message"),
    [
        ([{"prompt": "1+1?", "answer": "2"}], {}, "has no field 'reward_model'.*it has prompt, answer: set output_key"),
        ([{"promt": "1+1?", "reward_model": {}}], {}, "has no field 'prompt' .did you mean 'promt'"),
        ([record("1?", "2", reward_model={"ground_truht": "2"})], {}, "record 0 has no field 'reward_model.ground_tr"),
        ([record("1?", "")], {}, "record 0: reward_model.ground_truth is ''; wanted an answer"),
        ([record("1?", "2", prompt=[{"role": "user", "content": " "}])], {}, "record 0: prompt is .*one user message"),
        (RECORDS, {"size": 3}, "size is 3, but DAPOMath17K has 2 problems; lower size"),
        (RECORDS, {"max_number": 3}, "data.train.max_number is not a setting of DAPOMath17K; valid: data_path"),
    ],
)
def test_what_does_not_fit_is_named(load, records, section, message):
    with pytest.raises(UserError, match=message):
        load(records, **section)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("set.jsonl", "not json\n", "cannot be loaded: .*; give a .parquet, .jsonl or .json file"),
        ("set.csv", "a,b\n", "holds no set of problems; give a .parquet"),
        (None, "", "cannot be read: .*No such file.*; give a .parquet"),
    ],
)
def test_a_file_that_is_no_set_is_named(tmp_path, name, text, message):
    path = tmp_path / (name or "gone.parquet")
    if name:
        path.write_text(text)
    section = {"dataset_name": "DAPOMath17K", "data_path": str(path), "download_dir": str(tmp_path / "cache")}
    with pytest.raises(UserError, match=f"data.train: data_path '{path}' {message}"):
        build_dataset(section, "train", 0)


def test_without_a_copy_the_hub_set_of_the_table_is_asked_for(monkeypatch):
    """The library is a stand-in here: what it is asked for, and how its failure reads."""
    asked = []

    def load_dataset(*words, **options):
        asked.append((words, options))
        raise ConnectionError("Couldn't reach the Hub\nlong trace")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    for name, known in HUB_SETS.items():
        with pytest.raises(UserError, match="cannot be loaded: Couldn't reach the Hub; check the network and HF_HOME"):
            build_dataset({"dataset_name": name}, "train", 0)
        assert asked[-1] == ((known.hub_id, None), {"split": "train", "cache_dir": None})


def test_training_loses_the_questions_of_validation(tmp_path):
    def section(name, records):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in records))
        return {"dataset_name": "DAPOMath17K", "data_path": str(path), "download_dir": str(tmp_path / "cache")}

    train, held_out = section("train.jsonl", RECORDS), section("val.jsonl", [record("1+1?", "2"), record("7+7?", "14")])
    with pytest.warns(UserWarning, match="data.train: 1 questions of data.validation are left out"):
        left, validation = build_datasets(train, held_out, 0)
    assert [problem.answer for problem in left] == ["4"]
    assert validation is not None and [problem.answer for problem in validation] == ["2", "14"]
    with pytest.raises(UserError, match="2 questions of data.validation are left out, and no other is there"):
        build_datasets(train, train, 0)


def test_a_dry_run_loads_copies_and_shows_what_a_prompt_becomes(tmp_path, capsys):
    """The reference recipe with copies of its sets and the released tokenizer: encoded prompts, nothing downloaded."""
    from pathlib import Path

    from nemo_rl_dsv4.cli.run_grpo import main

    recipes = Path(__file__).parents[3] / "examples/configs/recipes/llm"
    overrides = ["runtime=embedded", "policy.tokenizer.name=deepseek-v4", f"logger.log_dir={tmp_path}/l"]
    overrides.append(f"checkpointing.checkpoint_dir={tmp_path}/c")
    for split, first, count in (("train", 0, 200), ("validation", 1000, 30)):
        path = tmp_path / f"{split}.jsonl"
        rows = [record(f"{number} + 1?", str(number + 1)) for number in range(first, first + count)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        overrides += [f"+data.{split}.data_path={path}", f"+data.{split}.download_dir={tmp_path}/cache"]
    recipe = recipes / "grpo-deepseek-v4-flash-0731-16n8g-automodel-cp8ep128.yaml"
    assert main(["--config", str(recipe), "--dry-run", *overrides]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "train set DAPOMath17K: 200 problems" in shown and "validation set DAPOMathAIME2024: 30 problems" in shown
    assert "<｜User｜>Solve it. The last line of your response should be of the form Answer: $Answer." in shown
    assert "<｜Assistant｜></think>" in shown and "were not checked" not in shown


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "is empty; give"), ("\n \n", "is empty; give"), ('{"prompt": \n', "JSON parse error")],
)
def test_a_file_without_records_says_so(tmp_path, text, message):
    """The library's own words were StopIteration, and that an error occurred."""
    path = tmp_path / "set.jsonl"
    path.write_text(text)
    section = {"dataset_name": "DAPOMath17K", "data_path": str(path), "download_dir": str(tmp_path / "cache")}
    with pytest.raises(UserError, match=message):
        build_dataset(section, "train", 0)


@pytest.mark.parametrize("kind", ["jsonl", "saved"])
@pytest.mark.parametrize(
    ("section", "message"),
    [({"split": "test"}, "split is 'test', but data_path .* holds one set"), ({"subset": "en"}, "subset is 'en', but")],
)
def test_a_choice_that_a_copy_does_not_offer_is_refused(load, tmp_path, kind, section, message):
    load(RECORDS, kind)
    section = {"dataset_name": "DAPOMath17K", "data_path": str(tmp_path / f"set.{kind}"), **section}
    with pytest.raises(UserError, match=message):
        build_dataset(section, "train", 0)
