#!/bin/bash
# One step of the -cp2ep2-qat recipe: two processes share sequences and experts, and agree with the rollout.
source "$(dirname -- "${BASH_SOURCE[0]}")/common.env"

CHECKS=(
    # measured 8.6e-11 (2026-11-30, one step, 2 CPU cores)
    'max(data["train/gen_kl_error"]) < 1e-4'
)

run_small grpo-dsv4-tiny-1n0g-automodel-cp2ep2-qat policy.dsv4.cpu_processes=2 grpo.max_num_steps=1 "$@"
check_metrics "${CHECKS[@]}"
