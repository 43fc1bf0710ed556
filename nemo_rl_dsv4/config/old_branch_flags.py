"""Flags of the development branch that `policy.dsv4.fake_quant` replaces."""

from __future__ import annotations

from typing import Any

from nemo_rl_dsv4.errors import UserError

PREFIX = "fp8_ds_mla_fake_quant_"
OLD_TO_NEW = {
    "kv": "kv",
    "o_proj": "o_proj",
    "moe": "experts",
    "attn_proj": "linear_inputs",
    "indexer": "indexer",
}


def map_old_flags(recipe: dict[str, Any]) -> list[str]:
    """Moves `policy.hf_config_overrides.fp8_ds_mla_fake_quant_*` to `policy.dsv4.fake_quant`, in place.

    Returns:
        one sentence for each flag that was moved.

    Raises:
        UserError: an unknown flag of that family, a value that is not a bool, or a contradiction with the new key.
    """
    policy = recipe.get("policy")
    old = policy.get("hf_config_overrides") if isinstance(policy, dict) else None
    if not isinstance(policy, dict) or not isinstance(old, dict):
        return []
    notices = []
    for flag in [name for name in old if str(name).startswith(PREFIX)]:
        site = flag.removeprefix(PREFIX)
        old_path = f"policy.hf_config_overrides.{flag}"
        if site not in OLD_TO_NEW:
            known = ", ".join(PREFIX + name for name in OLD_TO_NEW)
            raise UserError(f"unknown key {old_path}; the flags of this family are {known}")
        value = old.pop(flag)
        if not isinstance(value, bool):
            raise UserError(f"{old_path} is {value!r}, wanted true or false")
        new_path = f"policy.dsv4.fake_quant.{OLD_TO_NEW[site]}"
        fake_quant = policy.setdefault("dsv4", {}).setdefault("fake_quant", {})
        current = fake_quant.get(OLD_TO_NEW[site])
        if current is not None and current != value:
            raise UserError(f"{old_path} is {value} but {new_path} is {current}; keep the second one only")
        fake_quant[OLD_TO_NEW[site]] = value
        notices.append(f"{old_path}: {str(value).lower()} is read as {new_path}: {str(value).lower()}")
    return notices
