"""Recipes: YAML with inheritance and overrides, read into one typed, read-only object."""

from nemo_rl_dsv4.config.load import load_config
from nemo_rl_dsv4.config.master import MasterConfig
from nemo_rl_dsv4.config.validate import validate

__all__ = ["MasterConfig", "load_config", "validate"]
