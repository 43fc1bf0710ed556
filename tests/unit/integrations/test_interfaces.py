"""A moved interface is found by its signatures, and the message says what moved."""

import inspect

import pytest
from upstream_fakes import GenerationInterface, PolicyInterface, Synchronizer

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.integrations.nemo_rl.generation import EngineGeneration, Refit
from nemo_rl_dsv4.integrations.nemo_rl.interfaces import (
    adapted,
    incompatibility,
    moved_methods,
    require_mentions,
    require_parameters,
)
from nemo_rl_dsv4.integrations.nemo_rl.policy import BESIDE_INTERFACE, GroupPolicy


def compare(found, wanted):
    return incompatibility(inspect.signature(found), inspect.signature(wanted))


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (lambda self, a, b=1: 0, lambda self, a, b=2: 0),
        (lambda self, a, b=1, c=2: 0, lambda self, a, b=2: 0),  # more, if it may be left out
        (lambda self, a, b=1: 0, lambda self, a: 0),
        (lambda self, a, b=None: 0, lambda self, a, *, b=None: 0),  # by name is fine for either kind
        (lambda self, *args, **kwargs: 0, lambda self, a, *, b: 0),
        (lambda self, weights, other=None: 0, lambda self, *args, **kwargs: 0),  # left to the class
        (lambda self, a, *, b: 0, lambda self, a, *, b: 0),
    ],
)
def test_signatures_that_fit(found, wanted):
    assert compare(found, wanted) is None


@pytest.mark.parametrize(
    ("found", "wanted", "reason"),
    [
        (lambda self, a: 0, lambda self, a, b=1: 0, "has no parameter 'b'"),
        (lambda self, b, a: 0, lambda self, a, b: 0, "has 'b' in the place of 'a'"),
        (lambda self, *, a: 0, lambda self, a: 0, "takes 'a' by name only"),
        (lambda self, a: 0, lambda self, a=1: 0, "requires 'a', which callers may leave out"),
        (lambda self, a, b: 0, lambda self, a: 0, "requires 'b', which callers do not pass"),
        (lambda self, a: 0, lambda self, a, **more: 0, "no further named arguments"),
        (lambda self, a: 0, lambda self, a, *more: 0, "no further positional arguments"),
    ],
)
def test_signatures_that_do_not_fit(found, wanted, reason):
    assert reason in (compare(found, wanted) or "")


def test_our_classes_fit_the_interfaces_and_inherit_their_defaults():
    policy = adapted(GroupPolicy, PolicyInterface, beside=BESIDE_INTERFACE)
    generation = adapted(EngineGeneration, GenerationInterface)
    assert issubclass(policy, PolicyInterface) and issubclass(policy, GroupPolicy)
    assert policy(None, None).offload_to_cpu() == "the interface's own"
    assert generation(None, None, None).get_logger_metrics() == {}
    assert adapted(Refit, Synchronizer)(None, None).is_stale is True


def test_a_moved_method_is_named_with_the_signature_found_and_the_one_wanted():
    class Moved(PolicyInterface):
        def train(self, data, loss_fn, step, eval_mode=False): ...

    (line,) = moved_methods(GroupPolicy, Moved)
    assert line.startswith("GroupPolicy.train has no parameter 'step'")
    assert "found train(self, data, loss_fn, eval_mode=False, *, gbs=None, mbs=None, timer=None)" in line
    assert "Moved wants train(self, data, loss_fn, step, eval_mode=False)" in line
    with pytest.raises(UserError, match=r"interface has moved: GroupPolicy\.train"):
        adapted(GroupPolicy, Moved)


def test_a_new_abstract_method_and_a_missing_call_of_the_loop_are_named():
    class Grown(PolicyInterface):
        def evaluate(self, data, k=1): ...

        evaluate.__isabstractmethod__ = True

    Grown.__abstractmethods__ = Grown.__abstractmethods__ | {"evaluate"}
    problems = moved_methods(GroupPolicy, Grown, beside=("gather_everything",))
    assert problems == [
        "GroupPolicy.evaluate is missing; Grown wants evaluate(self, data, k=1)",
        "GroupPolicy.gather_everything is missing; Grown wants gather_everything",
    ]


def test_a_function_that_asks_for_more_or_takes_less_is_refused():
    def loop(policy, generation, extra=None): ...

    require_parameters(loop, ("policy", "generation"), "loop")
    with pytest.raises(
        UserError, match=r"loop has moved .*'actor'.*found loop\(policy.*passes policy, generation, actor"
    ):
        require_parameters(loop, ("policy", "generation", "actor"), "loop")
    with pytest.raises(UserError, match="missing a required argument: 'generation'"):
        require_parameters(loop, ("policy",), "loop")


def test_a_loop_without_the_hook_is_refused():
    def loop(generation):
        generation.clear_metrics()

    require_mentions(loop, ("clear_metrics",), "loop")
    with pytest.raises(UserError, match="loop no longer uses finish_generation"):
        require_mentions(loop, ("finish_generation",), "loop")
