"""From a recipe file and command-line overrides to a validated configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from nemo_rl_dsv4.config.inheritance import load_layers, merge_layers
from nemo_rl_dsv4.config.master import MasterConfig
from nemo_rl_dsv4.config.nodes import descend
from nemo_rl_dsv4.config.old_branch_flags import map_old_flags
from nemo_rl_dsv4.config.overrides import apply_overrides
from nemo_rl_dsv4.config.report import user_error
from nemo_rl_dsv4.errors import UserError

RESOLVERS = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": lambda a, b: max(a, b),
}


def load_config(path: Path | str, overrides: list[str] | None = None) -> MasterConfig:
    """Reads a recipe: `defaults:` chain, then overrides, then interpolation, then the schema.

    Args:
        path: YAML file of the recipe.
        overrides: Hydra overrides such as `grpo.seed=1`; a key that the recipe does not have needs a leading `+`.

    Raises:
        UserError: missing file, bad YAML, circular `defaults:`, bad override, unknown key, wrong type or value.
    """
    layers = load_layers(Path(path))
    merged = merge_layers(layers)
    OmegaConf.set_struct(merged, True)
    apply_overrides(merged, overrides or [])
    recipe = _resolve(merged, Path(path))
    notices = map_old_flags(recipe)

    def origin(key_path: str) -> str:
        return _origin(key_path, layers, overrides or [])

    try:
        config = MasterConfig.model_validate(recipe)
    except ValidationError as error:
        raise user_error(error, origin) from error
    config._notices = tuple(notices)
    return config


def _resolve(merged: DictConfig, path: Path) -> dict[str, Any]:
    for name, function in RESOLVERS.items():
        if not OmegaConf.has_resolver(name):
            OmegaConf.register_new_resolver(name, function)
    try:
        return OmegaConf.to_container(merged, resolve=True, throw_on_missing=True)  # pyright: ignore[reportReturnType]
    except OmegaConfBaseException as error:
        raise UserError(f"{path}: {str(error).splitlines()[0]} (key {error.full_key})") from error


def _origin(key_path: str, layers: list[tuple[Path, DictConfig]], overrides: list[str]) -> str:
    """Where a key was set last: an override, a file, or nowhere (a default of the schema)."""
    for text in reversed(overrides):
        name = text.lstrip("+~").partition("=")[0]
        if key_path == name or key_path.startswith(name + "."):
            return f"override {text!r}"
    for file, layer in reversed(layers):
        if descend(layer, key_path) is not None:
            return str(file)
    return ""
