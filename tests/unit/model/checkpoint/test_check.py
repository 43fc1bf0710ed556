"""Everything wrong with a checkpoint is named at once, with file and tensor, before a weight is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nemo_rl_dsv4.cli.main import main
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.checkpoint.check import CheckedCheckpoint, check_checkpoint
from nemo_rl_dsv4.model.checkpoint.classes import is_listed
from nemo_rl_dsv4.model.checkpoint.summary import summarize
from nemo_rl_dsv4.model.checkpoint.values import deep_problems
from nemo_rl_dsv4.model.release_checkpoint import ReleaseCheckpoint

from .conftest import INDEX, add_tensors, edit_config, edit_tensor, shard_of

EXPERT, WQ_A = "layers.1.ffn.experts.0.w1", "layers.1.attn.wq_a"


def found(checked: CheckedCheckpoint) -> list[tuple[str, str | None]]:
    return [(problem.file, problem.tensor) for problem in checked.problems]


def test_a_whole_checkpoint_has_no_problems(sharded: Path) -> None:
    checked = check_checkpoint(sharded)
    assert checked.problems == [] and checked.notes == []
    assert len(checked.shards.files) > 3
    assert deep_problems(checked) == []


def test_all_problems_are_in_one_report(folder: Path) -> None:
    """Case C032 among them: a wrong scale grid, a missing expert, a truncated shard and a swapped dtype at once."""
    truncated = shard_of(folder, "layers.3.attn.wq_a.weight")
    same = [name for name, file in json.loads((folder / INDEX).read_text())["weight_map"].items()]
    victims = [name for name in same if shard_of(folder, name) != truncated]
    grid = next(name for name in victims if name.endswith("attn.wo_a.scale"))
    expert = next(name for name in victims if name.endswith("experts.3.w2.weight"))
    norm = next(name for name in victims if name.endswith("ffn_norm.weight"))
    files = {
        edit_tensor(folder, grid, lambda s: s.view(torch.uint8).repeat(2, 1).view(torch.float8_e8m0fnu)).name: grid,
    }
    edit_tensor(folder, expert, lambda _: None)
    edit_tensor(folder, expert.replace("weight", "scale"), lambda _: None)
    normed = edit_tensor(folder, norm, lambda t: t.to(torch.int32))
    truncated.write_bytes(truncated.read_bytes()[:-2000])
    checked = check_checkpoint(folder)
    named = found(checked)
    assert (next(iter(files)), grid) in named
    assert (INDEX, expert) in named
    assert (normed.name, norm) in named
    cut = [problem for problem in checked.problems if problem.file == truncated.name]
    assert cut and all(problem.tensor and "truncated" in problem.message for problem in cut)
    assert not any("missing" in problem.message and problem.tensor != expert for problem in checked.problems)
    with pytest.raises(UserError) as error:
        ReleaseCheckpoint(folder)
    for name in (grid, expert, norm, truncated.name):
        assert name in str(error.value)


def byte(value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(torch.uint8).view(-1)[0] = value
        return tensor

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (f"{WQ_A}.scale", lambda s: s.float() * 0.75, "wanted a power of two"),
        (f"{EXPERT}.scale", byte(255), "is nan"),
        (f"{EXPERT}.scale", byte(0), "wanted a power of two .* of at least"),
        (f"{WQ_A}.weight", byte(0x7F), "is NaN"),
        ("layers.2.attn.attn_sink", lambda t: t.fill_(torch.inf), "is inf"),
        ("head.weight", lambda t: t.fill_(torch.nan), "is nan"),
        ("layers.0.ffn.gate.tid2eid", lambda t: t.zero_(), "expert ids are zero"),
    ],
)
def test_deep_names_wrong_values(folder: Path, name: str, change: Any, message: str) -> None:
    shard = edit_tensor(folder, name, change)
    checked = check_checkpoint(folder)
    assert checked.problems == []
    (problem,) = deep_problems(checked)
    assert (problem.file, problem.tensor) == (shard.name, name)
    with pytest.raises(UserError, match=message):
        raise UserError(problem.message)


@pytest.mark.parametrize(("module", "code"), [(EXPERT, 0x17), (WQ_A, 0x48)])
def test_deep_names_values_beyond_bfloat16(folder: Path, module: str, code: int) -> None:
    """A scale byte of 254 (2^127) is a power of two and passed, but times a code of 2 or more it is an infinity."""
    edit_tensor(folder, f"{module}.scale", byte(254))
    shard = edit_tensor(folder, f"{module}.weight", byte(code))  # FP4 6 and 0.5, FP8 4.0
    (problem,) = deep_problems(check_checkpoint(folder))
    assert (problem.file, problem.tensor) == (shard.name, f"{module}.weight")
    assert f"{module}.weight[0, 0] is " in problem.message and "code times a scale of 1.701e+38" in problem.message


def test_a_large_scale_of_small_codes_is_no_problem(folder: Path) -> None:
    """2^127 times 1 is a number; a later piece of rows is checked against its own scales."""
    edit_tensor(folder, f"{EXPERT}.scale", byte(254))
    edit_tensor(folder, f"{EXPERT}.weight", lambda w: w.fill_(0x22))  # 1.0
    assert deep_problems(check_checkpoint(folder)) == []
    last = edit_tensor(folder, f"{EXPERT}.weight", lambda w: w)
    rows = load_file(last)[f"{EXPERT}.weight"].shape[0]

    def overflow(scale: torch.Tensor) -> torch.Tensor:
        scale.view(torch.uint8)[-1, -1] = 254
        return scale

    edit_tensor(folder, f"{EXPERT}.scale", overflow)
    edit_tensor(folder, f"{EXPERT}.weight", lambda w: w.fill_(0x44))  # 2.0
    edit_tensor(folder, f"{EXPERT}.scale", byte(127))
    (problem,) = deep_problems(check_checkpoint(folder))
    assert f"{EXPERT}.weight[{rows - 1}, " in problem.message


def test_numbers_of_the_config_must_be_finite(folder: Path) -> None:
    """Python's JSON reads NaN: an rms_norm_eps of NaN made a model that computes nothing else."""
    edit_config(folder, rms_norm_eps=float("nan"), somewhere={"deep": [1.0, float("inf")]})
    messages = [problem.message for problem in check_checkpoint(folder).problems]
    assert messages == [
        f"{folder}/config.json: rms_norm_eps is nan; wanted a finite number",
        f"{folder}/config.json: somewhere.deep[1] is inf; wanted a finite number",
    ]


