"""The prompt loader: order, exact resume, and prompts that are too long."""

import json

import pytest

from nemo_rl_dsv4.data import PromptLoader, build_dataset, encode_chat, make_tiny_tokenizer
from nemo_rl_dsv4.errors import UserError

TOKENIZER = make_tiny_tokenizer()
PROBLEMS = build_dataset({"dataset_name": "word_problems"}, "train", 0, 50)
LONG = [p for p in PROBLEMS if p.metadata["long"]]


def make(problems=PROBLEMS, batch=8, seed=0, shuffle=True, max_input_tokens=200, **options):
    return PromptLoader(problems, TOKENIZER, batch, seed, shuffle, max_input_tokens, **options)


def questions(batch):
    return [prompt.problem.prompt for prompt in batch]


def test_prompts_are_chat_encoded():
    batch = make(shuffle=False).next_batch()
    assert questions(batch) == [p.prompt for p in PROBLEMS[:8]]
    for prompt in batch:
        text = encode_chat([{"role": "user", "content": prompt.problem.prompt}])
        assert prompt.token_ids == TOKENIZER.encode(text)
    thinking = make(shuffle=False, thinking=True).next_batch()[0]
    assert TOKENIZER.decode(thinking.token_ids).endswith("<｜Assistant｜><think>")


def test_an_epoch_has_every_problem_once_and_the_next_has_another_order():
    loader = make(batch=10)
    first, second = [[questions(batch) for batch in loader] for _ in range(2)]
    assert len(first) == len(second) == len(loader) == 5
    for epoch in (first, second):
        assert sorted(question for batch in epoch for question in batch) == sorted(p.prompt for p in PROBLEMS)
    assert first != second


def test_last_partial_batch_is_left_out_or_kept():
    assert [len(batch) for batch in make(batch=8)] == [8] * 6
    assert [len(batch) for batch in make(batch=8, keep_partial=True)] == [8] * 6 + [2]


@pytest.mark.parametrize("stop", [0, 1, 5, 6, 7, 13])
def test_resume_gives_exactly_the_batches_that_would_have_come(stop):
    whole = make()
    expected = [questions(whole.next_batch()) for _ in range(20)]
    first = make()
    for _ in range(stop):
        first.next_batch()
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [questions(resumed.next_batch()) for _ in range(20 - stop)] == expected[stop:]


def test_resume_inside_a_for_loop_continues_after_the_batch_in_hand():
    loader = make()
    for count, _batch in enumerate(loader, 1):
        if count == 3:
            state = loader.state_dict()
            break
    following = make()
    for _ in range(3):
        following.next_batch()
    resumed = make()
    resumed.load_state_dict(state)
    assert questions(next(iter(resumed))) == questions(following.next_batch())


@pytest.mark.parametrize("change", [{"batch": 4}, {"seed": 1}, {"shuffle": False}, {"problems": PROBLEMS[:40]}])
def test_a_state_of_other_data_settings_is_refused(change):
    state = make().state_dict()
    with pytest.raises(UserError, match="resume with the same data settings"):
        make(**change).load_state_dict(state)


def test_a_state_of_other_problems_of_the_same_number_is_refused():
    others = build_dataset({"dataset_name": "word_problems"}, "train", 1, 50)
    with pytest.raises(UserError, match="resume with the same data settings"):
        make(others).load_state_dict(make().state_dict())


@pytest.mark.parametrize("state", [{}, [], "text", {"epoch": 0}, {"position": 99}])
def test_a_damaged_state_is_refused(state):
    """A list in its place was an AttributeError."""
    damaged = state if not isinstance(state, dict) or not state else {**make().state_dict(), **state}
    if isinstance(state, dict) and "epoch" in state:
        del damaged["position"]
    with pytest.raises(UserError, match="loader state"):
        make().load_state_dict(damaged)


def test_too_long_prompts_are_an_error_or_left_out_and_counted():
    with pytest.raises(
        UserError, match=rf"{len(LONG)} of 50 prompts are longer than data.max_input_seq_length 100.*148"
    ):
        make(max_input_tokens=100)
    loader = make(max_input_tokens=100, overlong="filter")
    assert loader.skipped == len(LONG) > 0
    assert all(not p.problem.metadata["long"] for batch in loader for p in batch)
    assert make(max_input_tokens=148).skipped == 0


def test_nothing_left_or_less_than_a_batch_is_an_error():
    with pytest.raises(UserError, match="no prompt is left"):
        make(max_input_tokens=5, overlong="filter")
    with pytest.raises(UserError, match="fewer than one batch of 64"):
        make(batch=64)
    with pytest.raises(UserError, match="no prompt"):
        make([])
    with pytest.raises(UserError, match="overlong_prompts is 'drop'"):
        make(overlong="drop")
