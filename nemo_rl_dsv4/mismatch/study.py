"""The result of a mismatch study, and what it says in words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from nemo_rl_dsv4.mismatch.measure import Mismatch

Kind = Literal["reference point", "on its own", "left out", "replay"]


@dataclass(frozen=True)
class Variant:
    """One trainer that scored the rollout.

    Attributes:
        name: what is switched, such as `kv` or `rope_fp32`; for a reference point what it is.
        kind: `reference point` (nothing aligned, everything aligned), `on its own` (only this is aligned), `left out`
            (everything but this), `replay` (the rollout's experts).
        mismatch: its distances from the rollout.
        overlap: share of the rollout's experts that this trainer would have chosen as well; None where not recorded.
    """

    name: str
    kind: Kind
    mismatch: Mismatch
    overlap: float | None = None


NOTHING, EVERYTHING, FP8_PRODUCTS = "nothing aligned", "everything aligned", "everything aligned, FP8 products"
NO_FLOOR = 1e-9
"""k3 below which an engine's two ways of computing count as one: float32 sums in other orders."""
NO_ENGINE = 10.0
"""k3 between decoding and prefill above which they are not those of one engine and one set of weights; random weights,
which amplify every difference, reach 0.4."""
ROUTING_WEIGHT = "routing_weight_after_down"
"""Rounding of the experts' hidden state needs it, so it is left out together with that only."""
REPLAY, REPLAY_FP8 = "router replay", "router replay, FP8 products"


@dataclass(frozen=True)
class Study:
    """Everything that was measured on one rollout.

    Attributes:
        engine: what sampled the rollout.
        trainer: what scored it (profile, precision, model).
        variants: the trainers.
        floor: the engine's decoding against its own prefill of the same tokens: no trainer can be closer than that to
            both. None where it was not measured.
        positions: distances along the response of the fully aligned trainer.
        layers: per layer `layer`, `cosine` (mean over tokens of trainer and engine hidden states), `relative_error`,
            `other_sums`: the relative error of the trainer against itself with other sums, and with FP8 products
            `fp8_products`: the relative error of that trainer.
        worst: the tokens at which the fully aligned trainer is farthest away; see `measure.worst_tokens`.
        other_sums: the fully aligned trainer against itself with every product off by a last-bit error of its sum
            (`summation.OtherSums`): what two programs that only add in different orders are apart. None where it was
            not measured.
        replayed_other_sums: the same for the aligned trainer with the rollout's experts.
    """

    engine: dict[str, Any]
    trainer: dict[str, Any]
    variants: tuple[Variant, ...]
    floor: Mismatch | None = None
    positions: tuple[dict[str, float], ...] = ()
    layers: tuple[dict[str, float], ...] = field(default=())
    worst: tuple[dict[str, float], ...] = ()
    other_sums: Mismatch | None = None
    replayed_other_sums: Mismatch | None = None

    def variant(self, name: str, kind: Kind) -> Variant | None:
        """The trainer of that name and kind, if it was measured."""
        return next((v for v in self.variants if (v.name, v.kind) == (name, kind)), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `conclusions` included."""
        return {**asdict(self), "conclusions": conclusions(self)}


def conclusions(study: Study) -> list[str]:
    """Sentences: how far apart, against which floor, which site matters most, what to fix first."""
    nothing = study.variant(NOTHING, "reference point")
    everything = study.variant(EVERYTHING, "reference point")
    said = []
    if nothing and everything:
        before, after = nothing.mismatch.k3, everything.mismatch.k3
        said.append(
            f"k3 is {before} with nothing aligned and {after} with everything aligned"
            + (f", {before.mean / after.mean:.3g} times less." if 0 < after.mean < before.mean else ".")
        )
    if everything:
        said += _against_floor(everything, study.floor)
        said += _against_other_sums(everything, study.other_sums)
        said += _what_to_fix(study, everything)
    said += _replay(study, everything)
    said += _few_tokens(study, everything)
    return said + _layers(study)


def _layers(study: Study) -> list[str]:
    if not study.layers:
        return []
    worst = max(study.layers, key=lambda row: row["relative_error"])
    if worst["relative_error"] <= 0:
        return ["Hidden states of one prefill are equal bit for bit after every layer."]
    own = f" (other sums alone: {worst['other_sums']:.2e})" if "other_sums" in worst else ""
    said = [
        f"Hidden states part most after layer {int(worst['layer'])}: cosine {worst['cosine']:.6f}, relative error "
        f"{worst['relative_error']:.2e}{own}."
    ]
    if "fp8_products" in worst:
        said.append(f"With FP8 products it is {worst['fp8_products']:.2e} there.")
    beyond = [row for row in study.layers if row["relative_error"] > 2 * row.get("other_sums", math.inf)]
    if beyond:
        first = beyond[0]
        said.append(
            f"Layer {int(first['layer'])} is the first where they part by more than twice what other sums do "
            f"({first['relative_error']:.2e} against {first['other_sums']:.2e}): look there for what is not aligned."
        )
    return said


def _against_floor(everything: Variant, floor: Mismatch | None) -> list[str]:
    if floor is None:
        return ["The engine's own floor (its decoding against its own prefill) was not measured."]
    rest, limit = everything.mismatch.k3, floor.k3
    if limit.mean < NO_FLOOR:
        equals = "equals" if limit.mean == 0.0 else f"({limit}) all but equals"
        return [f"The engine's decoding {equals} its own prefill, so all of the rest is between trainer and engine."]
    if limit.mean > NO_ENGINE:
        return [
            f"The engine's decoding is {limit} from its own prefill: no engine is that far from itself, so the "
            "rollout's log-probabilities are damaged, or of other weights; sample again."
        ]
    share = rest.mean / limit.mean
    closer = "closer to the engine than the engine's two ways of computing are to each other" if share < 0.95 else ""
    return [
        f"The engine's decoding is {limit} from its own prefill; the aligned trainer stands at {share:.2g} times that"
        + (f": {closer}." if closer else ".")
    ]


def _against_other_sums(everything: Variant, other_sums: Mismatch | None) -> list[str]:
    if other_sums is None:
        return []
    rest, own = everything.mismatch.k3, other_sums.k3
    said = f"Last-bit errors of its own sums move the aligned trainer by {own} from itself"
    if rest.mean <= 0:
        return [said + "."]
    if own.mean > 2 * rest.mean:
        return [
            f"{said}, {own.mean / rest.mean:.2g} times what it is from the rollout: trainer and engine are closer than "
            "two programs that only add in different orders."
        ]
    if own.mean >= 0.5 * rest.mean:
        return [
            f"{said}, {own.mean / rest.mean:.2g} times what it is from the rollout: two programs that only add in "
            "different orders are about as far apart."
        ]
    return [f"{said}, {own.mean / rest.mean:.2g} times what it is from the rollout: the rest has another cause."]


def _what_to_fix(study: Study, everything: Variant) -> list[str]:
    """Rank what is left out by how much farther the trainer then is.

    Without `ROUTING_WEIGHT` where experts are rounded: nobody can leave out or fix that one alone.
    """
    left_out = [v for v in study.variants if v.kind == "left out"]
    together = any(v.name == "experts" for v in left_out) and any(v.name == ROUTING_WEIGHT for v in left_out)
    if together:
        left_out = [v for v in left_out if v.name != ROUTING_WEIGHT]
    if not left_out:
        return []
    whole = everything.mismatch.k3
    ranked = sorted(left_out, key=lambda v: v.mismatch.k3.mean, reverse=True)
    telling = [v for v in ranked if v.mismatch.k3.low > whole.high]
    if not telling:
        return ["Leaving any one of them out changes k3 by less than its confidence interval."]
    first = telling[0]
    said = [
        f"{first.name} matters most; where it is missing, fix it first: without it alone k3 rises from {whole} to "
        f"{first.mismatch.k3}" + (f" ({first.mismatch.k3.mean / whole.mean:.3g} times)." if whole.mean > 0 else ".")
    ]
    if len(telling) > 1:
        others = ", ".join(f"{v.name} ({v.mismatch.k3.mean:.2e})" for v in telling[1:])
        said.append(f"Then, in this order: {others}.")
    harmful = [v for v in left_out if v.mismatch.k3.high < whole.low]
    said += [
        f"Leaving {v.name} out makes the trainer closer ({v.mismatch.k3}): its rounding is not what this engine does."
        for v in harmful
    ]
    silent = [v.name for v in ranked if v not in telling and v not in harmful]
    if silent:
        said.append(f"Within noise on this rollout: {', '.join(silent)}.")
    if together:
        said.append(f"{ROUTING_WEIGHT} has no rank: experts that are rounded need it, so both are left out in its row.")
    return said


def _replay(study: Study, everything: Variant | None) -> list[str]:
    replayed, in_fp8 = (study.variant(name, "replay") for name in (REPLAY, REPLAY_FP8))
    if replayed is None or everything is None:
        return []
    own = "" if replayed.overlap is None else f", of which it would have chosen {replayed.overlap:.2%} by itself,"
    said = [f"With the rollout's experts replayed{own} k3 is {replayed.mismatch.k3}."]
    if study.floor is not None and study.floor.k3.mean >= NO_FLOOR:
        said[0] = (
            said[0][:-1] + f", {replayed.mismatch.k3.mean / study.floor.k3.mean:.2g} times the engine's own floor."
        )
    if in_fp8 is not None:
        said.append(f"With FP8 products as well it is {in_fp8.mismatch.k3}.")
    if study.replayed_other_sums is not None:
        said.append(f"Other sums alone move that trainer by {study.replayed_other_sums.k3} from itself.")
    return said


FEW = 0.05
"""Share of all tokens that counts as a handful."""


def _few_tokens(study: Study, everything: Variant | None) -> list[str]:
    """Whether a handful of tokens makes most of the distance, and whether the engine itself parts there."""
    if everything is None or not study.worst:
        return []
    whole = everything.mismatch.k3.mean * everything.mismatch.tokens
    share = sum(row["k3"] for row in study.worst)
    if whole <= 0 or share < 0.5 * whole or len(study.worst) > FEW * everything.mismatch.tokens:
        return []
    said = f"{len(study.worst)} of {everything.mismatch.tokens} tokens make {share / whole:.0%} of k3"
    if all("prefill" in row for row in study.worst):
        nearer = sum(abs(row["prefill"] - row["trainer"]) < abs(row["prefill"] - row["rollout"]) for row in study.worst)
        said += f"; at {nearer} of them the engine's own prefill is nearer to the trainer than to its decoding"
    return [said + "."]


def rows(study: Study) -> Sequence[dict[str, str]]:
    """The table, one row a variant, texts ready to print; the floors come last."""
    table = [_row(v.name, v.kind, v.mismatch, v.overlap) for v in study.variants]
    if study.floor is not None:
        table.append(_row("engine: decoding against its prefill", "floor", study.floor, None))
    if study.other_sums is not None:
        table.append(_row("trainer: against itself, other sums", "floor", study.other_sums, None))
    if study.replayed_other_sums is not None:
        table.append(_row("trainer, replay: against itself, other sums", "floor", study.replayed_other_sums, None))
    return table


def _row(name: str, kind: str, mismatch: Mismatch, overlap: float | None) -> dict[str, str]:
    return {
        "trainer": name,
        "kind": kind,
        "k1": f"{mismatch.k1.mean:+.3e}",
        "k3": f"{mismatch.k3.mean:.3e}",
        "k3, 95 %": f"{mismatch.k3.low:.1e} to {mismatch.k3.high:.1e}",
        "prob diff": f"{mismatch.prob_diff.mean:.3e}",
        "largest": f"{mismatch.largest:.2e}",
        "experts": "" if overlap is None else f"{overlap:.2%}",
    }
