"""Looking into an OmegaConf tree without resolving it, so that interpolations and missing keys cause no error."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, ListConfig


def child(node: Any, key: str) -> Any:
    """The node under `key`, a name or an index (an OmegaConf node, also for null), or None where there is none."""
    if isinstance(node, ListConfig) and not node._is_none() and not node._is_interpolation():
        return node._get_node(int(key)) if key.isdecimal() and int(key) < len(node) else None
    if not isinstance(node, DictConfig) or node._is_none() or node._is_interpolation():
        return None
    return node._get_node(key, validate_access=False)


def descend(node: Any, key_path: str) -> Any:
    """The node under a dotted path, or None."""
    for key in key_path.split("."):
        node = child(node, key)
    return node


def is_plain_mapping(node: Any) -> bool:
    """Whether `node` is a mapping with keys of its own, neither null nor an interpolation."""
    return isinstance(node, DictConfig) and not node._is_none() and not node._is_interpolation()
