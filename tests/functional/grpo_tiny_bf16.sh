#!/bin/bash
# One step of the -bf16 recipe: it runs, and trainer and rollout disagree.
source "$(dirname -- "${BASH_SOURCE[0]}")/common.env"

CHECKS=(
    # measured 9.7e-6 (2026-11-30, one step, 2 CPU cores)
    'max(data["train/gen_kl_error"]) > 1e-6'
    # measured 9.7e-6 (2026-11-30, one step, 2 CPU cores)
    'max(data["train/gen_kl_error"]) < 1e-3'
)

run_small grpo-dsv4-tiny-1n0g-automodel-bf16 grpo.max_num_steps=1 "$@"
check_metrics "${CHECKS[@]}"
