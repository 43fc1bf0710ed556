"""The DeepSeek-V4 prompt format, against strings written out by hand from the released encoder's rules."""

import pytest

from nemo_rl_dsv4.data.chat import EFFORT_PREFIXES, SPECIAL_TOKENS, encode_chat, prompt_messages
from nemo_rl_dsv4.data.tokenizer import load_tokenizer
from nemo_rl_dsv4.errors import UserError

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2", "reasoning": "one and one"},
    {"role": "user", "content": "2+2?"},
]


def test_one_message_prompt_ends_with_think_closed_in_chat_mode_and_open_in_thinking_mode():
    """C083: there is no chat_template field; chat mode ends with Assistant + </think>, thinking with <think>."""
    messages = prompt_messages("hi")
    assert encode_chat(messages) == f"{BOS}<｜User｜>hi<｜Assistant｜></think>"
    assert encode_chat(messages, thinking=True) == f"{BOS}<｜User｜>hi<｜Assistant｜><think>"


def test_system_text_follows_bos_without_a_marker():
    assert encode_chat(prompt_messages("hi", "Be brief.")) == f"{BOS}Be brief.<｜User｜>hi<｜Assistant｜></think>"


def test_many_turns_in_chat_mode():
    assert encode_chat(CONVERSATION) == (
        f"{BOS}Be brief.<｜User｜>1+1?<｜Assistant｜></think>2{EOS}<｜User｜>2+2?<｜Assistant｜></think>"
    )


def test_thinking_mode_drops_the_reasoning_of_earlier_turns():
    assert encode_chat(CONVERSATION, thinking=True) == (
        f"{BOS}Be brief.<｜User｜>1+1?<｜Assistant｜></think>2{EOS}<｜User｜>2+2?<｜Assistant｜><think>"
    )


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_a_finished_last_turn_keeps_its_reasoning_and_ends_with_eos(key):
    messages = [*CONVERSATION, {"role": "assistant", "content": "4", key: "two and two"}]
    assert encode_chat(messages, thinking=True).endswith(
        f"<｜User｜>2+2?<｜Assistant｜><think>two and two</think>4{EOS}"
    )
    assert encode_chat(messages).endswith(f"<｜User｜>2+2?<｜Assistant｜></think>4{EOS}")


def test_consecutive_user_messages_become_one_turn():
    messages = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert encode_chat(messages) == f"{BOS}<｜User｜>a\n\nb<｜Assistant｜></think>"


def test_effort_levels_of_the_0731_release_are_one_below_those_of_the_preview():
    def prefix(effort, release):
        text = encode_chat(prompt_messages("hi"), True, effort, release)
        return text.removeprefix(BOS).removesuffix("<｜User｜>hi<｜Assistant｜><think>")

    assert prefix("low", "0731") == prefix(None, "0731") == prefix("high", "preview") == prefix(None, "preview") == ""
    assert prefix("high", "0731") == prefix("max", "preview")
    assert prefix("high", "0731").startswith("Reasoning Effort: Absolute maximum with no shortcuts permitted.\n")
    assert prefix("max", "0731").startswith("Reasoning Effort: Beyond maximum — exhaustive,")
    assert all(text == "" or text.endswith(".\n\n") for levels in EFFORT_PREFIXES.values() for text in levels.values())


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([], {}, "no user message"),
        ([{"role": "system", "content": "x"}], {}, "no user message"),
        ([{"role": "tool", "content": "x"}], {}, r"messages\[0\].role is 'tool'"),
        ([{"role": "user", "content": None}], {}, r"messages\[0\].content is NoneType"),
        ([{"role": "user", "content": "x", "tools": [1]}], {}, "uses tools"),
        ([{"role": "user", "content": "x"}, {"role": "system", "content": "y"}], {}, "last message is the system's"),
        ([{"role": "user", "content": "x"}], {"reasoning_effort": "max"}, "needs thinking mode"),
        ([{"role": "user", "content": "x"}], {"thinking": True, "reasoning_effort": "huge"}, "valid for release 0731"),
        ([{"role": "user", "content": "x"}], {"release": "0801"}, "release is '0801'"),
    ],
)
def test_bad_conversations_are_refused(messages, options, message):
    with pytest.raises(UserError, match=message):
        encode_chat(messages, **options)


def test_every_special_token_is_one_token_of_the_released_vocabulary():
    tokenizer = load_tokenizer("deepseek-v4")
    ids = [tokenizer.encode(token) for token in SPECIAL_TOKENS]
    assert ids == [[0], [1], [2], [128803], [128804], [128821], [128822], [128828], [128825]]
