"""A training checkpoint leaves for the Hugging Face layout with the bytes that the rollout had."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemo_rl_dsv4.cli.main import main
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.grpo.checkpointing import CheckpointStore
from nemo_rl_dsv4.grpo.settings import CheckpointSettings
from nemo_rl_dsv4.model.build import CPU_BACKEND, build_model
from nemo_rl_dsv4.model.checkpoint.check import check_checkpoint
from nemo_rl_dsv4.model.checkpoint.load import load_into
from nemo_rl_dsv4.model.checkpoint.serving import training_notes
from nemo_rl_dsv4.model.checkpoint_format import AUTOMODEL, automodel_config, tensor_kind
from nemo_rl_dsv4.model.qat import SWITCHES
from nemo_rl_dsv4.model.quantized_weights import refresh_quantized, stored_codes
from nemo_rl_dsv4.model.release_writer import write_release_checkpoint
from nemo_rl_dsv4.policy.export_checkpoint import export_checkpoint
from nemo_rl_dsv4.policy.export_source import write_export_source
from nemo_rl_dsv4.policy.parallel import ParallelSizes
from nemo_rl_dsv4.policy.saved_weights import SavedWeights
from nemo_rl_dsv4.policy.spec import PolicySpec, build_worker
from nemo_rl_dsv4.policy.worker import PolicyWorker
from nemo_rl_dsv4.refit.export import export_weights

State = dict[str, torch.Tensor]


def spec(checkpoint: Path, *, qat: bool) -> PolicySpec:
    return PolicySpec(
        checkpoint=str(checkpoint),
        sizes=ParallelSizes(1),
        profile="vllm-hopper",
        fake_quant=dict.fromkeys(SWITCHES, qat),
        precision="float32",
        backend=CPU_BACKEND,
        micro_batch_size=4,
        logprob_batch_size=4,
        optimizer={"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-3}},
    )


def write_step(folder: Path, worker: PolicyWorker, policy: PolicySpec, step: int) -> Path:
    """What a run writes, with the policy in this process."""

    def save(target: Path):
        worker.start_checkpoint(str(target))
        write_export_source(target, policy.export_source, {}, policy.config_overrides)
        return worker.state_writer.wait

    settings = CheckpointSettings(async_save=False)
    return CheckpointStore(folder, settings, training_notes).write(step, {"step": step}, save, "policy: {}\n")


def stored(folder: Path) -> State:
    return {name: value for shard in sorted(folder.glob("*.safetensors")) for name, value in load_file(shard).items()}


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def tokens(config: dict) -> State:
    ids = torch.randint(3, config["vocab_size"], (2, 20), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "input_lengths": torch.tensor([20, 13])}


@pytest.fixture(scope="module")
def started_from(tmp_path_factory, training_once, config_once) -> Path:
    """FP8 throughout, so that the scales of unchanged experts are the source's own; with a tokenizer."""
    folder = tmp_path_factory.mktemp("start") / "model"
    write_release_checkpoint(training_once, config_once, folder, expert_format="fp8")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


@pytest.fixture(scope="module", params=["bf16", "qat"])
def trained(request, tmp_path_factory, started_from):
    """A policy that moved some of its weights, its checkpoint folder of steps 2 and 7, and its settings."""
    policy = spec(started_from, qat=request.param == "qat")
    worker = build_worker(policy)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in worker.model.named_parameters():
            if "layers.0." not in name and ".2." not in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 1e-3)
            if tensor_kind(AUTOMODEL.official_names(name, 1)[0]) == "bf16":
                parameter.copy_(parameter.to(torch.bfloat16))  # as a BF16 policy has them
    run = tmp_path_factory.mktemp("results") / "exp_001"
    write_step(run, worker, policy, 2)
    write_step(run, worker, policy, 7)
    return worker, run, policy


def test_fp8_has_the_bytes_of_the_rollout(trained, tmp_path, capsys):
    """What `convert` writes is what the refit sends of the same weights, byte for byte; SERVE.md names the command."""
    worker, run, _ = trained
    note = (run / "step_7" / "SERVE.md").read_text()
    assert f"nemo-rl-dsv4 convert {run}/step_7 {run}/step_7-fp8 --to fp8" in note
    assert main(["convert", str(run / "step_7"), str(tmp_path / "out"), "--to", "fp8", "--shard-gb", "0.0008"]) == 0
    refresh_quantized(worker.model)
    sent = dict(
        export_weights(
            worker.model.state_dict(),
            "vllm-hopper",
            scale_dtype=torch.float8_e8m0fnu,
            source_scales=worker.source_scales,
            stored=stored_codes(worker.model),
        )
    )
    found = stored(tmp_path / "out")
    assert set(found) == set(sent) and len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    assert [name for name, value in sent.items() if not same_bytes(found[name], value)] == []
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["scale_fmt"] == "ue8m0" and config["expert_dtype"] == "fp8"
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"version": "1.0"}'
    assert "vllm serve" in (tmp_path / "out" / "SERVE.md").read_text()
    assert not (tmp_path / "out" / "rollout.json").exists()
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "out"), "--deep"]) == 0
    assert "0 problems" in capsys.readouterr().out