def test_sizes_beyond_any_model_are_refused_before_names_are_listed(folder: Path) -> None:
    """2^40 experts were written out by name until the process was killed."""
    edit_config(folder, n_routed_experts=2**40)
    found = check_checkpoint(folder)
    assert found.problems[0].message == (
        f"{folder}/config.json: n_routed_experts is 1099511627776; wanted a whole number, 1 to 262144"
    )
    assert found.config is None and not found.shapes


def test_a_missing_shard_is_one_problem(folder: Path) -> None:
    shard = shard_of(folder, f"{EXPERT}.weight")
    shard.unlink()
    (problem,) = check_checkpoint(folder).problems
    assert problem.file == shard.name and "the file is missing" in problem.message


def test_missing_experts_are_counted_by_layer(folder: Path) -> None:
    for expert in (2, 5):
        for part in ("w1", "w2", "w3"):
            for leaf in ("weight", "scale"):
                edit_tensor(folder, f"layers.4.ffn.experts.{expert}.{part}.{leaf}", lambda _: None)
    (problem,) = check_checkpoint(folder).problems
    assert "layers.4 lacks 6 tensors of routed experts 2, 5" in problem.message
    assert problem.tensor == "layers.4.ffn.experts.2.w1.weight"


def test_half_precision_under_a_bfloat16_config_is_a_swapped_dtype(folder: Path) -> None:
    """A header that says F16 for BF16 bytes has the right size and shape, and other values."""
    shard = shard_of(folder, "head.weight")
    content = shard.read_bytes()
    at = content.index(b'"head.weight"')
    shard.write_bytes(content[:at] + content[at:].replace(b'"BF16"', b'"F16" ', 1))
    (problem,) = check_checkpoint(folder).problems
    assert problem.tensor == "head.weight" and "torch.float16" in problem.message


