"""Tokenizers: round trips, the released vocabulary, folders, and clear errors."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from nemo_rl_dsv4.data import build_dataset, encode_chat, load_tokenizer, make_tiny_tokenizer
from nemo_rl_dsv4.data import tokenizer as tokenizer_module
from nemo_rl_dsv4.data.chat import EOS, SPECIAL_TOKENS
from nemo_rl_dsv4.errors import UserError

TINY = make_tiny_tokenizer()


def task_texts(split, **settings):
    problems = build_dataset({"dataset_name": "word_problems", "difficulty": 3, **settings}, split, 0, 200)
    return [encode_chat([{"role": "user", "content": p.prompt}]) + p.worked + EOS for p in problems]


@pytest.mark.parametrize("characters", [True, False])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_every_task_text_comes_back_exactly(split, characters):
    tokenizer = make_tiny_tokenizer(characters=characters)
    for text in task_texts(split):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_prompt_and_answer_encoded_apart_are_the_whole_encoded_at_once():
    text = task_texts("train")[0]
    prompt, answer = text.split("</think>")
    assert TINY.encode(prompt + "</think>") + TINY.encode(answer) == TINY.encode(text)
    assert TINY.decode(TINY.encode(answer)) == answer
    assert TINY.decode(TINY.encode(answer), skip_special_tokens=True) == answer.removesuffix(EOS)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=[chr(c) for c in range(32, 127)] + ["\n"]))
def test_with_characters_any_ascii_text_comes_back_exactly(text):
    assert TINY.decode(TINY.encode(text)) == text


def test_vocabulary_is_small_and_numbers_are_single_tokens():
    assert make_tiny_tokenizer(characters=False).vocab_size <= 110
    assert TINY.vocab_size <= 200
    assert all(len(TINY.encode(str(number))) == 1 for number in range(21))
    assert len(TINY.encode("21")) > 1
    assert len(make_tiny_tokenizer(max_number=99).encode("99")) == 1
    assert [TINY.encode(token) for token in SPECIAL_TOKENS] == [[i] for i in range(len(SPECIAL_TOKENS))]
    assert (TINY.bos_id, TINY.eos_id, TINY.pad_id) == (0, 1, 2)


@pytest.mark.parametrize(("characters", "text", "word"), [(False, "Ana likes zebras.", "zebras"), (True, "π is", "π")])
def test_a_word_that_cannot_be_spelled_is_an_error_that_names_it_and_never_dropped(characters, text, word):
    """A BPE model without an unknown token leaves out what it cannot spell."""
    with pytest.raises(UserError, match=f"cannot spell.*{word}"):
        make_tiny_tokenizer(characters=characters).encode(text)


def test_saved_folder_loads_here_and_in_transformers_with_the_same_ids(tmp_path):
    TINY.save(tmp_path / "new")
    ours, theirs = load_tokenizer(tmp_path / "new"), AutoTokenizer.from_pretrained(tmp_path / "new")
    hub = tokenizer_module._load_hub(str(tmp_path / "new"))
    for text in task_texts("train")[:20]:
        ids = TINY.encode(text)
        assert ours.encode(text) == hub.encode(text) == theirs.encode(text, add_special_tokens=False) == ids
        assert ours.decode(ids) == hub.decode(ids) == theirs.decode(ids) == text
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (0, 1, 2)
    for loaded in (ours, hub):
        assert (loaded.bos_id, loaded.eos_id, loaded.pad_id, loaded.vocab_size) == (0, 1, 2, TINY.vocab_size)


def test_released_tokenizer_has_129280_tokens_and_saves_to_a_folder_that_loads(tmp_path):
    released = load_tokenizer("deepseek-v4")
    assert released.vocab_size == 129280
    assert (released.bos_id, released.eos_id, released.pad_id) == (0, 1, 1)
    text = task_texts("train")[0]
    ids = released.encode(text)
    assert released.decode(ids) == text and ids[0] == 0 and ids[-1] == 1
    released.save(tmp_path)
    assert load_tokenizer(tmp_path).encode(text) == ids


def test_a_hub_id_without_pad_token_pads_with_eos(tmp_path):
    TINY.save(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert tokenizer_module._load_hub(str(tmp_path)).pad_id == 1


def test_a_name_that_nothing_has_is_a_user_error(tmp_path, monkeypatch):
    def missing(name):
        raise OSError(f"{name} is not a local folder and is not a valid model identifier\nmore lines")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", missing)
    with pytest.raises(UserError, match="'nobody/nothing' is neither") as caught:
        load_tokenizer("nobody/nothing")
    assert "\n" not in str(caught.value)
    for name in (tmp_path, "./absent"):
        with pytest.raises(UserError, match=r"has no tokenizer\.json"):
            load_tokenizer(name)


def test_damaged_files_are_user_errors_that_name_the_file(tmp_path):
    TINY.save(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    good = config.read_text()
    config.write_text(good.replace("<｜end▁of▁sentence｜>", "<eos>"))
    with pytest.raises(UserError, match="eos_token is '<eos>'"):
        load_tokenizer(tmp_path)
    config.write_text(good[:20])
    with pytest.raises(UserError, match=r"tokenizer_config\.json is not JSON"):
        load_tokenizer(tmp_path)
    config.unlink()
    with pytest.raises(UserError, match=r"tokenizer_config\.json is missing"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer file"):
        load_tokenizer(tmp_path)
