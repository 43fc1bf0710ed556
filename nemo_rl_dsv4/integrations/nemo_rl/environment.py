"""The environment as the actor that NeMo-RL's rollout loop calls."""

from __future__ import annotations

from typing import Any

import ray

from nemo_rl_dsv4.environments.single_turn import EnvironmentReturn, SingleTurnEnvironment


class SilentEnvironment(SingleTurnEnvironment):
    """Answers with no words: what it says would be trained past as further tokens of the sequence."""

    def step(self, message_log_batch: list[list[dict[str, Any]]], metadata: list[dict[str, Any]]) -> EnvironmentReturn:
        """As :meth:`SingleTurnEnvironment.step`, with empty observations."""
        result = super().step(message_log_batch, metadata)
        silence = [{"role": "environment", "content": ""} for _ in result.observations]
        return result._replace(observations=silence)


EnvironmentActor = ray.remote(num_cpus=0)(SilentEnvironment)
"""Holds no processor: the policy and the engines take all that Ray was started with."""
