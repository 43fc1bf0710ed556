"""Checkpoints that a rollout could not hold are refused before training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.build import CPU_BACKEND
from nemo_rl_dsv4.model.qat import SWITCHES
from nemo_rl_dsv4.model.release_writer import write_release_checkpoint
from nemo_rl_dsv4.numerics import get_profile
from nemo_rl_dsv4.policy.parallel import ParallelSizes
from nemo_rl_dsv4.policy.spec import PolicySpec, build_worker, check_scale_kind


def spec(folder: Path, profile: str = "vllm-hopper") -> PolicySpec:
    return PolicySpec(
        checkpoint=str(folder),
        sizes=ParallelSizes(1),
        profile=profile,
        fake_quant=dict.fromkeys(SWITCHES, True),
        precision="float32",
        backend=CPU_BACKEND,
        micro_batch_size=1,
        logprob_batch_size=1,
        optimizer={"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-3}},
    )


def test_a_good_checkpoint_builds(tiny_config, training_state, tmp_path):
    write_release_checkpoint(training_state, tiny_config, tmp_path / "model")
    worker = build_worker(spec(tmp_path / "model"))
    assert worker.rounding is not None and len(worker.rounding.wrapped) == 10


def test_fp4_experts_that_fp8_cannot_hold_are_refused(tiny_config, training_state, tmp_path):
    """C026: scales of one tile 2^15 apart used to reach the rollout with their smallest values silently zero."""
    experts = training_state["model.layers.1.mlp.experts.gate_and_up_projs"]
    experts[0, :, 0] = 2.0**-17
    experts[0, :32, 1] = 6.0
    write_release_checkpoint(training_state, tiny_config, tmp_path / "model")
    with pytest.raises(UserError, match=r"1 tensors would change .* 'layers\.1\.ffn\.experts\.0\.w1\.weight'"):
        build_worker(spec(tmp_path / "model"))


def test_scales_of_another_kind_are_refused(tiny_config, training_state, tmp_path):
    """C013, C015: the checkpoint's own scale_fmt decides, not the storage dtype of its scales."""
    write_release_checkpoint(training_state, tiny_config, tmp_path / "model", expert_format="fp8")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]["scale_fmt"]
    file.write_text(json.dumps(config))
    with pytest.raises(UserError, match="scales are float32 .*rounds weights with ue8m0 scales"):
        build_worker(spec(tmp_path / "model"))


def test_an_unquantized_checkpoint_needs_no_check(tmp_path):
    """Nothing is read: the folder is empty."""
    assert not check_scale_kind(tmp_path, {}, get_profile("vllm-hopper"))
