"""Several training processes against one, on gloo and CPUs: relative errors of everything that a training step makes.

    python benchmarks/parity.py                                   # all sizes
    python benchmarks/parity.py --sizes dp2ep2 cp4ep4 --json

One process and each layout read the same checkpoint (a whole tiny DeepSeek-V4 with random weights), score the same
ragged rows, train on them once, and export. Columns: largest absolute difference of log-probabilities; relative
difference of loss and gradient norm; largest and median over parameters of |g - g1| / |g1|; the same of the optimizer's
update (SGD: AdamW's first step is the sign of a gradient, whatever its size); differing bytes of the exported FP8
checkpoint before training.

Variants: `plain` (one row a sequence) and `packed`, without rounding or alignment switches, `qat` (rounding on, rollout
profile vllm-hopper), and `qat-float64`.
Layouts add the same numbers in other orders, so float32 results differ in their last bits, and with rounding such a
difference can move a value to the next FP8 code. `qat-float64` is `qat` with every product, sum and transcendental
function worked out in float64 and rounded to float32 once, which leaves the order of additions nothing to change:
what it still shows would be an error of a layout.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_rl_dsv4.cli.guard import guarded
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.grpo.loss import ClippedPGLoss
from nemo_rl_dsv4.grpo.settings import LossSettings
from nemo_rl_dsv4.model.build import CPU_BACKEND
from nemo_rl_dsv4.model.checkpoint_format import automodel_config
from nemo_rl_dsv4.model.qat import SWITCHES
from nemo_rl_dsv4.numerics.alignment import SWITCHES as ALIGNMENT
from nemo_rl_dsv4.policy.packing import Packing
from nemo_rl_dsv4.policy.parallel import ParallelSizes
from nemo_rl_dsv4.policy.spec import PolicySpec, build_worker
from nemo_rl_dsv4.refit.export import export_weights

SIZES = ("replicated2", "dp2", "dp2ep2", "cp2ep2", "dp2cp2ep4", "cp4ep4")
VARIANTS = ("plain", "packed", "qat", "qat-float64")
ROWS, VOCAB = 8, 160
LEARNING_RATE = 100.0
"""The update is a difference of weights; it has to be as large as they are, or their own last bit hides it."""
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "moe_intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 80,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 64,
    "o_lora_rank": 64,
    "o_groups": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "compress_ratios": [0, 4, 128, 4],
    "sliding_window": 32,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 256,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
    "num_nextn_predict_layers": 0,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 256,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


INEXACT_OPERATORS = """
mm bmm addmm baddbmm addmv mv dot sum mean prod cumsum norm linalg_vector_norm logsumexp _softmax
_log_softmax _softmax_backward_data _log_softmax_backward_data exp log log1p rsqrt sqrt pow sigmoid
sigmoid_backward silu silu_backward softplus softplus_backward tanh sin cos addcmul addcdiv div
index_add index_add_ index_put _index_put_impl_ scatter_add embedding_dense_backward cumprod
"""


class Float64Arithmetic(TorchDispatchMode):
    """Operators of `INEXACT` on float32 tensors compute in float64; their results are rounded to float32."""

    INEXACT = frozenset(INEXACT_OPERATORS.split())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _operator_name(func)
        if name not in self.INEXACT or any(issubclass(kind, DTensor) for kind in types):
            return func(*args, **kwargs)
        wide_args = _each(_widened, args)
        if all(wide is arg for wide, arg in zip(wide_args, args, strict=True)):
            return func(*args, **kwargs)
        result = func(*wide_args, **{key: _widened(value) for key, value in kwargs.items()})
        if name.endswith("_"):
            return args[0].copy_(_narrowed(result))
        return _each(_narrowed, result) if isinstance(result, tuple) else _narrowed(result)


@functools.cache
def _operator_name(func: Any) -> str:
    return func._schema.name.removeprefix("aten::")


def _each(change: Callable[[Any], Any], values: Any) -> tuple[Any, ...]:
    """`change` of every value; of a list, such as the indices of `index_put`, only if it changes one."""
    return tuple(_in_list(change, value) if isinstance(value, list) else change(value) for value in values)


def _in_list(change: Callable[[Any], Any], values: list[Any]) -> list[Any]:
    changed = [change(value) for value in values]
    return values if all(new is old for new, old in zip(changed, values, strict=True)) else changed


def _widened(value: Any) -> Any:
    if value is torch.float32:
        return torch.float64
    return value.double() if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value


def _narrowed(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.float64 else value


def parse_sizes(name: str) -> ParallelSizes:
    """`dp2cp2ep4` -> dp 2 x cp 2 with 4 expert-parallel ranks; `replicated2`.

    Raises:
        UserError: another name, or expert-parallel ranks that do not divide the processes.
    """
    if copies := re.fullmatch(r"replicated([1-9][0-9]*)", name):
        world = int(copies[1])
        return ParallelSizes(world, replicate=world)
    found = re.findall(r"(dp|cp|ep)([1-9][0-9]*)", name)
    axes = {axis: int(size) for axis, size in found}
    if not found or "".join(axis + size for axis, size in found) != name or len(axes) < len(found):
        raise UserError(
            f"layout {name!r}: wanted replicatedN, or numbers of dp, cp and ep ranks, each once at most, such as dp2ep2"
        )
    dp, cp, ep = (axes.get(axis, 1) for axis in ("dp", "cp", "ep"))
    if dp * cp % ep:
        raise UserError(f"layout {name!r}: {ep} expert-parallel ranks for {dp * cp} processes; wanted a divisor")
    return ParallelSizes(dp * cp, cp=cp, ep=ep)


def check_layouts(names: Iterable[str], *, rows: int, experts: int) -> dict[str, ParallelSizes]:
    """Sizes by name of layouts that can run a batch of some rows on a model with some routed experts.

    Raises:
        UserError: one cannot, its name is none or comes twice.
    """
    layouts: dict[str, ParallelSizes] = {}
    for name in names:
        if name in layouts:
            raise UserError(f"layout {name!r} comes twice; wanted each once")
        layouts[name] = sizes = parse_sizes(name)
        if rows % sizes.dp:
            raise UserError(f"layout {name!r}: {sizes.dp} data-parallel ranks for {rows} rows; wanted a divisor")
        if experts % sizes.ep:
            raise UserError(
                f"layout {name!r}: {sizes.ep} expert-parallel ranks for {experts} experts; wanted a divisor"
            )
    return layouts


def spec(sizes: ParallelSizes, variant: str) -> PolicySpec:
    """Settings of a rank. The chunked head is on in every layout and off in one process."""
    return PolicySpec(
        checkpoint=None,
        hf_config=CONFIG,
        sizes=sizes,
        profile="vllm-hopper",
        fake_quant=dict.fromkeys(SWITCHES, variant.startswith("qat")),
        alignment={} if variant.startswith("qat") else dict.fromkeys(ALIGNMENT, False),
        precision="float32",
        backend=CPU_BACKEND,
        micro_batch_size=4,
        logprob_batch_size=4,
        optimizer={"name": "torch.optim.SGD", "kwargs": {"lr": LEARNING_RATE}},
        max_grad_norm=1.0,
        logprob_chunk_size=None if sizes.world == 1 else 48,
        packing=Packing(512, 512) if variant == "packed" and sizes.world > 1 else None,
    )


def batch() -> dict[str, torch.Tensor]:
    """Ragged rows; the long ones form entries of both compression ratios."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([200, 30, 28, 140, 135, 29, 31, 260])
    width = int(lengths.max())
    inside = torch.arange(width) < lengths.unsqueeze(1)
    return {
        "input_ids": torch.where(inside, torch.randint(3, VOCAB, (ROWS, width), generator=generator), 1),
        "input_lengths": lengths,
        "token_mask": (inside & (torch.arange(width) >= 20)).float(),
        "sample_mask": torch.ones(ROWS),
        "advantages": torch.randn(ROWS, 1, generator=generator).expand(ROWS, width).contiguous(),
    }


