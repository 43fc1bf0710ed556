"""Checkpoints that a rollout could not hold are refused before training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.build import CPU_BACKEND
from nemo_rl_dsv4.model.checkpoint.check import check_checkpoint
from nemo_rl_dsv4.model.qat import SWITCHES
from nemo_rl_dsv4.model.release_checkpoint import ReleaseCheckpoint
from nemo_rl_dsv4.model.release_writer import ExpertFormat, write_release_checkpoint
from nemo_rl_dsv4.numerics import get_profile
from nemo_rl_dsv4.policy.parallel import ParallelSizes
from nemo_rl_dsv4.policy.spec import PolicySpec, build_worker, check_scale_kind
from nemo_rl_dsv4.refit.encode import Encoder
from nemo_rl_dsv4.refit.source_scales import SourceScales


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


def test_loading_says_how_far_it_is_and_keeps_only_scales_that_an_export_can_use(tiny_config, training_state, tmp_path):
    """Every byte is announced; FP4 scales, which no FP8 export can use, do not stay in memory; FP8 ones do."""
    forms: dict[ExpertFormat, int] = {"fp4": 0, "fp8": 5 * 8 * 3}
    for form, experts in forms.items():
        write_release_checkpoint(training_state, tiny_config, tmp_path / form, expert_format=form)
        heard: list[tuple[int, int]] = []
        worker = build_worker(spec(tmp_path / form), lambda done, total, heard=heard: heard.append((done, total)))
        done = [now for now, _ in heard]
        assert done == sorted(done) and len(heard) > 100
        assert {total for _, total in heard} == {done[-1]}
        names = list(worker.source_scales)
        assert sum(".experts." in name for name in names) == experts
        assert "layers.2.attn.wo_a.weight" in names and worker.source_scales.bytes < 2000


def test_a_rank_keeps_the_scales_of_its_own_experts(tiny_config, training_state, tmp_path):
    checkpoint = tmp_path / "model"
    write_release_checkpoint(training_state, tiny_config, checkpoint, expert_format="fp8")
    checked = check_checkpoint(checkpoint)
    own = SourceScales.of_checkpoint(checked, Encoder(get_profile("vllm-hopper")).spec, lambda name: ".3.w1" in name)
    assert sorted(own) == [f"layers.{layer}.ffn.experts.3.w1.weight" for layer in range(5)]
    whole = SourceScales(ReleaseCheckpoint(checkpoint).scales())
    assert all(torch.equal(own[name], whole[name]) for name in own)
