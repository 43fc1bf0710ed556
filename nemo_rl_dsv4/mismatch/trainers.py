"""The trainers of a study: what each of them rounds and aligns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nemo_rl_dsv4.mismatch.study import EVERYTHING, FP8_PRODUCTS, NOTHING, REPLAY, REPLAY_FP8, ROUTING_WEIGHT, Kind
from nemo_rl_dsv4.model.qat import SWITCHES as ROUNDING
from nemo_rl_dsv4.numerics.alignment import DIFFERENCES
from nemo_rl_dsv4.numerics.profiles import RolloutProfile


@dataclass(frozen=True)
class Trainer:
    """One trainer.

    Attributes:
        name: what is switched; see `Variant`.
        kind: see `Variant`.
        fake_quant: site group -> rounded.
        alignment: switches that do not follow the profile.
        replay: use the rollout's experts.
        fp8: multiply in FP8 where both operands are rounded.
    """

    name: str
    kind: Kind
    fake_quant: Mapping[str, bool]
    alignment: Mapping[str, bool] = field(default_factory=dict)
    replay: bool = False
    fp8: bool = False


def trainers_of(profile: RolloutProfile, precision: str, *, routes: bool, fp8: bool = False) -> list[Trainer]:
    """Every trainer worth comparing for a rollout of `profile`.

    Args:
        profile: what the rollout rounds by.
        precision: `float32` or `bfloat16`; switches that only move BF16 casts are left out in float32.
        routes: the rollout recorded its experts.
        fp8: the trainer's device has FP8 products.

    Returns:
        Nothing aligned, everything aligned (with `fp8` also in FP8 products), then each site group and each switch on
        its own and left out, then replay (with `fp8` also in FP8 products).
    """
    groups = [name for name, sites in ROUNDING.items() if any(profile.site(site) is not None for site in sites)]
    on = {row.switch for row in DIFFERENCES if profile.alignment[row.switch]}
    switches = [row.switch for row in DIFFERENCES if row.switch in on and (precision != "float32" or row.float32)]
    everything, nothing = dict.fromkeys(ROUNDING, True), dict.fromkeys(ROUNDING, False)
    none = dict.fromkeys(switches, False)
    made = [
        Trainer(NOTHING, "reference point", nothing, none),
        Trainer(EVERYTHING, "reference point", everything),
    ]
    if fp8:
        made.append(Trainer(FP8_PRODUCTS, "reference point", everything, fp8=True))
    for group in groups:
        needed = {ROUTING_WEIGHT: True} if group == "experts" and ROUTING_WEIGHT in none else {}
        made.append(Trainer(group, "on its own", {**nothing, group: True}, {**none, **needed}))
        made.append(Trainer(group, "left out", {**everything, group: False}))
    for switch in switches:
        made.append(Trainer(switch, "on its own", nothing, {**none, switch: True}))
        without = {**everything, "experts": False} if switch == ROUTING_WEIGHT else everything
        made.append(Trainer(switch, "left out", without, {switch: False}))
    if routes:
        made.append(Trainer(REPLAY, "replay", everything, replay=True))
    if routes and fp8:
        made.append(Trainer(REPLAY_FP8, "replay", everything, replay=True, fp8=True))
    return made
