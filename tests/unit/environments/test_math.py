"""Rewards: only a right answer in a box counts, from any thread, and nothing blocks."""

import threading
import time

import pytest

from nemo_rl_dsv4.data import Problem, build_dataset
from nemo_rl_dsv4.environments import MathEnvironment, last_boxed
from nemo_rl_dsv4.environments.scoring import score_math
from nemo_rl_dsv4.errors import UserError


def score(environment, *pairs):
    return environment.score([Problem("", answer) for answer, _ in pairs], [response for _, response in pairs])


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (r"16 - 7 = 9. \boxed{ 7 }", "7"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}} end", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"\boxed{}", ""),
        (r"\boxed{7", None),
        (r"\boxed{1} \boxed{7", None),
        ("7", None),
        (r"boxed{7}", None),
        ("\\boxed{7\\", None),
    ],
)
def test_last_boxed(response, expected):
    assert last_boxed(response) == expected


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("7", r"16 - 7 = 9. 9 - 2 = 7. \boxed{ 7 }", 1.0),
        ("7", r"\boxed{8}", 0.0),
        ("7", "The answer is 7.", 0.0),
        ("7", "$7$", 0.0),
        ("7", r"7 \boxed{}", 0.0),
        ("7", r"\boxed{7", 0.0),
        ("7", r"\boxed{7} or rather \boxed{8}", 0.0),
        ("7", "", 0.0),
        ("-4", r"\boxed{ -4 }", 1.0),
        ("12", r"\boxed{012}", 1.0),
        ("7", r"\boxed{7.0}", 1.0),
        ("1/2", r"\boxed{\frac{1}{2}}", 1.0),
        ("1/2", r"\boxed{0.5}", 1.0),
        ("1/2", r"\boxed{0.51}", 0.0),
        (r"\sqrt{2}", r"\boxed{2^{1/2}}", 1.0),
        ("x+1", r"\boxed{1+x}", 1.0),
        ("1,234", r"\boxed{1234}", 1.0),
        ("7", r"\boxed{7 and 8 or \undefined{]}", 0.0),
        ("7", r"\boxed{" + "9" * 3000 + "}", 0.0),
    ],
)
def test_right_boxed_answer_is_1_and_everything_else_0(environment, answer, response, reward):
    assert score(environment, (answer, response)) == [reward]


def test_whole_numbers_are_scored_as_math_verify_scores_them(environment):
    """The shortcut for whole numbers must not differ from math-verify."""
    for gold in ("0", "7", "-7", "12", "007"):
        for answer in ("0", "-0", "7", "+7", "-7", "12", "012", "70"):
            assert score(environment, (gold, f"\\boxed{{{answer}}}")) == [score_math(gold, answer)], (gold, answer)


def test_order_is_kept_when_some_answers_need_math_verify(environment):
    pairs = [("7", r"\boxed{7}"), ("1/2", r"\boxed{0.5}"), ("7", "no"), ("1/3", r"\boxed{0.5}"), ("3", r"\boxed{6/2}")]
    assert score(environment, *pairs) == [1.0, 1.0, 0.0, 0.0, 1.0]


def test_scoring_off_the_main_thread(environment):
    """math-verify limits its time with SIGALRM, which raises ValueError off the main thread."""
    results, errors = [], []

    def work():
        try:
            results.append(score(environment, ("1/2", r"\boxed{0.5}"), ("1/2", r"\boxed{\frac{2}{3}}")))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and results == [[1.0, 0.0]] * 3


@pytest.fixture(scope="module")
def impatient():
    """A deadline below math-verify's own limits, so that the parent has to end the child."""
    pool = MathEnvironment(num_workers=1, timeout_seconds=2.0)
    yield pool
    pool.shutdown()


def test_an_answer_that_takes_forever_is_worth_0_and_the_next_is_scored(impatient):
    start = time.monotonic()
    assert score(impatient, ("7", r"\boxed{9^{9^{9^{9^9}}}}")) == [0.0]
    assert time.monotonic() - start < 60
    assert impatient.timeouts == 1
    assert score(impatient, ("1/2", r"\boxed{0.5}")) == [1.0]


def test_a_killed_scoring_process_is_replaced(environment):
    assert score(environment, ("1/2", r"\boxed{0.5}")) == [1.0]
    child = environment._verifier._idle.get()
    child._process.kill()
    child._process.wait()
    environment._verifier._idle.put(child)
    assert score(environment, ("1/2", r"\boxed{0.5}")) == [1.0]


@pytest.mark.parametrize("name", ["chain_sum", "countdown", "word_sorting", "propositional_logic"])
def test_reasoning_gym_answers_get_the_datasets_own_score(environment, name):
    problems = build_dataset({"dataset_name": f"reasoning_gym:{name}"}, "train", 0, 4)
    import reasoning_gym

    own = reasoning_gym.get_score_answer_fn(name)
    for problem in problems:
        entry = problem.metadata["entry"]
        for answer in ("0", "wrong", problem.answer or "A"):
            response = f"\\boxed{{ {answer} }}"
            assert environment.score([problem], [response]) == [pytest.approx(own(answer=answer, entry=entry))]
        if problem.answer:
            assert environment.score([problem], [problem.worked]) == [1.0]
        assert environment.score([problem], [problem.answer]) == [0.0]


def test_one_answer_a_problem_is_required(environment):
    with pytest.raises(ValueError, match="2 problems for 1 responses"):
        environment.score([Problem("", "1")] * 2, ["1"])


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"timeout_seconds": 0}])
def test_bad_settings_are_refused(options):
    with pytest.raises(UserError, match=r"env\.math"):
        MathEnvironment(**options)