def test_unchanged_blocks_keep_the_bytes_of_the_source(trained, started_from, tmp_path):
    """Weights that were not trained leave with the checkpoint's own scales, rounded in training or not."""
    _, run, _ = trained
    export_checkpoint(run / "step_7" / "policy", tmp_path / "out", "fp8")
    before, after = stored(started_from), stored(tmp_path / "out")
    unchanged = [name for name in before if name.startswith("layers.2.") and before[name].element_size() == 1]
    assert len(unchanged) > 50 and all(same_bytes(before[name], after[name]) for name in unchanged)
    assert any(not same_bytes(before[name], after[name]) for name in before if name.startswith("layers.3."))


def test_bf16_is_read_by_our_reader_and_by_transformers(trained, config_once, tmp_path):
    worker, run, policy = trained
    report = export_checkpoint(run / "step_7" / "policy", tmp_path / "out", "bf16")
    assert report.written and 0 < report.errors["rounded"] < 0.01
    assert bool(report.notes) == policy.export_source.weights_rounded
    check_checkpoint(tmp_path / "out").raise_if_damaged()
    model = build_model(automodel_config(config_once))
    load_into(model, tmp_path / "out")
    trained_state = {key: value.detach() for key, value in worker.model.state_dict().items()}
    for key, value in model.state_dict().items():
        kept = trained_state[key]
        fp32 = torch.equal(value, kept)
        assert fp32 or torch.equal(value, kept.to(torch.bfloat16).to(value.dtype)), key
    data = tokens(config_once)
    with torch.no_grad():
        ours = torch.log_softmax(model(data["input_ids"]).logits.float(), -1)
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        other = torch.log_softmax(theirs(data["input_ids"]).logits.float(), -1)
    torch.testing.assert_close(ours, other, rtol=0, atol=5e-5)  # measured 1e-5


@pytest.mark.parametrize("trained", ["qat"], indirect=True)
def test_logprobs_of_an_fp8_export_are_those_of_the_policy(trained, tmp_path):
    """A policy started from the export scores as the one that was saved: its weights are what that one rounded to."""
    worker, run, policy = trained
    export_checkpoint(run / "step_7" / "policy", tmp_path / "out", "fp8")
    again = build_worker(replace(policy, checkpoint=str(tmp_path / "out")))
    data = tokens({"vocab_size": 160})
    wanted, found = (one.get_logprobs(data)["logprobs"] for one in (worker, again))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    assert (wanted[0, 1:] < 0).all()


def test_a_runs_folder_means_its_last_whole_step(trained, tmp_path, capsys):
    _, run, _ = trained
    copy = Path(shutil.copytree(run, tmp_path / "exp_001"))
    victim = next((copy / "step_7" / "policy").glob("*.distcp"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    assert main(["convert", str(copy), str(tmp_path / "out"), "--to", "bf16", "--json"]) == 0
    out = capsys.readouterr()
    assert json.loads(out.out)["source"].endswith("step_2")
    assert "passed over" in out.err and victim.name in out.err
    assert main(["convert", str(copy / "step_7"), str(tmp_path / "other"), "--to", "bf16"]) == 2
    assert f"the content of policy/{victim.name} is not what was written" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_folders_that_are_no_checkpoint_are_named(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for folder, message in (("missing", "is no folder"), ("empty", "config.json")):
        assert main(["convert", str(tmp_path / folder), str(tmp_path / "out"), "--to", "fp8"]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(UserError, match=r"no \.metadata file"):
        SavedWeights(tmp_path / "empty")


def test_a_source_that_is_gone_is_said(trained, tmp_path):
    _, run, policy = trained
    copy = Path(shutil.copytree(run / "step_7", tmp_path / "step_7"))
    note = copy / "policy" / "source" / "rollout.json"
    note.write_text(json.dumps(json.loads(note.read_text()) | {"checkpoint": str(tmp_path / "gone")}))
    report = export_checkpoint(copy / "policy", tmp_path / "out", "fp8")
    assert any("is gone" in text for text in report.notes)
    found = export_checkpoint(copy / "policy", tmp_path / "out2", "fp8", source=Path(policy.checkpoint or ""))
    assert found.notes == []


def test_weights_that_do_not_fit_the_config_are_refused(trained, tmp_path):
    _, run, _ = trained
    copy = Path(shutil.copytree(run / "step_7", tmp_path / "step_7"))
    file = copy / "policy" / "source" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"n_routed_experts": 16}))
    with pytest.raises(UserError, match="experts"):
        export_checkpoint(copy / "policy", tmp_path / "out", "fp8")
    shutil.rmtree(file.parent)
    with pytest.raises(UserError, match="does not say which checkpoint it was trained from"):
        export_checkpoint(copy / "policy", tmp_path / "out", "fp8")
