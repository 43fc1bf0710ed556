"""Hydra's override grammar on top of a merged recipe, in struct mode.

`a.b=1` changes a key that the recipe has, `+a.b=1` adds one, `++a.b=1` does either, `~a.b` removes one.
"""

from __future__ import annotations

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from nemo_rl_dsv4.config.key_names import hint, is_known
from nemo_rl_dsv4.config.master import MasterConfig
from nemo_rl_dsv4.config.nodes import descend, is_plain_mapping
from nemo_rl_dsv4.errors import UserError


def apply_overrides(config: DictConfig, overrides: list[str]) -> None:
    """Applies command-line overrides to `config` in place, in order.

    Raises:
        UserError: text that is not an override, a sweep, a new key without `+`, a `+` on a key that is there.
    """
    parser = OverridesParser.create()
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            raise UserError(f"{text!r} is not an override; write key=value, such as grpo.max_num_steps=5") from error
        if override.is_sweep_override():
            raise UserError(f"{text!r} is a sweep over several values; give one value")
        _apply(config, override, text)


def _apply(config: DictConfig, override: Override, text: str) -> None:
    key = override.key_or_group
    if not key:
        raise UserError(f"{text!r} names no key; write key=value, such as grpo.max_num_steps=5")
    try:
        _apply_value(config, override, key, text)
    except OmegaConfBaseException as error:
        raise UserError(f"{text!r}: {str(error).splitlines()[0]}") from error


def _apply_value(config: DictConfig, override: Override, key: str, text: str) -> None:
    present = descend(config, key) is not None
    if override.is_delete():
        if not present:
            raise UserError(f"{text!r}: the recipe has no key {key} to remove; {hint(MasterConfig, key)}")
        parent, _, name = key.rpartition(".")
        node = OmegaConf.select(config, parent) if parent else config
        with open_dict(config):
            del node[name]
        return
    value = override.value()
    if override.is_add() and present and not isinstance(OmegaConf.select(config, key), DictConfig):
        raise UserError(f"{text!r}: {key} is already in the recipe; drop the + to change it")
    if not override.is_add() and not override.is_force_add():
        _require_present(config, key, value, text)
    there = descend(config, key)
    is_reference = isinstance(value, str) and value.startswith("${")
    if is_plain_mapping(there) and not isinstance(value, dict) and value is not None and not is_reference:
        shown = f"{key}.{next(iter(there), 'NAME')}"
        raise UserError(f"{text!r}: {key} is {value!r}, wanted a mapping; write {shown}=VALUE for a key of it")
    with open_dict(config):
        # A mapping changes what it names of a mapping; anything else takes the place of what is there.
        OmegaConf.update(config, key, value, merge=isinstance(value, dict) and isinstance(there, DictConfig))


def _require_present(config: DictConfig, key: str, value: object, text: str) -> None:
    """Raises UserError for a key that the recipe does not have, also for one inside a mapping that is given."""
    node = descend(config, key)
    if node is None:
        if is_known(MasterConfig, key):
            raise UserError(f"{text!r}: the recipe does not set {key}; write +{text} to add it")
        raise UserError(f"{text!r}: unknown key {key}; {hint(MasterConfig, key)}")
    if isinstance(value, dict) and is_plain_mapping(node):
        for name, inner in value.items():
            _require_present(config, f"{key}.{name}", inner, text)
