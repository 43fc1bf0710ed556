"""The environment in the shape that NeMo-RL's rollout loop calls: one question, one answer, one reward."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from nemo_rl_dsv4.data.problem import Problem
from nemo_rl_dsv4.environments.math import MathEnvironment


class EnvironmentReturn(NamedTuple):
    """One turn of a batch of B conversations; fields as in NeMo-RL.

    Attributes:
        observations: B messages ``{"role": "environment", "content": text}``.
        metadata: B dictionaries, as given.
        next_stop_strings: B times None.
        rewards: float32 [B].
        terminateds: float32 [B], all 1: the conversation ends after one answer.
        answers: B texts, what each response gave as its answer (a box, or an answer line); None without one.
    """

    observations: list[dict[str, str]]
    metadata: list[dict[str, Any]]
    next_stop_strings: list[list[str] | None]
    rewards: torch.Tensor
    terminateds: torch.Tensor
    answers: list[str | None] | None


def environment_metadata(problem: Problem) -> dict[str, Any]:
    """What :meth:`SingleTurnEnvironment.step` needs to know of a problem, as a dictionary."""
    return {"ground_truth": problem.answer, **problem.metadata}


class SingleTurnEnvironment:
    """:class:`MathEnvironment` behind NeMo-RL's method names; pass the class to ``ray.remote`` for an actor class."""

    def __init__(self, config: Mapping[str, Any]):
        """
        Args:
            config: the recipe's ``env.math``: ``num_workers``, ``math_verify_impl``.
        """
        self.scorer = MathEnvironment(
            num_workers=config.get("num_workers") or 1, verifier=config.get("math_verify_impl") or "hf_math_verify"
        )

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[float]:
        """See :meth:`MathEnvironment.score`."""
        return self.scorer.score(problems, responses)

    def step(self, message_log_batch: list[list[dict[str, Any]]], metadata: list[dict[str, Any]]) -> EnvironmentReturn:
        """Score the assistant's words of each conversation.

        Args:
            message_log_batch: B conversations of messages with ``role`` and ``content``.
            metadata: B dictionaries with ``ground_truth``, such as :func:`environment_metadata` makes.
        """
        responses = [
            "".join(str(message["content"]) for message in conversation if message["role"] == "assistant")
            for conversation in message_log_batch
        ]
        problems = [Problem("", str(item["ground_truth"]), metadata=item) for item in metadata]
        rewards = self.scorer.score(problems, responses)
        words = {True: "Environment: correct", False: "Environment: incorrect"}
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": words[reward > 0]} for reward in rewards],
            metadata=metadata,
            next_stop_strings=[None] * len(rewards),
            rewards=torch.tensor(rewards, dtype=torch.float32),
            terminateds=torch.ones(len(rewards)),
            answers=[self.scorer.answer_of(response) for response in responses],
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
        """Zero the reward of every response that did not end by itself, and summarise the batch.

        Args:
            batch: ``rewards`` float [B], ``is_end`` bool [B], ``generation_lengths`` and ``prompt_lengths`` int [B].

        Returns:
            The batch, its ``rewards`` replaced, and the metrics ``accuracy``, ``fraction_of_samples_properly_ended``,
            ``num_problems_in_batch``, ``generation_lengths`` and ``prompt_lengths`` (means, in tokens).
        """
        batch["rewards"] = batch["rewards"] * batch["is_end"]
        metrics = {
            "accuracy": batch["rewards"].float().mean().item(),
            "fraction_of_samples_properly_ended": batch["is_end"].float().mean().item(),
            "num_problems_in_batch": batch["is_end"].shape[0],
            "generation_lengths": batch["generation_lengths"].float().mean().item(),
            "prompt_lengths": batch["prompt_lengths"].float().mean().item(),
        }
        return batch, metrics

    def shutdown(self) -> None:
        """End the scoring processes."""
        self.scorer.shutdown()
