"""Rollout engines behind one interface: the CPU reference engine here, vLLM on GPUs."""
