"""The words follow from the numbers: what to fix first, what does not matter, what is wrong."""

from dataclasses import replace

from nemo_rl_dsv4.mismatch.measure import Estimate, Mismatch
from nemo_rl_dsv4.mismatch.study import (
    EVERYTHING,
    NOTHING,
    REPLAY,
    REPLAY_FP8,
    Study,
    Variant,
    conclusions,
    rows,
)


def mismatch(k3: float, width: float = 0.1) -> Mismatch:
    estimate = Estimate(k3, k3 * (1 - width), k3 * (1 + width))
    return Mismatch(k1=estimate, k3=estimate, prob_diff=estimate, largest=0.5, tokens=100, prompts=10)


def study(floor: float | None = 4e-3, **left_out: float) -> Study:
    variants = [
        Variant(NOTHING, "reference point", mismatch(1e-1)),
        Variant(EVERYTHING, "reference point", mismatch(1e-3), 0.97),
        *(Variant(name, "left out", mismatch(value)) for name, value in left_out.items()),
    ]
    return Study({}, {}, tuple(variants), None if floor is None else mismatch(floor))


def test_the_largest_site_is_named_first_and_noise_is_called_noise() -> None:
    said = conclusions(study(kv=2e-3, weights=5e-2, indexer=1.02e-3, o_proj=1e-4))
    assert said[0].startswith("k3 is 1.000e-01") and "100 times less" in said[0]
    assert "0.25 times that: closer to the engine" in said[1]
    assert said[2].startswith("weights matters most; where it is missing, fix it first") and "(50 times)" in said[2]
    assert said[3] == "Then, in this order: kv (2.00e-03)."
    assert said[4].startswith("Leaving o_proj out makes the trainer closer")
    assert said[5] == "Within noise on this rollout: indexer."


def test_what_another_order_of_additions_would_do_is_set_beside_the_distance() -> None:
    said = conclusions(replace(study(), other_sums=mismatch(8e-4)))
    assert "0.8 times what it is from the rollout: two programs that only add" in said[2]
    said = conclusions(replace(study(), other_sums=mismatch(1e-5)))
    assert "0.01 times what it is from the rollout: the rest has another cause" in said[2]
    assert rows(replace(study(), other_sums=mismatch(1e-5)))[-1]["trainer"] == "trainer: against itself, other sums"


def test_what_can_only_be_left_out_together_with_experts_is_nothing_to_fix_by_itself() -> None:
    """The verdict named routing_weight_after_down, whose row also leaves out the rounding of experts."""
    made = study(weights=5e-2, experts=4e-3, routing_weight_after_down=6e-3)
    said = conclusions(made)
    assert said[3] == "Then, in this order: experts (4.00e-03)."
    named = [sentence for sentence in said if "routing_weight_after_down" in sentence]
    assert named == [
        "routing_weight_after_down has no rank: experts that are rounded need it, so both are left out in its row."
    ]
    assert "routing_weight_after_down" in [row["trainer"] for row in rows(made)]
    alone = conclusions(study(weights=5e-2, routing_weight_after_down=6e-3))
    assert alone[3] == "Then, in this order: routing_weight_after_down (6.00e-03)."
    assert not any("has no rank" in sentence for sentence in alone)


def test_no_site_stands_out() -> None:
    assert conclusions(study(kv=1.05e-3))[-1] == (
        "Leaving any one of them out changes k3 by less than its confidence interval."
    )


def test_a_floor_of_zero_or_none_is_said() -> None:
    assert "was not measured" in conclusions(study(None))[1]
    assert "decoding equals its own prefill" in conclusions(study(0.0))[1]
    assert "all but equals its own prefill" in conclusions(study(1.7e-15))[1]


def test_other_sums_that_move_the_trainer_farther_than_the_rollout_is_are_called_so() -> None:
    said = conclusions(replace(study(), other_sums=mismatch(1e-2)))[2]
    assert "10 times what it is from the rollout: trainer and engine are closer than two programs" in said


def test_replay_and_layers() -> None:
    base = study()
    with_more = Study(
        {},
        {},
        (*base.variants, Variant("router replay", "replay", mismatch(5e-4), 0.97)),
        layers=(
            {"layer": 0, "cosine": 0.99999, "relative_error": 1e-4},
            {"layer": 1, "cosine": 0.9, "relative_error": 0.4},
        ),
    )
    said = conclusions(with_more)
    assert "it would have chosen 97.00% by itself, k3 is 5.000e-04" in said[-2]
    assert "after layer 1: cosine 0.900000" in said[-1]


def test_replay_beside_the_floor_fp8_products_and_layers_beside_other_sums() -> None:
    base = study(floor=4e-3)
    replays = (Variant(REPLAY, "replay", mismatch(1e-3), 0.97), Variant(REPLAY_FP8, "replay", mismatch(8e-4)))
    layers = ({"layer": 0, "cosine": 0.999, "relative_error": 0.05, "other_sums": 0.01, "fp8_products": 0.02},)
    made = replace(base, variants=(*base.variants, *replays), layers=layers, replayed_other_sums=mismatch(9e-4))
    said = conclusions(made)
    assert "by itself, k3 is 1.000e-03" in said[-6] and said[-6].endswith(", 0.25 times the engine's own floor.")
    assert said[-5].startswith("With FP8 products as well it is 8.000e-04")
    assert said[-4].startswith("Other sums alone move that trainer by 9.000e-04")
    assert said[-3].endswith("relative error 5.00e-02 (other sums alone: 1.00e-02).")
    assert said[-2] == "With FP8 products it is 2.00e-02 there."
    assert said[-1].startswith("Layer 0 is the first where they part by more than twice what other sums do (5.00e-02")
    near = ({**layers[0], "other_sums": 0.04},)
    assert not any("is the first where" in sentence for sentence in conclusions(replace(made, layers=near)))
    assert rows(made)[-1]["trainer"] == "trainer, replay: against itself, other sums"


def test_rows_have_the_floor_last() -> None:
    table = rows(study(kv=2e-3))
    assert [row["trainer"] for row in table][-1].startswith("engine: decoding")
    assert table[1]["experts"] == "97.00%" and table[2]["kind"] == "left out"


def test_a_few_tokens_that_make_the_distance_are_said() -> None:
    base = study()
    token = {"rollout": -3.0, "trainer": -1.0, "prefill": -1.1, "k3": 0.04}
    said = conclusions(replace(base, worst=(token, {**token, "prefill": -2.9})))
    assert said[-1] == (
        "2 of 100 tokens make 80% of k3; at 1 of them the engine's own prefill is nearer to the trainer than to its "
        "decoding."
    )
    assert conclusions(replace(base, worst=({**token, "k3": 0.001},))) == conclusions(base)