def test_all_problems_of_the_config_are_listed_with_those_of_the_files(folder: Path) -> None:
    """Only the first used to be named, so that a config was mended one key at a time."""
    edit_config(
        folder, hidden_size=-1, o_groups=3, num_experts_per_tok=9, rope_theta="x", compress_ratios=[0, 0, 7, 4, 4]
    )
    (folder / INDEX).write_text("{}")
    problems = check_checkpoint(folder).problems
    of_config = [problem.message for problem in problems if problem.file == "config.json"]
    wanted = (
        "hidden_size is -1",
        "compress_ratios holds 7",
        "o_groups 3",
        "num_experts_per_tok 9",
        "rope_theta is 'x'",
    )
    assert len(of_config) == len(wanted) and len(problems) > len(of_config)
    for words in wanted:
        (message,) = [text for text in of_config if words in text]
        assert message.startswith(f"{folder}/config.json: ")


def test_float32_tensors_stored_in_bfloat16_are_noted(folder: Path) -> None:
    assert not any("float32" in note for note in check_checkpoint(folder).notes)
    for name in ("layers.1.attn.attn_sink", "hc_head_fn"):
        edit_tensor(folder, name, lambda value: value.to(torch.bfloat16))
    checked = check_checkpoint(folder)
    (note,) = [note for note in checked.notes if "float32" in note]
    assert checked.problems == [] and note.startswith("2 tensors that a release keeps in float32, such as")
    assert "bfloat16" in note


def test_formats_are_checked_against_the_config(folder: Path) -> None:
    """Case C032: expert layout told by the tensors; the config's word is a note."""
    edit_config(folder, expert_dtype="fp8")
    checked = check_checkpoint(folder)
    assert checked.problems == []
    assert any("expert_dtype is 'fp8', but the routed experts are FP4" in note for note in checked.notes)
    edit_config(folder, quantization_config=...)
    (problem,) = check_checkpoint(folder).problems
    assert "config.json has no quantization_config" in problem.message
    edit_config(folder, quantization_config={"scale_fmt": "ue8m0"})
    shape = (192, 128)
    edit_tensor(folder, f"{EXPERT}.weight", lambda _: torch.zeros(shape, dtype=torch.float8_e4m3fn))
    edit_tensor(folder, f"{EXPERT}.scale", lambda _: torch.ones(2, 1))
    (problem,) = check_checkpoint(folder).problems
    assert "routed experts of layers.1 are stored as" in problem.message and "FP4" in problem.message


def mtp_block(block: int, *, next_token: bool, experts: int = 8) -> dict[str, torch.Tensor]:
    stem = f"mtp.{block}"
    tensors = {f"{stem}.attn_norm.weight": torch.ones(128, dtype=torch.bfloat16)}
    for expert in range(experts):
        for part in ("w1", "w2", "w3"):
            tensors[f"{stem}.ffn.experts.{expert}.{part}.weight"] = torch.zeros(128, 64, dtype=torch.int8)
            tensors[f"{stem}.ffn.experts.{expert}.{part}.scale"] = torch.ones(128, 4).to(torch.float8_e8m0fnu)
    if next_token:
        tensors |= {f"{stem}.{n}norm.weight": torch.ones(128, dtype=torch.bfloat16) for n in "eh"}
        tensors |= {f"{stem}.{n}_proj.weight": torch.ones(128, 128).to(torch.float8_e4m3fn) for n in "eh"}
    return tensors


