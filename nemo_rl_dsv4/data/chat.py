"""The DeepSeek-V4 prompt format.

DeepSeek-V4 publishes no Jinja chat template: its format is defined by a Python encoder that ships with the weights
(``encoding/encoding_dsv4.py``; vLLM's ``tokenizer_mode: deepseek_v4`` does the same). This module writes the part of
that format that single- and multi-turn text conversations need::

    <BOS>system text<User>question<Assistant></think>          chat mode, ready to generate
    <BOS>system text<User>question<Assistant><think>           thinking mode, ready to generate
    ...<Assistant></think>answer<EOS>                          a finished chat turn
    ...<Assistant><think>reasoning</think>answer<EOS>          a finished thinking turn (the last one)

In thinking mode the reasoning of turns before the last user message is dropped, so those turns look like chat turns.
"""

from collections.abc import Mapping, Sequence

from nemo_rl_dsv4.errors import UserError

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
LATEST_REMINDER = "<｜latest_reminder｜>"
THINK_START = "<think>"
THINK_END = "</think>"
DSML = "｜DSML｜"

SPECIAL_TOKENS = (BOS, EOS, PAD, USER, ASSISTANT, THINK_START, THINK_END, LATEST_REMINDER, DSML)
"""The tokens that the format uses, spelled as in the released tokenizer (full-width bars, lower-block underscores)."""

ROLES = ("system", "user", "assistant")

_ABSOLUTE_MAXIMUM = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, "
    "and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
_BEYOND_MAXIMUM = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the "
    "problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying "
    "cause "
    "rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain "
    "that "
    "no assumption remains unchecked and no error remains undiscovered.\n\n"
)
EFFORT_PREFIXES: dict[str, dict[str | None, str]] = {
    "0731": {None: "", "low": "", "high": _ABSOLUTE_MAXIMUM, "max": _BEYOND_MAXIMUM},
    "preview": {None: "", "high": "", "max": _ABSOLUTE_MAXIMUM},
}
"""Release of the weights -> reasoning effort -> the fixed words before the first message that the model was trained on.

The 0731 release moved every level down: what the preview calls ``max`` it calls ``high``.
"""


def encode_chat(
    messages: Sequence[Mapping[str, str]],
    thinking: bool = False,
    reasoning_effort: str | None = None,
    release: str = "0731",
) -> str:
    """Write a conversation in the DeepSeek-V4 format.

    Args:
        messages: Each has ``role`` (system, user or assistant) and ``content``; an assistant message may
            have ``reasoning`` (or ``reasoning_content``). The last message is the user's (the text then ends where the
            model starts to write) or the assistant's (the text then ends with the end-of-sentence token).
        thinking: False ends a prompt with ``</think>`` (answer at once), True with ``<think>``.
        reasoning_effort: None (no prefix), ``low``, ``high`` or ``max``: the fixed prefix of that level. Thinking mode
            only. vLLM's own encoder takes ``high`` where a request names none: send it token ids, not messages.
        release: ``0731`` or ``preview``: whose prefixes to write.

    Raises:
        UserError: an empty conversation, an unknown role or effort, tools, or a conversation that cannot be continued.
    """
    turns = _merge_user_turns(_validated(messages))
    if release not in EFFORT_PREFIXES:
        raise UserError(f"release is {release!r}; valid: {', '.join(EFFORT_PREFIXES)}")
    efforts = EFFORT_PREFIXES[release]
    if reasoning_effort not in efforts:
        valid = ", ".join(effort for effort in efforts if effort)
        raise UserError(f"reasoning_effort is {reasoning_effort!r}; valid for release {release}: null, {valid}")
    if reasoning_effort is not None and not thinking:
        raise UserError(f"reasoning_effort {reasoning_effort!r} needs thinking mode; set thinking to true or drop it")

    last_user = max(i for i, turn in enumerate(turns) if turn["role"] == "user")
    text = BOS + efforts[reasoning_effort]
    for index, turn in enumerate(turns):
        role, content = turn["role"], turn["content"]
        shows_thinking = thinking and index >= last_user
        if role == "system":
            text += content
        elif role == "user":
            text += USER + content
            follower = turns[index + 1]["role"] if index + 1 < len(turns) else "assistant"
            if follower == "assistant":
                text += ASSISTANT + (THINK_START if shows_thinking else THINK_END)
        else:
            text += (turn["reasoning"] + THINK_END if shows_thinking else "") + content + EOS
    return text


def prompt_messages(question: str, system: str | None = None) -> list[dict[str, str]]:
    """The conversation that asks one question."""
    return ([{"role": "system", "content": system}] if system else []) + [{"role": "user", "content": question}]


def _validated(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    turns = []
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise UserError(f"messages[{index}].role is {role!r}; valid: {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise UserError(f"messages[{index}].content is {type(content).__name__}, not a string")
        if message.get("tools") or message.get("tool_calls"):
            raise UserError(f"messages[{index}] uses tools, which this encoder does not write; remove them")
        reasoning = message.get("reasoning") or message.get("reasoning_content") or ""
        turns.append({"role": role, "content": content, "reasoning": reasoning})
    if not any(turn["role"] == "user" for turn in turns):
        raise UserError(f"the conversation of {len(turns)} messages has no user message; add one")
    if turns[-1]["role"] not in ("user", "assistant"):
        raise UserError(f"the last message is the {turns[-1]['role']}'s; end with a user or an assistant message")
    return turns


def _merge_user_turns(turns: list[dict[str, str]]) -> list[dict[str, str]]:
    """Consecutive user messages are one turn, joined by an empty line, as in the released encoder."""
    merged: list[dict[str, str]] = []
    for turn in turns:
        if merged and turn["role"] == "user" == merged[-1]["role"]:
            merged[-1] = {**turn, "content": merged[-1]["content"] + "\n\n" + turn["content"]}
        else:
            merged.append(turn)
    return merged
