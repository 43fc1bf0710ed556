"""Hydra's override grammar on top of a merged recipe, in struct mode.

`a.b=1` changes a key that the recipe has, `+a.b=1` adds one, `++a.b=1` does either, `~a.b` removes one.
"""

from __future__ import annotations

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from nemo_rl_dsv4.config.key_names import is_known, nearest
from nemo_rl_dsv4.config.master import MasterConfig
from nemo_rl_dsv4.config.nodes import descend
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
            raise UserError(
                f"{text!r}: the recipe has no key {key} to remove; did you mean {nearest(MasterConfig, key)}?"
            )
        parent, _, name = key.rpartition(".")
        node = OmegaConf.select(config, parent) if parent else config
        with open_dict(config):
            del node[name]
        return
    value = override.value()
    if override.is_force_add():
        with open_dict(config):
            OmegaConf.update(config, key, value, merge=True)
        return
    if override.is_add():
        if present and not isinstance(OmegaConf.select(config, key), DictConfig):
            raise UserError(f"{text!r}: {key} is already in the recipe; drop the + to change it")
        with open_dict(config):
            OmegaConf.update(config, key, value, merge=True)
        return
    if not present:
        if is_known(MasterConfig, key):
            raise UserError(f"{text!r}: the recipe does not set {key}; write +{text} to add it")
        raise UserError(f"{text!r}: unknown key {key}; did you mean {nearest(MasterConfig, key)}?")
    OmegaConf.update(config, key, value, merge=True)
