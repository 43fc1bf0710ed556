"""`examples/run_grpo.py` as a user calls it."""

import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from nemo_rl_dsv4.cli.run_grpo import main, parse

ROOT = Path(__file__).parents[3]
RECIPE = str(ROOT / "examples/configs/recipes/llm/grpo-dsv4-tiny-1n0g-automodel-cp2ep2-qat.yaml")


@pytest.fixture
def started(monkeypatch):
    """Stands in for the runtime and records what it was started with."""
    calls = []
    runtime = types.ModuleType("nemo_rl_dsv4.runtime")
    runtime.run = lambda config, resume: calls.append((config, resume))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nemo_rl_dsv4.runtime", runtime)
    return calls


@pytest.fixture
def places(tmp_path):
    return [
        f"logger.log_dir={tmp_path}/logs",
        f"checkpointing.checkpoint_dir={tmp_path}/ckpt",
        f"policy.dsv4.tiny.cache_dir={tmp_path}/cache",
        "runtime=embedded",
        "grpo.num_prompts_per_step=16",
        "grpo.num_generations_per_prompt=8",
        "policy.train_global_batch_size=128",
    ]


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "examples/run_grpo.py"), *arguments], capture_output=True, text=True, check=False
    )


def test_help_shows_an_example_and_is_quick():
    start = time.process_time()
    shown = command("--help")
    assert shown.returncode == 0 and "--config examples/configs/recipes/llm/" in shown.stdout
    for option in ("--dry-run", "--resume", "--debug", "key=value"):
        assert option in shown.stdout
    assert time.process_time() - start < 2


def test_parsing_a_recipe_does_not_import_torch():
    """Bad input used to wait for torch, which takes seconds to import."""
    code = (
        "import sys; from nemo_rl_dsv4.cli.run_grpo import main; status = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, "--config", RECIPE, "grpo.sed=1"], capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (
        2,
        "error: 'grpo.sed=1': unknown key grpo.sed; did you mean grpo.seed?\n",
    )


