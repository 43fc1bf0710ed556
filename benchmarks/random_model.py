"""Write the FP8 checkpoint of a random DeepSeek-V4 on which every difference between two programs shows.

    python benchmarks/random_model.py DIR [--hidden-size 2048] [--seed 0] [--device cuda]

Six layers of AutoModel's initialization with the head and attention sizes of V4-Flash; matrices doubled, sinks, router
bias, position tables and head drawn wide, so that attention and routers are peaked and layers amplify what they get.
The random-weight study of docs/results.md is `nemo-rl-dsv4 mismatch --checkpoint DIR --random-prompts ...` on it, made
on a GPU with the defaults. A CPU draws other numbers than a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent))

from arguments import at_least
from vllm_refit import CONFIG

from nemo_rl_dsv4.cli.guard import guarded
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.build import build_model
from nemo_rl_dsv4.model.checkpoint_format import automodel_config
from nemo_rl_dsv4.refit import export_weights

WIDEN, HEAD = 2.0, 0.1
"""Factor of matrices, and the head's standard deviation."""


def draw(config: dict[str, Any], seed: int, device: torch.device) -> torch.nn.Module:
    """A BF16 model with random weights.

    Args:
        config: an official config.json.
        seed: of the initialization; `seed + 1` draws what is changed afterwards.
        device: where to draw; its generators decide the numbers.
    """
    torch.manual_seed(seed)
    model = build_model(automodel_config(config), dtype=torch.bfloat16, device=device)
    generator = torch.Generator(device).manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ape" in name:
                parameter.normal_(0, 0.5, generator=generator)
            elif "sinks" in name:
                parameter.normal_(0, 1, generator=generator)
            elif "lm_head" in name:
                parameter.normal_(0, HEAD, generator=generator)
            elif parameter.dim() >= 2 and "hc" not in name and "embed" not in name:
                parameter.mul_(WIDEN)
        for name, buffer in model.named_buffers():
            if "e_score_correction_bias" in name:
                buffer.normal_(0, 0.05, generator=generator)
    return model


def write(model: torch.nn.Module, config: dict[str, Any], folder: Path) -> int:
    """Write config.json and model.safetensors as an FP8 release has them; returns the number of tensors.

    Raises:
        UserError: the folder cannot be written.
    """
    tensors = {name: tensor.cpu().contiguous() for name, tensor in export_weights(model.state_dict(), "vllm-hopper")}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror}); give another folder") from error
    return len(tensors)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hidden-size", type=at_least(128), default=2048, help="a multiple of 128")
    parser.add_argument("--seed", type=at_least(0), default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    options = parser.parse_args()
    if options.hidden_size % 128:
        raise UserError(f"--hidden-size is {options.hidden_size}; wanted a multiple of 128, the block of FP8 weights")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device is cuda, and torch sees no GPU here; wanted cpu")
    if (options.folder / "config.json").exists():
        raise UserError(f"{options.folder} holds a checkpoint already; give another folder, or remove it")
    config = {**CONFIG, "hidden_size": options.hidden_size}
    model = draw(config, options.seed, torch.device(options.device))
    count = write(model, config, options.folder)
    print(f"{count} tensors in {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main, lower="lower --hidden-size"))
