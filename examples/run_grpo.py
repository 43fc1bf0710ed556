"""Train a DeepSeek-V4 with GRPO as a recipe says; `--help` shows how."""

import sys

from nemo_rl_dsv4.cli.run_grpo import main

if __name__ == "__main__":
    sys.exit(main())
