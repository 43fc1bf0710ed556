"""The rule of DAPO's sets: the last line `Answer: ...` is compared as text."""

import pytest

from nemo_rl_dsv4.data import Problem
from nemo_rl_dsv4.environments import MathEnvironment
from nemo_rl_dsv4.environments.answer_line import plain
from nemo_rl_dsv4.environments.single_turn import SingleTurnEnvironment
from nemo_rl_dsv4.errors import UserError


@pytest.mark.parametrize(
    ("gold", "response", "reward"),
    [
        ("34", "6 * 5 + 4 = 34\nAnswer: 34", 1.0),
        ("34", "Answer: $34$", 1.0),
        ("34", "Answer: \\boxed{34}", 1.0),
        ("34", "answer : $x = 34.$", 1.0),
        ("34", "Answer: 34.", 0.0),
        ("34", "**Answer:** 34", 0.0),
        ("34", "Answer: **34**", 0.0),
        ("34", "Answer: 35\nAnswer: 34", 1.0),
        ("34", "Answer: 34\nAnswer: 35", 0.0),
        ("34", "\\boxed{34}", 0.0),
        ("34", "The answer is 34", 0.0),
        ("34", "Answer: 34 or 35", 0.0),
        ("34", "Answer:", 0.0),
        ("34", "Answer: 34" + " then much more" * 30, 0.0),
        ("1234", "Answer: 1,234", 1.0),
        ("-4", "Answer: -4", 1.0),
        ("90", "Answer: 90^\\circ", 1.0),
        ("90", "Answer: 90 degrees", 1.0),
        ("\\frac{1}{2}", "Answer: $\\frac{1}{2}$", 1.0),
        ("\\frac{1}{2}", "Answer: $\\dfrac{1}{2}$", 0.0),
        ("\\frac{1}{2}", "Answer: 0.5", 0.0),
        ("34", "Answer: " + "9" * 200, 0.0),
        ("34", "", 0.0),
    ],
)
def test_only_a_right_answer_line_counts(gold, response, reward):
    environment = MathEnvironment(verifier="dapo_math_verify")
    assert environment.score([Problem("", gold)], [response]) == [reward]
    environment.shutdown()


def test_the_recipes_key_chooses_the_rule():
    environment = SingleTurnEnvironment({"num_workers": 1, "math_verify_impl": "dapo_math_verify"})
    talk = [[{"role": "user", "content": "Answer: 3"}, {"role": "assistant", "content": "so\nAnswer: 4"}]]
    turn = environment.step(talk, [{"ground_truth": "4"}])
    assert turn.rewards.tolist() == [1.0] and turn.answers == ["4"]
    environment.shutdown()
    with pytest.raises(UserError, match="math_verify_impl is 'sympy'; wanted hf_math_verify or dapo_math_verify"):
        MathEnvironment(verifier="sympy")


def test_plain_text_is_a_fixed_point():
    for text in ("34", "\\frac{1}{2}", "x+1", "(1,2)", "A"):
        assert plain(plain(text)) == plain(text)
