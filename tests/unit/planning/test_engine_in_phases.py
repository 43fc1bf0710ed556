"""What a colocated engine holds in each phase of the mini recipe, awake and asleep; what the output says of rows."""

from pathlib import Path

import pytest
from rich.console import Console

from nemo_rl_dsv4.cli.plan_tables import as_document, print_plan
from nemo_rl_dsv4.config import load_config, validate
from nemo_rl_dsv4.planning import plan as module
from nemo_rl_dsv4.planning.engine import weight_bytes_per_rank
from nemo_rl_dsv4.planning.forward import BlockMemory, ForwardCheck
from nemo_rl_dsv4.planning.hardware import GIB, RUNTIME_BYTES, gpu_bytes

MINI = Path(__file__).parents[3] / "examples" / "configs" / "recipes" / "llm" / "grpo-dsv4-mini-1n1g-automodel-qat.yaml"
SLEEP = "policy.dsv4.engine_sleep=true"
TENSOR_PARALLEL = "policy.generation.vllm_cfg.tensor_parallel_size"
POOL = "policy.generation.vllm_kwargs.kv_cache_memory_bytes"
TRAINING, SCORING, REFIT, GENERATION = PHASES = ("training", "scoring", "refit", "generation")
WEIGHTS, PROCESS, ASLEEP = "engine weights", "engine's driver and libraries (assumed)", "sleeping engine (assumed)"


@pytest.fixture(scope="module")
def layouts():
    """Layouts made so far: one, as no test changes it."""
    return []


@pytest.fixture
def plan(monkeypatch, layouts):
    """Plans of the mini recipe; it is laid out once, and the forward pass, which has no part in it, is not run."""
    lay_out = module.lay_out

    def once(*args, **kwargs):
        if not layouts:
            layouts.append(lay_out(*args, **kwargs))
        return layouts[0]

    block = BlockMemory("ratio 0", 6, GIB, GIB, GIB, GIB)
    forward = ForwardCheck((32, 512), (32, 512, 4, 2048), (32, 512, 189), "bfloat16", 6, (block,))
    monkeypatch.setattr(module, "check_forward", lambda *_, **__: forward)
    monkeypatch.setattr(module, "lay_out", once)

    def make(*overrides, gpu="h200"):
        config = load_config(MINI, ["runtime=embedded", *overrides])
        validate(config, runs_here=False)
        return config, module.make_plan(config, None if gpu is None else gpu_bytes(gpu))

    return make


def held(made):
    """Phase -> name -> bytes, of the engine's parts alone."""
    names = (WEIGHTS, "KV pool", PROCESS, ASLEEP)
    return {phase: {p.name: p.bytes for p in parts if p.name in names} for phase, parts in made.phases.items()}


def test_an_engine_that_stays_awake_is_counted_in_every_phase(plan):
    """It was shown asleep in training and scoring, and without its pool in refits, whatever the recipe said."""
    _, made = plan()
    weights = weight_bytes_per_rank(made.hf_config, fp8=True, tensor_parallel=1)
    whole = {WEIGHTS: weights, "KV pool": 4_000_000_000, PROCESS: RUNTIME_BYTES}
    assert held(made) == dict.fromkeys(PHASES, whole)


def test_an_engine_that_sleeps_leaves_its_process_alone(plan):
    _, awake = plan()
    _, made = plan(SLEEP)
    parts, whole = held(made), held(awake)[GENERATION]
    assert parts[TRAINING] == parts[SCORING] == {ASLEEP: RUNTIME_BYTES}
    assert parts[REFIT] == {WEIGHTS: whole[WEIGHTS], PROCESS: RUNTIME_BYTES}  # the pool is taken afterwards
    assert parts[GENERATION] == whole
    given_back = {phase: awake.totals[phase] - made.totals[phase] for phase in PHASES}
    freed = whole[WEIGHTS] + 4_000_000_000
    assert given_back == {TRAINING: freed, SCORING: freed, REFIT: 4_000_000_000, GENERATION: 0}


