"""GRPO of DeepSeek-V4-Flash whose training rounds where the FP8 rollout rounds."""
