"""The part of `--dry-run` that loads what is on this machine: tokenizer, problems, one prompt."""

from __future__ import annotations

from pathlib import Path

from nemo_rl_dsv4.config import MasterConfig
from nemo_rl_dsv4.config.prompts import TINY, make_datasets, make_prompts, make_tokenizer, steps_of_run
from nemo_rl_dsv4.data.datasets import NEMO_RL_NAMES
from nemo_rl_dsv4.data.hub_problems import HUB_SETS, is_local
from nemo_rl_dsv4.data.tokenizer import RELEASED_NAME

SHOWN_CHARACTERS = 400


def _why_not_loaded(name: str) -> str:
    """What a run would do that a dry run leaves, and how to have it checked."""
    if name in HUB_SETS:
        return (
            f"not loaded (a run reads {HUB_SETS[name].hub_id} from HF_HOME or the hub; with data_path, a copy on this "
            "machine, it is checked here): lengths, answers and overlap with the other set were not checked"
        )
    return "not loaded (read by NeMo-RL when it runs), so not checked"


def data_rows(config: MasterConfig) -> list[tuple[str, str]]:
    """Tokenizer, sizes of the sets, lengths and an example prompt; what is not on this machine is named instead.

    Raises:
        UserError: what is on this machine cannot be used: a damaged file, an unknown dataset, a prompt too long.
    """
    sets = [section for section in (config.data.train, config.data.validation) if section is not None]
    remote = sorted(
        {
            str(section.dataset_name)
            for section in sets
            if section.dataset_name in (*NEMO_RL_NAMES, None) or not is_local(section)
        }
    )
    name = config.policy.tokenizer.name
    rows = []
    tokenizer = None
    if name in (TINY, RELEASED_NAME) or Path(name).expanduser().exists():
        tokenizer = make_tokenizer(config)
        rows.append(("tokenizer", f"{name}: {tokenizer.vocab_size} tokens"))
    else:
        rows.append(("tokenizer", f"{name}: not loaded (not on this machine)"))
    if remote:
        return [*rows, *(("problems", f"{name}: {_why_not_loaded(name)}") for name in remote)]
    train_set, val_set = make_datasets(config)
    names = {"train": config.data.train.dataset_name}
    if config.data.validation is not None:
        names["validation"] = config.data.validation.dataset_name
    for split, problems in (("train", train_set), ("validation", val_set)):
        if problems is not None:
            rows.append((f"{split} set", f"{names[split]}: {len(problems)} problems"))
    if tokenizer is None:
        return rows
    loader, val_prompts = make_prompts(config, tokenizer, train_set, val_set)
    lengths = [len(prompt.token_ids) for prompt in (*loader.prompts, *val_prompts)]
    rows.append(("prompts", f"{min(lengths)} to {max(lengths)} tokens; {len(loader)} batches an epoch"))
    steps, short = steps_of_run(config, loader)
    rows.append(("run", f"{steps} steps" if short is None else short))
    example = loader.next_batch()[0]
    text = tokenizer.decode(example.token_ids, skip_special_tokens=False)
    shown = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]} ..."
    return [*rows, ("first prompt", shown), ("its answer", str(example.problem.answer))]
