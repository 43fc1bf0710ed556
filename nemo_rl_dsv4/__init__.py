"""GRPO of DeepSeek-V4-Flash whose training rounds where the FP8 rollout rounds."""

import os

# Under `uv run`, Ray would copy the project without its git-ignored files (checkpoints among them) into a folder of
# its own, install a second environment there, and start every worker in it. Ray reads this when it is first imported.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
