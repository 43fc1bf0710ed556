"""`nemo-rl-dsv4 plot` and `nemo-rl-dsv4 profiles`."""

import json

import pytest

from nemo_rl_dsv4.cli.main import COMMANDS, main


@pytest.mark.parametrize("arguments", [[], *([name] for name in COMMANDS)], ids=lambda a: " ".join(a) or "itself")
def test_help_has_an_example(capsys, arguments):
    assert main([*arguments, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "example" in shown and "nemo-rl-dsv4 " in shown.partition("example")[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "arguments are required: COMMAND"),
        (["plt"], "invalid choice: 'plt'"),
        (["plot"], "RUN_DIR"),
        (["plot", "nowhere"], "nowhere: no such run folder"),
        (["profiles", "vllm-hoper"], "unknown rollout profile 'vllm-hoper'; valid: bf16, vllm-hopper"),
        (["profiles", "bf16", "--diff", "bf16", "vllm-hopper"], "either NAME"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, arguments, message):
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and message in shown.err


def test_profiles_lists_names_and_sites(capsys):
    assert main(["profiles"]) == 0
    assert "vllm-rocm-gfx950" in capsys.readouterr().out
    assert main(["profiles", "vllm-hopper", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    linear = next(row for row in rows if row["site"] == "linear.weight")
    assert (linear["groups"], linear["scale"]) == ("128x128", "ue8m0")
    hidden = next(row for row in rows if row["site"] == "expert.hidden")
    assert hidden["source"].startswith("vLLM 0.26.0 vllm/") and hidden["source"].endswith("_colmajor")
    assert main(["profiles", "vllm-hopper"]) == 0
    shown = capsys.readouterr().out
    assert "fp8_ds_mla" in shown
    assert "amax floor: the block maximum is clamped to this from below" in shown
    assert "yarn_on_window_layers: vLLM 0.26.0 vllm/models/deepseek_v4/common/rope.py build_deepseek_v4_rope" in shown


def test_every_row_of_a_vllm_profile_names_a_function_or_says_that_it_is_not_verified():
    from nemo_rl_dsv4.numerics.profiles import PROFILES, STEP

    for name, profile in PROFILES.items():
        for row in profile.rows():
            if name.startswith("vllm") and row["note"] != STEP:
                named = ".py" in row["source"] or ".cu" in row["source"]
                assert named or "function not verified" in row["source"], (name, row)


def test_profiles_diff_ends_with_1_where_two_differ(capsys):
    assert main(["profiles", "--diff", "vllm-hopper", "vllm-blackwell", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["differences"]
    assert {"site": "linear.input", "field": "rounding", "vllm-hopper": "log2f", "vllm-blackwell": "bits"} in found
    assert main(["profiles", "--diff", "bf16", "bf16"]) == 0
    assert capsys.readouterr().out.strip() == "no difference"
    assert main(["profiles", "--help"]) == 0
    assert "exit 0 if they agree, 1 if they differ" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("part", ["manifest.json", "training_info.json", "policy/"])
def test_inspect_of_a_training_checkpoint_says_how_to_make_a_servable_one(capsys, tmp_path, part):
    """It printed an empty table and two problems: no config.json, no model.safetensors."""
    step = tmp_path / "exp_001" / "step_40"
    step.mkdir(parents=True)
    (step / part).mkdir() if part.endswith("/") else (step / part).write_text("{}")
    for folder, is_what in ((step, "is a training checkpoint"), (step.parent, "holds training checkpoints")):
        assert main(["inspect", str(folder), "--deep"]) == 2
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.count("\n") == 1
        assert f"{folder} {is_what}" in shown.err
        assert f"`nemo-rl-dsv4 convert {folder} {folder}-fp8 --to fp8`" in shown.err
    (step / "config.json").write_text("{")
    assert main(["inspect", str(step)]) == 1
    assert "config.json: cannot be read" in capsys.readouterr().out


def test_the_policy_of_a_training_checkpoint_leads_to_its_step(capsys, tmp_path, monkeypatch):
    step = tmp_path / "exp_001" / "step_40"
    (step / "policy").mkdir(parents=True)
    (step / "policy" / ".metadata").write_text("")
    monkeypatch.chdir(step / "policy")
    for folder in (str(step / "policy"), "."):
        assert main(["inspect", folder]) == 2
        shown = capsys.readouterr()
        assert shown.out == "" and f"{folder} is the policy of a training checkpoint" in shown.err
        assert f"`nemo-rl-dsv4 convert {step} {step}-fp8 --to fp8`" in shown.err
        assert main(["convert", folder, str(tmp_path / "made"), "--to", "fp8"]) == 2
        assert f"checking the files of {step} against their hashes" in capsys.readouterr().err


def test_plot_names_what_it_wrote(capsys, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/reward": 0.5}\n{"step": 2, "train/reward": 0.6}\n')
    assert main(["plot", str(tmp_path), "--json"]) == 0
    files = json.loads(capsys.readouterr().out)
    assert files == {"plots": str(tmp_path / "summary.png"), "report": str(tmp_path / "report.html")}
    assert main(["plot", str(tmp_path)]) == 0
    assert f"report: {tmp_path / 'report.html'}" in capsys.readouterr().out