def test_a_policy_that_does_not_sleep_is_counted_while_engines_generate(plan, capsys):
    """The plan took it for gone in every recipe, and only said on its page that it was not."""
    kept = ["weights", "optimizer states", "rounded weights"]
    _, made = plan(SLEEP)
    training = {part.name: part.bytes for part in made.phases[TRAINING]}
    assert {p.name: p.bytes for p in made.phases[GENERATION]}.items() >= {n: training[n] for n in kept}.items()
    assert training["optimizer states"] in [part.bytes for part in made.phases[REFIT]]
    assert made.sleeping_bytes == 0
    config, asleep = plan(SLEEP, "policy.dsv4.trainer_sleep=true")
    assert made.totals[GENERATION] - asleep.totals[GENERATION] == sum(training[name] for name in kept)
    assert made.totals[REFIT] - asleep.totals[REFIT] == training["optimizer states"]
    assert asleep.totals[TRAINING] == made.totals[TRAINING] and asleep.totals[SCORING] == made.totals[SCORING]
    assert asleep.sleeping_bytes == sum(training[name] for name in kept)
    print_plan(asleep, config, "h200", Console(width=200))
    each = f"{asleep.sleeping_bytes / GIB:.1f} GiB"
    assert f"Host memory while engines generate: {each} a rank, {each} a node, pinned\n" in capsys.readouterr().out
    findings = "\n".join(plan(SLEEP, f"{POOL}=36000000000", gpu="40")[1].findings)
    assert "generation needs" in findings and "policy.dsv4.trainer_sleep" in findings.partition("generation needs")[2]


def test_a_pool_that_is_not_stated_comes_from_the_share(plan):
    _, made = plan(f"~{POOL}")
    parts = held(made)
    assert parts[TRAINING] == parts[GENERATION]
    assert sum(parts[TRAINING].values()) == int(gpu_bytes("h200") * 0.06)
    assert set(plan(f"~{POOL}", gpu=None)[1].phases) == {TRAINING, SCORING}  # a share of nothing known
    assert held(plan(gpu=None)[1]) == held(plan()[1])


def test_findings_name_the_keys_of_an_awake_engine(plan):
    findings = "\n".join(plan(f"{POOL}=60000000000", gpu="40")[1].findings)
    assert f"KV pool (55.9 GiB): change {POOL} or policy.dsv4.engine_sleep" in findings
    generation = findings.partition("generation needs")[2]
    assert f"KV pool (55.9 GiB): change {POOL};" in generation and "engine_sleep" not in generation
    (small,) = plan(f"{POOL}=1000000")[1].findings
    assert small.startswith("the KV pool of 0.0 GiB holds less than one sequence of 512 tokens")
    assert small.endswith(f"raise {POOL}")
    (small,) = plan(f"~{POOL}", "policy.generation.vllm_cfg.gpu_memory_utilization=0.01")[1].findings
    assert small.endswith("raise policy.generation.vllm_cfg.gpu_memory_utilization or " + TENSOR_PARALLEL)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), "rows of max_total_sequence_length 512; shorter rows need less\n"),
        (
            ("policy.make_sequence_length_divisible_by=384",),
            "rows of max_total_sequence_length 512, padded to 768; shorter rows need less\n",
        ),
        (
            ("policy.make_sequence_length_divisible_by=512",),
            "rows of max_total_sequence_length 512; shorter rows are padded to as much\n",
        ),
        (
            ("policy.sequence_packing.enabled=true",),
            "rows of max_total_sequence_length 512; packing fills them with shorter ones\n",
        ),
    ],
)
def test_the_output_says_which_rows_activations_are_those_of(plan, capsys, overrides, said):
    config, made = plan(*overrides)
    print_plan(made, config, "h200", Console(width=200))
    shown = capsys.readouterr().out
    assert f"Activations: {said}" in shown and "KV pool: 3.7 GiB hold" in shown
    assert as_document(made, "h200")["row_length"] == made.row_length