def test_a_dry_run_does_not_import_torch(places):
    code = (
        "import sys; from nemo_rl_dsv4.cli.run_grpo import main; status = main(sys.argv[1:]); "
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules); sys.exit(status)"
    )
    ended = subprocess.run([sys.executable, "-c", code, "--config", RECIPE, "--dry-run", *places], capture_output=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--config (see --help)"),
        (["--config"], "expected one argument"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: no such recipe file"),
        (["--config", RECIPE, "--dryrun"], "unrecognized arguments: --dryrun"),
        (["--config", RECIPE, "policy.dsv4.cpu_processes=3"], "does not divide"),
        (["--config", RECIPE, "logger.log_dir=/proc/logs"], "cannot write in /proc"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, started, arguments, message):
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("error: ") and shown.err.count("\n") == 1
    assert message in shown.err and started == []


def test_dry_run_shows_the_topology_and_writes_nothing(capsys, started, places, tmp_path):
    assert main(["--config", RECIPE, "--dry-run", *places]) == 0
    shown = capsys.readouterr().out
    assert "2 CPU processes" in shown and "16 prompts x 8 responses = 128 sequences" in shown
    assert "exp_001/" in shown and "ckpt/exp_001/step_N/" in shown
    assert started == [] and list(tmp_path.iterdir()) == []
    assert "train set" in shown and "word_problems: 4096 problems" in shown and "<｜User｜>" in shown
    assert "The recipe is valid." in shown and "cannot run here" not in shown


def test_dry_run_finds_mistakes_inside_a_dataset(capsys, places, tmp_path):
    """A wrong file used to be found when the run started, after the dry run had called the recipe valid."""
    path = tmp_path / "set.jsonl"
    path.write_text('{"question": "1 + 1?"}\n')
    wrong = ["data.train.dataset_name=ResponseDataset", f"++data.train.data_path={path}", "data.train.size=null"]
    assert main(["--config", RECIPE, "--dry-run", *places, *wrong]) == 2
    assert "set.jsonl:1 has no key 'input'" in capsys.readouterr().err


VLLM_SIZES = [
    f"policy.dsv4.tiny.{key}={value}"
    for key, value in {
        "expert_format": "fp8",
        "hidden_size": 2048,
        "num_attention_heads": 8,
        "o_groups": 8,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
        "q_lora_rank": 128,
        "o_lora_rank": 128,
        "moe_intermediate_size": 128,
    }.items()
]


def test_a_valid_recipe_that_cannot_run_here_says_so_and_exits_0(capsys, places, monkeypatch):
    """No GPU, no vLLM: a note beside validity, not an error."""
    monkeypatch.setattr("nemo_rl_dsv4.config.runs_here.GPU_FILES", ("/dev/no-such-device",))
    gpu = ["cluster.gpus_per_node=8", "policy.dsv4.cpu_processes=1", "policy.generation.backend=vllm"]
    gpu += VLLM_SIZES
    assert main(["--config", RECIPE, "--dry-run", *places, *gpu]) == 0
    shown = capsys.readouterr().out
    assert "The recipe is valid." in shown
    assert "It cannot run here: the recipe needs 1 x 8 GPUs; this machine shows none." in shown


def test_dry_run_of_a_large_layout_shortens_the_list_of_ranks(capsys, places):
    layout = [
        "cluster.gpus_per_node=8",
        "cluster.num_nodes=16",
        "policy.dsv4.cpu_processes=1",
        "policy.generation.backend=vllm",
        "policy.dtensor_cfg.context_parallel_size=8",
        "policy.dtensor_cfg.expert_parallel_size=128",
        "policy.dsv4.tiny.n_routed_experts=128",
        *VLLM_SIZES,
        "policy.dsv4.tiny.max_position_embeddings=1024",
        "policy.max_total_sequence_length=1024",
        "policy.dtensor_cfg.automodel_kwargs.backend.dispatcher=deepep",
        "policy.dtensor_cfg.automodel_kwargs.backend.experts=torch_mm",
    ]
    assert main(["--config", RECIPE, "--dry-run", *places, *layout]) == 0
    shown = capsys.readouterr().out
    assert "Ranks (128)" in shown and "16 nodes x 8 GPUs" in shown
    assert len(shown.splitlines()) < 80


def test_a_run_gets_the_resolved_recipe(started, places):
    assert main(["--config", RECIPE, "grpo.seed=7", *places]) == 0
    (config, resume), *more = started
    assert config.grpo.seed == 7 and resume is None and more == []


def test_old_flags_are_reported(capsys, started, places):
    flag = "+policy.hf_config_overrides.fp8_ds_mla_fake_quant_kv=true"
    assert main(["--config", RECIPE, flag, *places]) == 0
    assert "note: policy.hf_config_overrides.fp8_ds_mla_fake_quant_kv: true is read as" in capsys.readouterr().err


def test_resume_takes_a_folder_the_newest_run_or_says_that_there_is_none(capsys, started, places, tmp_path):
    assert main(["--config", RECIPE, "--resume", *places]) == 2
    assert "there is no run in" in capsys.readouterr().err
    for name in ("exp_002", "exp_010"):
        (tmp_path / "logs" / name).mkdir(parents=True)
        (tmp_path / "logs" / name / "config.yaml").write_text("a: 1\n")
    (tmp_path / "logs" / "exp_011").mkdir()
    assert main(["--config", RECIPE, "--resume", *places]) == 0
    assert main(["--config", RECIPE, *places, "--resume", str(tmp_path / "logs" / "exp_002")]) == 0
    assert [resume.name for _, resume in started] == ["exp_010", "exp_002"]
    assert main(["--config", RECIPE, *places, "--resume", str(tmp_path / "logs" / "exp_011")]) == 2
    assert "holds no config.yaml" in capsys.readouterr().err


def test_the_word_after_resume_may_be_an_override():
    assert vars(parse(["--config", "r", "--resume", "a=1", "b=2"])) | {"debug": None} == {
        "config": "r",
        "resume": "",
        "overrides": ["a=1", "b=2"],
        "dry_run": False,
        "trainer": None,
        "debug": None,
    }
    assert parse(["a=1", "--resume", "logs/exp_001", "b=2", "--config", "r"]).overrides == ["a=1", "b=2"]


def test_ctrl_c_in_a_run_is_one_line(capsys, places, monkeypatch):
    def interrupted(config, resume):
        raise KeyboardInterrupt

    runtime = types.ModuleType("nemo_rl_dsv4.runtime")
    runtime.run = interrupted  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nemo_rl_dsv4.runtime", runtime)
    assert main(["--config", RECIPE, *places]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_dry_run_of_resuming_reads_the_recipe_of_the_run(capsys, places, tmp_path):
    run = tmp_path / "logs" / "exp_001"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("{")
    assert main(["--config", RECIPE, "--dry-run", f"--resume={run}", *places]) == 2
    assert "cannot be read as the recipe of a run" in capsys.readouterr().err
    (run / "config.yaml").write_text("checkpointing: {checkpoint_dir: ckpt}")
    assert main(["--config", RECIPE, "--dry-run", f"--resume={run}", *places]) == 0
