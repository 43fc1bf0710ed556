"""Environments score what the policy wrote.

``nemo_rl_dsv4.environments.single_turn`` has the class in NeMo-RL's shape; it is not imported here because scoring
processes, which import this package, need no torch.
"""

from nemo_rl_dsv4.environments.math import MathEnvironment, last_boxed

__all__ = ["MathEnvironment", "last_boxed"]
