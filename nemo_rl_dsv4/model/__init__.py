"""The DeepSeek-V4 policy model: building it, its checkpoint formats, and rounding it as the rollout does."""
