#!/bin/bash
SCRIPT_DIR=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &> /dev/null && pwd)
source "$SCRIPT_DIR/common.env"

# ===== BEGIN CONFIG =====
NUM_NODES=1
GPUS_PER_NODE=0
STEPS_PER_RUN=5
MAX_STEPS=5
NUM_RUNS=$(((MAX_STEPS + STEPS_PER_RUN - 1) / STEPS_PER_RUN))
NUM_MINUTES=20
# ===== END CONFIG =====

CHECKS=(
    # not measured over a whole run; the -qat recipe has 6.5e-8, and emulated products add the order of their sums
    'mean(data["train/gen_kl_error"]) < 1e-3'
    # not measured; finite
    'max(data["train/grad_norm"]) < 1e3'
)

exit_if_max_steps_reached
run_recipe "$@"
check_metrics "${CHECKS[@]}"
