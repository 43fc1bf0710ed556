"""The model of a recipe as an official-style configuration, from a folder, a known name or the tiny model's sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemo_rl_dsv4.config import MasterConfig
from nemo_rl_dsv4.config.model_limits import TINY
from nemo_rl_dsv4.data.tokenizer import make_tiny_tokenizer
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.hf_config import read_config, rope_settings, validate_config
from nemo_rl_dsv4.model.known_models import KNOWN_MODELS, known_config
from nemo_rl_dsv4.tiny.checkpoint import tiny_hf_config

TINY_DEFAULT_MAX_NUMBER = 20


def planned_config(config: MasterConfig) -> dict[str, Any]:
    """Configuration of `policy.model_name` with `hf_config_overrides`. Nothing is downloaded.

    Raises:
        UserError: a hub id that is not known, or values that no DeepSeek-V4 can have.
    """
    policy = config.policy
    overrides = dict(policy.hf_config_overrides)
    if policy.model_name == TINY:
        assert policy.dsv4.tiny is not None  # validate() saw to it
        sections = [section for section in (config.data.train, config.data.validation) if section is not None]
        numbers = [section.max_number for section in sections if section.max_number is not None]
        tokenizer = make_tiny_tokenizer(max_number=max(numbers, default=TINY_DEFAULT_MAX_NUMBER))
        values = {**tiny_hf_config(policy.dsv4.tiny.model_dump(), tokenizer), **overrides}
    elif Path(policy.model_name).expanduser().is_dir():
        return read_config(Path(policy.model_name).expanduser(), overrides)
    else:
        known = known_config(policy.model_name)
        if known is None:
            raise UserError(
                f"policy.model_name is {policy.model_name!r}, neither a folder nor one of {', '.join(KNOWN_MODELS)}; "
                "a plan downloads nothing: give a folder with the model's config.json"
            )
        values = {**known, **overrides}
    validate_config(values)
    rope_settings(values)
    return values
