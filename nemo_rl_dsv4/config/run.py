"""Sections `data`, `env`, `checkpointing`, `logger` and `cluster`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from nemo_rl_dsv4.config.section import OpenMapping, PathName, Section

Positive = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=1, le=65535)]
NonNegative = Annotated[int, Field(ge=0)]


class Dataset(Section):
    """One set of problems."""

    dataset_name: str | None = None
    """`word_problems`, `reasoning_gym:<name>`, `DAPOMath17K`, `DAPOMathAIME2024`, `AIME2024` or `AIME2026` (published
    sets), `ResponseDataset` (a JSON-lines file), or a callable's dotted path."""
    size: NonNegative | None = None
    """Problems in the set; null for the set's own size."""
    seed: NonNegative | None = None
    """Seed of the generator; null for `grpo.seed`."""
    difficulty: Literal[1, 2, 3] | None = None
    """`word_problems`: how many kinds of question there are; null for the easiest."""
    max_number: Positive | None = None
    """`word_problems`: the largest number in a question or its solution; null for the generator's usual one."""
    long_fraction: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    """`word_problems`: share of prompts that carry distracting context; null for the generator's usual one."""
    long_words: Positive | None = None
    """`word_problems`: words of such a prompt; null for the generator's usual number."""
    kwargs: OpenMapping = {}
    """Arguments of a `reasoning_gym:<name>` generator or of a callable given by its dotted path."""
    data_path: PathName | None = None
    """File of a local set; of a published set: a copy on disk (.parquet, .jsonl, .json, or a folder)."""
    input_key: str | None = None
    """Field of the question."""
    output_key: str | None = None
    """Field of the answer; dots lead into nested fields of a published set."""
    subset: str | None = None
    """Subset of a published set."""
    split: str | None = None
    """Split of a published set."""
    split_validation_size: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """Share of the training set held out for validation."""
    prompt_file: PathName | None = None
    """File of the text around the question."""
    system_prompt_file: PathName | None = None
    """File of the system prompt."""
    processor: str | None = None
    """NeMo-RL's name of the function that turns a record into a prompt."""
    env_name: str | None = None
    """Environment that scores answers."""
    download_dir: PathName | None = None
    """Folder for downloads of a published set; null for `HF_HOME`."""


class Data(Section):
    """Problems, and how they are fed."""

    max_input_seq_length: Positive | None = None
    """Longest prompt in tokens; longer ones are an error. Null for the policy's limit."""
    overlong_prompts: Literal["error", "filter"] = "error"
    """What to do with a prompt beyond `max_input_seq_length`: stop, or leave it out and count it."""
    shuffle: bool = True
    """Shuffle training problems anew each epoch."""
    num_workers: NonNegative = 1
    """Loader processes; 0 loads in the driver."""
    use_multiple_dataloader: Literal[False] = False
    """Only ``false``: one training set."""
    train: Dataset
    """Training problems."""
    validation: Dataset | None = None
    """Held-out problems; null turns validation off."""
    default: Dataset | None = None
    """Values for what a set leaves null."""


class MathEnv(Section):
    """Scoring of mathematical answers."""

    num_workers: Positive = 1
    """Scoring processes."""
    math_verify_impl: Literal["hf_math_verify", "dapo_math_verify"] = "hf_math_verify"
    """`hf_math_verify` scores what is boxed by value; `dapo_math_verify` the last line `Answer: ...` as text, which the
    DAPO sets ask for."""


class Env(Section):
    """Environments by name."""

    math: MathEnv = MathEnv()
    """Mathematics."""


class Checkpointing(Section):
    """When and where training state is saved."""

    enabled: bool = True
    """Save at all."""
    checkpoint_dir: PathName = "results/grpo"
    """Folder of the checkpoints."""
    metric_name: str | None = "val:accuracy"
    """Metric that ranks checkpoints, `val:` or `train:` and its name; null keeps the latest."""
    higher_is_better: bool = True
    """Whether a larger metric is better."""
    keep_top_k: Positive | None = 3
    """Checkpoints that are kept; null for all."""
    save_period: Positive = 10
    """Steps between two checkpoints."""
    checkpoint_must_save_by: str | None = None
    """Wall-clock `DD:HH:MM:SS` after which a last checkpoint is saved and the run ends; null for never."""
    async_save: bool = True
    """Train on while a checkpoint's files are written. Each rank holds a copy of its state in memory for that long."""
    model_save_format: Literal["safetensors", "torch_save"] | None = "safetensors"
    """File format of saved weights."""
    save_consolidated: bool = False
    """Also write one checkpoint in the release's layout."""
    save_optimizer: bool = True
    """Save optimizer state, which `--resume` needs."""


class Wandb(Section):
    """Weights & Biases."""

    project: str = "grpo-dsv4"
    """Project."""
    name: str = "grpo-dsv4"
    """Run name."""
    entity: str | None = None
    """Team; null for the account's own."""
    log_nemo_gym_full_result_tables: Literal[False] = False
    """Only ``false``: there is no NeMo-Gym here."""


class Mlflow(Section):
    """MLflow."""

    experiment_name: str = "grpo-dsv4"
    """Experiment."""
    run_name: str = "grpo-dsv4"
    """Run name."""
    tracking_uri: str | None = None
    """Server or folder; null for MLflow's own choice."""


class Swanlab(Section):
    """SwanLab: only NeMo-RL logs there."""

    project: str = "grpo-dsv4"
    """Project."""
    name: str = "grpo-dsv4"
    """Run name."""


class GpuMonitoring(Section):
    """Sampling of GPU usage in the `nemo_rl` runtime."""

    collection_interval: Annotated[float, Field(gt=0.0)] = 10.0
    """Seconds between two samples."""
    flush_interval: Annotated[float, Field(gt=0.0)] = 10.0
    """Seconds between two writes."""


class Logger(Section):
    """Where metrics go. `metrics.jsonl`, plots and `report.html` are always written."""

    log_dir: PathName = "logs"
    """Folder in which every run makes its own `exp_NNN`."""
    num_val_samples_to_print: NonNegative = 0
    """Validation responses shown on the console."""
    tensorboard_enabled: bool = True
    """Write TensorBoard events."""
    wandb_enabled: bool = False
    """Log to Weights & Biases."""
    mlflow_enabled: bool = False
    """Log to MLflow."""
    swanlab_enabled: Literal[False] = False
    """Only ``false``."""
    monitor_gpus: bool = False
    """Log GPU usage (`nemo_rl` runtime)."""
    wandb: Wandb = Wandb()
    """Weights & Biases."""
    mlflow: Mlflow = Mlflow()
    """MLflow."""
    swanlab: Swanlab = Swanlab()
    """SwanLab."""
    tensorboard: OpenMapping = {}
    """NeMo-RL's TensorBoard settings."""
    gpu_monitoring: GpuMonitoring = GpuMonitoring()
    """GPU usage."""


class Cluster(Section):
    """Machines."""

    gpus_per_node: NonNegative = 1
    """GPUs of a node; 0 runs on CPUs with `policy.dsv4.cpu_processes` processes."""
    num_nodes: Positive = 1
    """Nodes."""
    master_port_range_low: Port | None = None
    """First port for rendezvous (`nemo_rl` runtime)."""
    master_port_range_high: Port | None = None
    """Last port for rendezvous (`nemo_rl` runtime)."""
    segment_size: Positive | None = None
    """Nodes of one NVLink domain; null to ignore domains."""
