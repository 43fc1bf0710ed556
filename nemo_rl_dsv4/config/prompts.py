"""Tokenizer, problems and prompts of a recipe."""

from __future__ import annotations

from typing import Any

from nemo_rl_dsv4.config.master import MasterConfig
from nemo_rl_dsv4.config.rules_of_values import check_stop_tokens
from nemo_rl_dsv4.data import (
    Problem,
    Prompt,
    PromptLoader,
    Tokenizer,
    build_datasets,
    load_tokenizer,
    make_tiny_tokenizer,
)

TINY = "tiny"
TINY_DEFAULT_MAX_NUMBER = 20
WORD_PROBLEM_KEYS = ("difficulty", "max_number", "long_fraction", "long_words")


def make_tokenizer(config: MasterConfig) -> Tokenizer:
    """The recipe's tokenizer; `tiny` is made to fit the largest number of the word problems.

    Raises:
        UserError: it cannot be loaded, or has no such token as one of `policy.generation.stop_token_ids`.
    """
    name = config.policy.tokenizer.name
    tokenizer = _tiny_tokenizer(config) if name == TINY else load_tokenizer(name)
    check_stop_tokens(config, tokenizer.vocab_size, f"tokenizer {name}")
    return tokenizer


def _tiny_tokenizer(config: MasterConfig) -> Tokenizer:
    sections = [section for section in (config.data.train, config.data.validation) if section is not None]
    largest = [section.max_number for section in sections if section.max_number is not None]
    return make_tiny_tokenizer(max_number=max(largest, default=TINY_DEFAULT_MAX_NUMBER))


def make_prompts(
    config: MasterConfig, tokenizer: Tokenizer, train_set: list[Problem], val_set: list[Problem] | None
) -> tuple[PromptLoader, list[Prompt]]:
    """The training loader and the list of validation prompts."""
    limit = config.data.max_input_seq_length or config.policy.max_total_sequence_length
    chat = config.policy.tokenizer.chat_template_kwargs or {}
    options: dict[str, Any] = {
        "max_input_tokens": limit,
        "overlong": config.data.overlong_prompts,
        "thinking": chat.get("thinking", False),
        "reasoning_effort": chat.get("reasoning_effort"),
    }
    prompts_per_batch = config.grpo.num_prompts_per_step
    if config.grpo.use_dynamic_sampling:
        prompts_per_batch = int(prompts_per_batch * config.grpo.batch_multiplier)
    loader = PromptLoader(train_set, tokenizer, prompts_per_batch, config.grpo.seed, config.data.shuffle, **options)
    if val_set is None:
        return loader, []
    val_loader = PromptLoader(val_set, tokenizer, len(val_set), 0, False, keep_partial=True, **options)
    return loader, [prompt for batch in val_loader for prompt in batch]


def steps_of_run(config: MasterConfig, loader: PromptLoader) -> tuple[int, str | None]:
    """Steps that a run can make, and a sentence where its data ends before the `grpo.max_num_steps` of a recipe.

    With dynamic sampling a step may take several batches, so the data can end sooner still.
    """
    grpo = config.grpo
    steps = grpo.max_num_epochs * len(loader)
    if steps >= grpo.max_num_steps:
        return grpo.max_num_steps, None
    if grpo.max_num_steps == type(grpo).model_fields["max_num_steps"].default:  # nobody asked for a number of steps
        return steps, None
    most = "at most " if grpo.use_dynamic_sampling else ""
    return steps, (
        f"note: the run ends after {most}{steps} steps, before grpo.max_num_steps {grpo.max_num_steps}: data.train has "
        f"{len(loader.prompts)} prompts for steps of {loader.batch}, and grpo.max_num_epochs is {grpo.max_num_epochs}; "
        "raise one of them for more"
    )


def make_datasets(config: MasterConfig) -> tuple[list[Problem], list[Problem] | None]:
    """Training and validation problems.

    Raises:
        UserError: a section that names no dataset, or one that cannot be read.
    """
    validation = None if config.data.validation is None else dataset_section(config.data.validation)
    return build_datasets(dataset_section(config.data.train), validation, config.grpo.seed)


def dataset_section(section: Any) -> dict[str, Any]:
    """A data section without nulls. Settings of the word problems that a recipe inherits do not follow another set."""
    values = section.model_dump(exclude_none=True)
    if section.dataset_name != "word_problems":
        values = {key: value for key, value in values.items() if key not in WORD_PROBLEM_KEYS}
    return values
