"""Environments score what the policy wrote."""

from nemo_rl_dsv4.environments.math import MathEnvironment, last_boxed

__all__ = ["MathEnvironment", "last_boxed"]
