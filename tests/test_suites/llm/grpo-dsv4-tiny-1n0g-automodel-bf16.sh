#!/bin/bash
SCRIPT_DIR=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &> /dev/null && pwd)
source "$SCRIPT_DIR/common.env"

# ===== BEGIN CONFIG =====
NUM_NODES=1
GPUS_PER_NODE=0
STEPS_PER_RUN=40
MAX_STEPS=40
NUM_RUNS=$(((MAX_STEPS + STEPS_PER_RUN - 1) / STEPS_PER_RUN))
NUM_MINUTES=20
# ===== END CONFIG =====

CHECKS=(
    # measured 4.0e-3 (2026-11-30, seed 42, 40 steps, 2 CPU cores); the recipe is there to disagree
    'mean(data["train/gen_kl_error"]) > 1e-4'
    # measured 4.0e-3 (2026-11-30, seed 42, 40 steps, 2 CPU cores)
    'mean(data["train/gen_kl_error"]) < 2e-2'
    # measured 0.480 (2026-11-30, seed 42, 40 steps, 2 CPU cores)
    'last(data["validation/accuracy"]) > 0.4'
)

exit_if_max_steps_reached
run_recipe "$@"
check_metrics "${CHECKS[@]}"