def test_mtp_is_told_by_its_keys_and_checked_only_when_it_counts(folder: Path) -> None:
    """Cases C028 and C031: unscaled FP8 is read for listed names only; a drafter is not multi-token prediction."""
    add_tensors(folder, mtp_block(0, next_token=True))
    edit_config(folder, num_nextn_predict_layers=1)
    checked = check_checkpoint(folder, for_training=False)
    assert (checked.mtp, checked.problems) == ("next_token", [])
    (problem,) = check_checkpoint(folder, for_training=False, unscaled_fp8=["mtp.*.e_proj"]).problems
    assert problem.tensor == "mtp.0.h_proj.weight" and "FP8 without a scale" in problem.message
    edit_config(folder, num_nextn_predict_layers=2)
    (problem,) = check_checkpoint(folder, for_training=False).problems
    assert "num_nextn_predict_layers is 2, but the checkpoint has 1 mtp. blocks" in problem.message
    edit_tensor(folder, "mtp.0.ffn.experts.7.w2.scale", lambda _: None)
    edit_config(folder, num_nextn_predict_layers=1)
    (problem,) = check_checkpoint(folder, for_training=False).problems
    assert problem.tensor == "mtp.0.ffn.experts.7.w2.weight" and "FP4 without a scale" in problem.message
    edit_config(folder, num_nextn_predict_layers=0)
    assert check_checkpoint(folder, for_training=False).problems == []


def test_a_drafter_of_three_blocks_is_a_note(folder: Path) -> None:
    """Case C031: Flash-0731 keeps a drafter under the prefix of multi-token prediction."""
    add_tensors(
        folder, mtp_block(0, next_token=False) | mtp_block(1, next_token=False) | mtp_block(2, next_token=False)
    )
    edit_config(folder, num_nextn_predict_layers=1)
    checked = check_checkpoint(folder, for_training=False)
    assert (checked.mtp, checked.problems) == ("drafter", [])
    assert any("a drafter of 3 blocks" in note for note in checked.notes)


def test_lists_match_whole_parts() -> None:
    assert is_listed("mtp.0.e_proj.weight", ["mtp.*.e_proj"])
    assert is_listed("mtp.0.e_proj.weight", ["mtp.0.e_proj.weight"])
    assert not is_listed("mtp.0.attn.e_proj.weight", ["mtp.*.e_proj"])
    assert not is_listed("layers.0.e_proj.weight", ["mtp.*.e_proj"])


def test_summary_counts_formats(sharded: Path, random_official: dict[str, torch.Tensor]) -> None:
    summary = summarize(check_checkpoint(sharded))
    rows = {(row.tensor_class, row.format): row for row in summary.formats}
    experts = rows["routed experts", "FP4 1x32, scale E8M0 .scale"]
    assert experts.tensors == 5 * 8 * 3
    assert experts.parameters == 5 * 8 * 3 * 192 * 128
    assert experts.bytes == experts.parameters // 2 + experts.parameters // 32
    assert summary.largest_group_bytes == experts.bytes // 5
    assert summary.parameters == sum(value.numel() for value in random_official.values())
    assert summary.form == "FP4 routed experts, FP8 projections"
    assert summary.layer_kinds["compressed_sparse_attention"] == 2


def test_inspect_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder), "--json", "--deep"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["deep"] and summary["problems"] == []
    assert main(["inspect", str(folder)]) == 0
    assert "FP4 1x32, scale E8M0 .scale" in capsys.readouterr().out
    edit_tensor(folder, f"{EXPERT}.scale", byte(255))
    assert main(["inspect", str(folder)]) == 0
    assert main(["inspect", str(folder), "--deep", "--json"]) == 1
    (problem,) = json.loads(capsys.readouterr().out.splitlines()[-1])["problems"]
    assert problem["tensor"] == f"{EXPERT}.scale"
    (folder / "config.json").write_text("{")
    assert main(["inspect", str(folder), "--deep"]) == 1
    assert "config.json: cannot be read" in capsys.readouterr().out
    assert main(["inspect", str(folder / "absent")]) == 2