def random_weights(shapes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same weights in every process: activations near one, every kind of parameter away from its initial value."""
    weights = {}
    for index, (name, like) in enumerate(sorted(shapes.items())):
        generator = torch.Generator().manual_seed(index)
        if not like.is_floating_point():
            weights[name] = torch.randint(0, CONFIG["n_routed_experts"], like.shape, generator=generator)
        elif "norm" in name or name.endswith("scale"):
            weights[name] = 1.0 + 0.1 * torch.randn(like.shape, generator=generator)
        else:
            weights[name] = torch.randn(like.shape, generator=generator) * like.shape[-1] ** -0.5
    return weights


def run_rank(rank: int, world: int, folder: str, jobs: list[tuple[str, str]]) -> None:
    """One rank: every job in turn; rank 0 writes what it found into `folder`."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous{world}", rank=rank, world_size=world)
    for name, variant in jobs:
        with Float64Arithmetic() if variant == "qat-float64" else contextlib.nullcontext():
            found = step(ParallelSizes(1) if name == "one" else parse_sizes(name), variant, rank)
        if rank == 0:
            torch.save(found, Path(folder) / f"{name}-{variant}.pt")
    if world > 1:
        dist.destroy_process_group()


def step(sizes: ParallelSizes, variant: str, rank: int) -> dict[str, Any]:
    """Score, train once and export on this rank."""
    with contextlib.redirect_stdout(io.StringIO()):
        worker = build_seeded(sizes, variant)
    # Copies: where a rank holds the whole model, the state dict is the live parameters.
    before = {key: value.clone() for key, value in worker.full_state_dict().items()}
    exported = dict(export_weights(before, "vllm-hopper", unquantized=torch.float32))
    share = ROWS // sizes.dp
    data_rank = rank // sizes.cp
    data = {key: value[data_rank * share : (data_rank + 1) * share] for key, value in batch().items()}
    data["generation_logprobs"] = data["prev_logprobs"] = worker.get_logprobs(data)["logprobs"]
    gradients: dict[str, torch.Tensor] = {}

    def keep_gradients(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter_name, parameter in worker.model.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad
                whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                gradients[parameter_name] = whole.clone()

    worker.optimizer.register_step_pre_hook(keep_gradients)
    tokens = batch()["token_mask"][:, 1:].sum().item()
    loss_fn = ClippedPGLoss(LossSettings(reference_policy_kl_penalty=0.0))
    out = worker.train(data, loss_fn, global_valid_seqs=ROWS, global_valid_tokens=tokens)
    after = worker.full_state_dict()
    return {
        "logprobs": gather_rows(data["prev_logprobs"], sizes),
        "loss": float(sum_over_data_ranks(out["loss"], sizes)),
        "grad_norm": out["grad_norm"],
        "gradients": gradients,
        "updates": {key: after[key] - before[key] for key in after if after[key].is_floating_point()},
        "exported": {key: value.view(torch.uint8).clone() for key, value in exported.items() if value.numel()},
    }


def build_seeded(sizes: ParallelSizes, variant: str):
    """A worker whose weights are `random_weights`, whatever the layout.

    They are written as a float32 state before sharding, by the seed of each name.
    """
    from nemo_rl_dsv4.model.build import build_model
    from nemo_rl_dsv4.policy import spec as spec_module

    def build_with_weights(*args: Any, **kwargs: Any):
        model = build_model(*args, **kwargs)
        model.load_state_dict(random_weights(dict(model.state_dict())))
        return model

    original, spec_module.build_model = spec_module.build_model, build_with_weights
    try:
        return build_worker(spec(sizes, variant))
    finally:
        spec_module.build_model = original


def gather_rows(rows: torch.Tensor, sizes: ParallelSizes) -> torch.Tensor:
    """Rows of all data-parallel ranks in order."""
    if sizes.world == 1:
        return rows
    parts = [torch.empty_like(rows) for _ in range(sizes.world)]
    dist.all_gather(parts, rows.contiguous())
    return torch.cat(parts[:: sizes.cp])


def sum_over_data_ranks(value: float, sizes: ParallelSizes) -> float:
    """Sum of one value a data-parallel rank."""
    if sizes.world == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / sizes.cp


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """|found - wanted| / |wanted|; 0 where both are 0."""
    difference, size = float((found - wanted).norm()), float(wanted.norm())
    return difference / size if size else float(difference != 0)


def compare(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, float]:
    """Errors of one layout against one process."""
    gradients = [relative(found["gradients"][name], value) for name, value in wanted["gradients"].items()]
    updates = [relative(found["updates"][name], value) for name, value in wanted["updates"].items()]
    if found["gradients"].keys() != wanted["gradients"].keys():
        raise RuntimeError(f"other gradients: {found['gradients'].keys() ^ wanted['gradients'].keys()}")
    if found["exported"].keys() != wanted["exported"].keys():
        raise RuntimeError(f"other tensors exported: {found['exported'].keys() ^ wanted['exported'].keys()}")
    differing = sum(int((found["exported"][name] != value).sum()) for name, value in wanted["exported"].items())
    return {
        "logprobs_max": float((found["logprobs"] - wanted["logprobs"]).abs().max()),
        "loss": abs(found["loss"] - wanted["loss"]) / abs(wanted["loss"]),
        "grad_norm": abs(found["grad_norm"] - wanted["grad_norm"]) / wanted["grad_norm"],
        "gradient_max": max(gradients),
        "gradient_median": statistics.median(gradients),
        "update_max": max(updates),
        "export_bytes_differing": differing,
        "export_bytes": sum(value.numel() for value in wanted["exported"].values()),
    }


def run(sizes: list[str], variants: list[str]):
    """Yield (size, variant, errors). All worlds are forked from one server that has imported the libraries."""
    automodel_config(CONFIG)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["nemo_rl_dsv4.policy.spec", "nemo_rl_dsv4.grpo.loss", "nemo_rl_dsv4.refit.export"])
    with tempfile.TemporaryDirectory() as folder:
        worlds: dict[int, list[tuple[str, str]]] = {
            1: [("one", variant) for variant in variants if variant != "packed"]
        }
        worlds[1] += [("one", "plain")] if "plain" not in variants and "packed" in variants else []
        for name in sizes:
            worlds.setdefault(parse_sizes(name).world, []).extend((name, variant) for variant in variants)
        for world, jobs in sorted(worlds.items()):
            mp.start_processes(run_rank, args=(world, folder, jobs), nprocs=world, start_method="forkserver")
            if world == 1:
                continue
            for name, variant in jobs:
                reference = "plain" if variant == "packed" else variant
                wanted = torch.load(Path(folder) / f"one-{reference}.pt")
                found = torch.load(Path(folder) / f"{name}-{variant}.pt")
                yield name, variant, compare(found, wanted)


def main() -> int:
    """Print the table, or one JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), help=f"layouts, such as {' '.join(SIZES)}")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=VARIANTS)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for name, sizes in check_layouts(args.sizes, rows=ROWS, experts=CONFIG["n_routed_experts"]).items():
        if sizes.world == 1:
            raise UserError(f"layout {name!r} is one process, with which the others are compared; wanted two or more")
    if not args.json:
        print("| layout | variant | logprobs | loss | grad norm | gradient max / median | update max | export bytes |")
        print("|---|---|---|---|---|---|---|---|")
    for name, variant, errors in run(args.sizes, args.variants):
        if args.json:
            print(json.dumps({"sizes": name, "variant": variant, **errors}), flush=True)
            continue
        cells = [f"{errors[key]:.1e}" for key in ("logprobs_max", "loss", "grad_norm")]
        cells.append(f"{errors['gradient_max']:.1e} / {errors['gradient_median']:.1e}")
        cells.append(f"{errors['update_max']:.1e}")
        cells.append(f"{errors['export_bytes_differing']} of {errors['export_bytes']}")
        print(f"| {' | '.join([name, variant, *cells])} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
