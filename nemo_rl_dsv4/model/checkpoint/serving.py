"""A note in a checkpoint folder that says how to serve it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nemo_rl_dsv4.model.checkpoint.folder import write_text

FILE = "SERVE.md"
_ENVIRONMENT = {
    "VLLM_USE_DEEP_GEMM": "1",
    "VLLM_USE_DEEP_GEMM_E8M0": "1",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
}


def serving_notes(config: dict[str, Any]) -> str:
    """Return the note for a checkpoint with this config.json."""
    quantized = bool(config.get("quantization_config"))
    experts = config.get("expert_dtype", "fp8") if quantized else "bf16"
    lines = [
        "# Serving this checkpoint",
        "",
        f"DeepSeek-V4 under its official tensor names; routed experts {experts}, "
        f"other projections {'fp8 (128x128 scales)' if quantized else 'bf16'}.",
        "",
        "## vLLM",
        "```",
    ]
    overrides = f' --hf-overrides \'{{"expert_dtype": "{experts}"}}\'' if quantized else ""
    if quantized:
        lines += [" ".join(f"{key}={value}" for key, value in _ENVIRONMENT.items()) + " \\"]
    lines += [
        f"  vllm serve . --kv-cache-dtype fp8 --block-size 256 --enable-expert-parallel{overrides}",
        "```",
        "Add `--tensor-parallel-size N` for N GPUs. The settings are those of the rollout in training; with others the",
        "engine rounds differently from the policy that was trained.",
        "",
        "## transformers",
        "```python",
        "from transformers import AutoModelForCausalLM",
        'model = AutoModelForCausalLM.from_pretrained(".")',
        "```",
    ]
    if quantized:
        lines += [
            "FP8 needs a GPU there; on a CPU convert first: `nemo-rl-dsv4 convert . OUT --to bf16`.",
        ]
    return "\n".join(lines) + "\n"


def export_command(step: Path, to: str = "fp8") -> str:
    """Command that makes a training checkpoint servable, in a folder beside it."""
    return f"nemo-rl-dsv4 convert {step} {step}-{to} --to {to}"


def training_notes(step: Path) -> dict[str, str]:
    """Return {file: note} for a training checkpoint in the folder `step`: engines cannot read it as it is."""
    text = "\n".join(
        [
            "# Serving this training checkpoint",
            "",
            "It holds weights and optimizer in torch's distributed format, which no engine reads. Export the weights:",
            "```",
            export_command(step),
            "```",
            "FP8 is what the run's rollout had at this step: official names, codes, scales, config and tokenizer.",
            "`--to bf16` gives the weights as the optimizer holds them, for transformers or further training.",
            f"The new folder's {FILE} has the commands for vLLM and transformers.",
            "",
        ]
    )
    return {FILE: text}


def write_serving_notes(folder: Path) -> Path:
    """Write the note into a checkpoint folder and return its path."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write_text(folder / FILE, serving_notes(config))
    return folder / FILE
