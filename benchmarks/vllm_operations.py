"""Every operation of a layer against vLLM's own: which ones the trainer computes to the same bits. One Hopper GPU.

    python benchmarks/vllm_operations.py engine CHECKPOINT FILE [--prompts 8 --tokens 60] [--layers 0 1]
    python benchmarks/vllm_operations.py trainer CHECKPOINT FILE [--train-mode fp8] [--float32-products]

CHECKPOINT is an FP8 checkpoint with 128x128 blocks, such as DIR/v0 of `vllm_refit.py make DIR`. `engine` runs in vLLM's
environment (0.26.0): an engine prefills some random prompts in one batch; what goes into and comes out of the
operations of its layers is kept in FILE, and each operation is computed again *from the engine's own input* with this
package's roundings. Where an operation has a product of quantized operands, `dequantized` multiplies their BF16 values
(`train_mode: qat`) and `fp8` the codes (`train_mode: fp8`). Attention is compared on layers without compression, where
every key is in the window; `hyper_connections.py` has the operations between layers.

`trainer` runs in the trainer's environment: the whole model on the same tokens, every operation on what the one before
it made, so that a difference shows where it starts and how it grows.

Columns are the share of values that differ and the relative error.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from arguments import at_least
from attention_weights import causal, rounded, scores_of, unrounded

from nemo_rl_dsv4.cli.guard import guarded
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.fp8_gemm import scaled_linear
from nemo_rl_dsv4.model.hf_config import read_config
from nemo_rl_dsv4.model.weight_rounding import QuantizedWeight
from nemo_rl_dsv4.numerics import QuantSpec, fake_quant, get_profile
from nemo_rl_dsv4.numerics.rotary import inverse_rope_fake_quant
from nemo_rl_dsv4.numerics.swiglu import swiglu_fake_quant

HOPPER = get_profile("vllm-hopper")
SHARED_STEPS = ("clamp", "silu", "product")


def site(name: str) -> QuantSpec:
    """The format of a site that the profile rounds."""
    spec = HOPPER.site(name)
    assert spec is not None, name
    return spec


class Row(NamedTuple):
    """One comparison: what the engine made, and what this package makes of the same input."""

    operation: str
    way: str
    engine: Tensor
    ours: Tensor


class Weights:
    """FP8 weights of a checkpoint, read one at a time onto the GPU.

    Args:
        folder: with `*.safetensors`.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._files = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                opened = safe_open(path, framework="pt", device="cuda")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path}: cannot be read as safetensors ({error}); fetch it again") from error
            self._files.update(dict.fromkeys(opened.keys(), opened))
        if not self._files:
            raise UserError(
                f"{folder}: no *.safetensors; wanted an FP8 checkpoint, such as DIR/v0 of vllm_refit.py make"
            )

    def tensor(self, name: str) -> Tensor:
        """A tensor as it is stored."""
        if name not in self._files:
            raise UserError(f"the checkpoint has no {name}; it has {sorted(self._files)[:3]} and so on")
        return self._files[name].get_tensor(name)

    def fp8(self, *names: str) -> QuantizedWeight:
        """Codes and scales of one matrix, or of several below each other."""
        data = torch.cat([self.tensor(f"{name}.weight") for name in names])
        scale = torch.cat([self.tensor(f"{name}.scale").float() for name in names])
        return QuantizedWeight(data, scale, site("linear.weight"))


def product(x: Tensor, weight: QuantizedWeight, spec: QuantSpec, way: str, groups: int = 1) -> Tensor:
    """Round `x` and multiply: BF16 [M, N], or [M, G, N/G] of [M, G, K]."""
    values = weight.values(torch.bfloat16)
    if way == "fp8":
        return scaled_linear(x, values, weight, spec, groups=groups)
    rounded = fake_quant(x, spec)
    if groups == 1:
        return F.linear(rounded, values)
    return torch.einsum("mgk,gnk->mgn", rounded, values.view(groups, -1, values.shape[1]))


def normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm in float32, float32 result."""
    x = x.float()
    scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return scaled if weight is None else scaled * weight.float()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """float32 [T, H, D] whose last 2P channels are turned forward by the angles [T, P] of interleaved pairs."""
    return inverse_rope_fake_quant(x.float(), cos, -sin, None)[:, 0].view(x.shape)


def bounds(positions: Tensor) -> Iterator[slice]:
    """The sequences of a flat batch."""
    starts = [*torch.nonzero(positions == 0).flatten().tolist(), len(positions)]
    yield from (slice(*pair) for pair in pairwise(starts))


def attention(query: Tensor, keys: Tensor, positions: Tensor, sinks: Tensor, weights_in_bf16: bool) -> Tensor:
    """Window attention of a flat batch: [T, H, D] BF16."""
    attend, parts = rounded if weights_in_bf16 else unrounded, []
    for part in bounds(positions):
        q, k = query[part], keys[part]
        out = attend(scores_of(q, k), k, causal(len(k), str(k.device)), sinks.float())
        parts.append(out[0].transpose(0, 1).bfloat16())
    return torch.cat(parts)


def expert(x: Tensor, up_down: list[QuantizedWeight], steps: tuple[str, ...], limit: float, way: str) -> Tensor:
    """SwiGLU of one expert, BF16; the weights are w1, w3, w2."""
    gate, up = (product(x, weight, site("expert.input"), way) for weight in up_down[:2])
    hidden = swiglu_fake_quant(gate, up, None, limit=limit, bf16_steps=steps)
    return product(hidden, up_down[2], site("expert.hidden"), way)


def routed(
    x: Tensor, experts: Tensor, weights: Tensor, load: Callable[[str], list[QuantizedWeight]], limit: float, way: str
) -> Tensor:
    """Sum over a token's experts in float32, in the order of its slots; BF16 [T, K]."""
    outs = torch.zeros(*experts.shape, x.shape[1], device=x.device)
    for number in experts.unique().tolist():
        token, slot = torch.nonzero(experts == number, as_tuple=True)
        outs[token, slot] = expert(x[token], load(f"experts.{number}"), HOPPER.hidden_bf16_steps, limit, way).float()
    total = torch.zeros_like(outs[:, 0])
    for slot in range(experts.shape[1]):
        total = total + outs[:, slot] * weights[:, slot, None]
    return total.bfloat16()


def route(logits: Tensor, moe: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """A router's experts int64 [T, K] and float32 weights, from its logits."""
    scores = F.softplus(logits.float()).sqrt()
    if moe.gate.tid2eid is not None:
        chosen = moe.gate.tid2eid[ids].long()
    else:
        chosen = (scores + moe.gate.e_score_correction_bias).topk(moe.n_activated_experts, dim=-1).indices
    weights = scores.gather(1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True) * moe.routed_scaling_factor


def capture(engine: Any, prompts: list[list[int]]) -> tuple[list[Any], list[dict[str, Tensor]], dict[str, Tensor]]:
    """The engine's layers, what each made of one batch with all prompts, and what came after the last."""
    from vllm import SamplingParams

    tokens = sum(map(len, prompts))
    inner = engine.apply_model(lambda model: model.model)[0]
    layers: list[Any] = list(inner.layers)
    kept: list[dict[str, Tensor]] = [{} for _ in range(len(layers) + 1)]
    handles = []

    def keep(number: int, name: str, value: Any) -> None:
        value = value[0] if isinstance(value, tuple) else value
        if isinstance(value, Tensor) and len(value) == tokens and name not in kept[number]:
            kept[number][name] = value.detach().clone()

    def watch(number: int, name: str, module: Any) -> None:
        def before(module: Any, args: Any, kwargs: Any) -> None:
            keep(number, f"{name}.in", [*args, *kwargs.values()][0])

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(module.register_forward_hook(lambda module, args, out: keep(number, f"{name}.out", out)))

    for number, layer in enumerate(layers):
        attn, ffn = layer.attn, layer.ffn
        for name in ("fused_wqa_wkv", "wq_b", "wo_b"):
            watch(number, name, getattr(attn, name))
        watch(number, "ffn", ffn)
        watch(number, "shared", ffn.shared_experts)
        watch(number, "gate", ffn.gate)

        def insert(q: Tensor, kv: Tensor, positions: Tensor, *rest: Any, n: int = number, old: Any = None) -> Any:
            keep(n, "kv", kv)
            keep(n, "positions", positions)
            found = old(q, kv, positions, *rest)
            keep(n, "query", found)
            return found

        def attend(
            q: Tensor, kv: Tensor, positions: Tensor, output: Tensor, *, n: int = number, old: Any = None
        ) -> Any:
            found = old(q, kv, positions, output)
            keep(n, "attention", output)
            return found

        attn._fused_qnorm_rope_kv_insert = _with(insert, attn._fused_qnorm_rope_kv_insert)
        attn.forward_mqa = _with(attend, attn.forward_mqa)
    watch(len(layers), "norm", inner.norm)
    requests: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
    engine.generate(
        requests, SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=1.0, detokenize=False), use_tqdm=False
    )
    for handle in handles:
        handle.remove()
    if "positions" not in kept[0]:
        raise UserError(f"the engine never ran all {tokens} tokens in one batch; wanted fewer prompts or tokens")
    for layer, found in zip(layers, kept, strict=False):
        found["table"] = layer.attn.rotary_emb.cos_sin_cache[found["positions"]].float()
    return layers, kept[:-1], kept[-1]


def _with(function: Any, old: Any) -> Any:
    return lambda *args, **kwargs: function(*args, old=old, **kwargs)


def rows_of(number: int, layer: Any, kept: dict[str, Tensor], weights: Weights, ids: Tensor, limit: float) -> list[Row]:
    """The comparisons of one layer."""
    attn, moe, name = layer.attn, layer.ffn, f"layers.{number}"
    positions, rows = kept["positions"], []
    cos, sin = (part.contiguous() for part in kept["table"].chunk(2, dim=-1))
    ranks = (attn.q_lora_rank, attn.head_dim)
    linear, eps = site("linear.input"), attn.eps

    weight = weights.fp8(f"{name}.attn.wq_a", f"{name}.attn.wkv")
    for way in ("dequantized", "fp8"):
        ours = product(kept["fused_wqa_wkv.in"], weight, linear, way)
        rows.append(Row("wq_a and wkv", way, kept["fused_wqa_wkv.out"], ours))
    latent, raw = kept["fused_wqa_wkv.out"].split(ranks, dim=-1)
    rows.append(Row("query norm", "float32", kept["wq_b.in"], normed(latent, attn.q_norm.weight, eps).bfloat16()))
    rows.append(Row("KV norm", "float32", kept["kv"], normed(raw, attn.kv_norm.weight, eps).bfloat16()))
    for way in ("dequantized", "fp8"):
        ours = product(kept["wq_b.in"], weights.fp8(f"{name}.attn.wq_b"), linear, way)
        rows.append(Row("wq_b", way, kept["wq_b.out"], ours))
    heads = kept["wq_b.out"].view(len(positions), attn.n_heads, attn.head_dim)
    query = kept["query"][:, : attn.n_heads]
    rows.append(Row("norm and RoPE of heads", "float32", query, turned(normed(heads, None, eps), cos, sin).bfloat16()))
    out = kept["attention"][:, : attn.n_heads]
    if attn.compress_ratio <= 1:
        keys = fake_quant(turned(kept["kv"][:, None], cos, sin)[:, 0].bfloat16(), site("kv.swa"))
        sinks = attn.attn_sink[: attn.n_heads]
        for in_bf16, way in ((True, "BF16 weights"), (False, "float32 weights")):
            rows.append(Row("attention", way, out, attention(query, keys, positions, sinks, in_bf16)))
    groups = attn.n_groups
    undone = inverse_rope_fake_quant(out.contiguous(), cos, sin, site("o_proj.input"), n_groups=groups)
    for way in ("dequantized", "fp8"):
        ours = product(undone, weights.fp8(f"{name}.attn.wo_a"), site("o_proj.input"), way, groups).flatten(1)
        rows.append(Row("inverse RoPE and wo_a", way, kept["wo_b.in"], ours))
    for way in ("dequantized", "fp8"):
        ours = product(kept["wo_b.in"], weights.fp8(f"{name}.attn.wo_b"), linear, way)
        rows.append(Row("wo_b", way, kept["wo_b.out"], ours))

    x = kept["ffn.in"]
    gate = weights.tensor(f"{name}.ffn.gate.weight")
    logits = torch.mm(x, gate.t(), out_dtype=torch.float32)
    if "gate.out" in kept:
        rows.append(Row("router logits", "float32", kept["gate.out"], logits))
        logits = kept["gate.out"]
    chosen, mix = route(logits, moe, ids)

    def load(which: str) -> list[QuantizedWeight]:
        return [weights.fp8(f"{name}.ffn.{which}.{part}") for part in ("w1", "w3", "w2")]

    for way in ("dequantized", "fp8"):
        shared = expert(x, load("shared_experts"), SHARED_STEPS, limit, way)
        if "shared.out" in kept:
            rows.append(Row("shared expert", way, kept["shared.out"], shared))
        rows.append(Row("experts and shared", way, kept["ffn.out"], shared + routed(x, chosen, mix, load, limit, way)))
    return rows


def show(number: int, rows: list[Row]) -> None:
    """Print a layer's comparisons."""
    for row in rows:
        differing = float((row.engine != row.ours).double().mean())
        error = float((row.engine.double() - row.ours.double()).norm() / row.engine.double().norm())
        print(f"{number:5}  {row.operation:24} {row.way:16} {differing:9.2e} {error:9.2e}", flush=True)


def trainer_values(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """What a trainer's layers make of `ids` [B, S], under the names of `capture`, tokens flattened."""
    kept: dict[str, Tensor] = {}

    def keep(name: str, value: Any) -> None:
        value = value[0] if isinstance(value, tuple) else value
        kept[name] = value.detach().flatten(0, 1) if value.shape[:2] == ids.shape else value.detach()

    def watch(module: Any, before: str = "", after: str = "") -> None:
        if before:
            module.register_forward_pre_hook(lambda module, args: keep(before, args[0]))
        if after:
            module.register_forward_hook(lambda module, args, out: keep(after, out))

    for number, layer in model.model.layers.items():
        name, attn = f"{number}.", layer.self_attn
        watch(layer.input_layernorm, after=f"{name}attention input")
        watch(attn.wq_a, after=f"{name}wq_a")
        watch(attn.wkv, after=f"{name}wkv")
        watch(attn.q_norm, after=f"{name}query norm")
        watch(attn.wq_b, after=f"{name}wq_b")
        watch(attn.wo_a, before=f"{name}attention")
        watch(attn.wo_b, before=f"{name}wo_a", after=f"{name}wo_b")
        watch(layer.post_attention_layernorm, after=f"{name}expert input")
        watch(layer.mlp.shared_experts, after=f"{name}shared expert")
        watch(layer.mlp, after=f"{name}experts and shared")
    watch(model.model.norm, before="norm input", after="norm")
    model(ids)
    for module in model.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return kept


def engine_values(kept: dict[str, Tensor], number: int, rank: int) -> dict[str, Tensor]:
    """What the engine's layer made, under the names of `trainer_values`."""
    names = {
        "attention input": "fused_wqa_wkv.in",
        "query norm": "wq_b.in",
        "wq_b": "wq_b.out",
        "attention": "attention",
        "wo_a": "wo_b.in",
        "wo_b": "wo_b.out",
        "expert input": "ffn.in",
        "shared expert": "shared.out",
        "experts and shared": "ffn.out",
    }
    found = {f"{number}.{name}": kept[key].flatten(1) for name, key in names.items() if key in kept}
    latent, raw = kept["fused_wqa_wkv.out"].tensor_split([rank], dim=-1)
    return {**found, f"{number}.wq_a": latent, f"{number}.wkv": raw}


def read_captured(path: Path, config: str, device: str = "cuda") -> dict[str, Any]:
    """What `engine` kept of a checkpoint whose config.json is `config`.

    Raises:
        UserError: another file, or of another checkpoint.
    """
    try:
        saved = torch.load(path, map_location=device)
    except Exception as error:  # torch.load has no errors of its own: text alone ends in an IndexError
        raise UserError(
            f"{path} is no file that `engine` wrote ({type(error).__name__}); run `engine` again"
        ) from error
    wanted = {"config", "ids", "prompts", "layers", "norm.in", "norm.out"}
    if not isinstance(saved, dict) or not wanted <= saved.keys():
        raise UserError(f"{path} is no file that `engine` wrote: it lacks some of {sorted(wanted)}; run `engine` again")
    if saved["config"] != config:
        raise UserError(f"{path} was written for a checkpoint with another config.json; run `engine` with this one")
    return saved


def compare_trainer(options: argparse.Namespace) -> int:
    """Run the trainer on the engine's tokens and compare in order of computation."""
    from nemo_rl_dsv4.mismatch.run import Model, build_trainer
    from nemo_rl_dsv4.mismatch.trainers import Trainer
    from nemo_rl_dsv4.model.qat import SWITCHES
    from nemo_rl_dsv4.model.release_checkpoint import read_release_checkpoint
    from nemo_rl_dsv4.numerics import products

    products.SPLIT = options.split or products.SPLIT
    text = (options.checkpoint / "config.json").read_text(encoding="utf-8")
    saved, config = read_captured(options.file, text), json.loads(text)
    ids = saved["ids"].view(saved["prompts"], -1)
    backend = {
        "attn": "sdpa",
        "experts": "torch_mm",
        "linear": "torch",
        "rms_norm": "torch_fp32",
        "dispatcher": "torch",
    }
    model = Model(
        config, read_release_checkpoint(options.checkpoint), "vllm-hopper", "bfloat16", backend, len(ids), "cuda"
    )
    rounding = dict.fromkeys(SWITCHES, True)
    worker = build_trainer(model, Trainer("all", "reference point", rounding, fp8=options.train_mode == "fp8"))
    with products.without_tensor_cores() if options.float32_products else contextlib.nullcontext():
        ours = trainer_values(worker.model, ids)
    table = worker.model.model.rotary_emb(ids, torch.arange(ids.shape[1], device="cuda")[None])
    half = saved["layers"][0]["table"].shape[-1] // 2
    theirs = {
        "cos": saved["layers"][0]["table"][: ids.shape[1], :half],
        "sin": saved["layers"][0]["table"][: ids.shape[1], half:],
    }
    ours |= {name: part[0, :, :half].float() for name, part in zip(("cos", "sin"), table, strict=True)}
    for number, kept in enumerate(saved["layers"]):
        theirs |= engine_values(kept, number, config["q_lora_rank"])
    theirs |= {"norm input": saved["norm.in"], "norm": saved["norm.out"]}
    print(
        f"{ids.numel()} tokens in {len(ids)} prompts, train_mode {options.train_mode}; {torch.cuda.get_device_name()}"
    )
    print(f"{'layer and operation':30} {'differing':>9} {'rel. error':>9}")
    for name, engine in theirs.items():
        found = ours[name].reshape(engine.shape).to(engine.dtype)
        differing = float((engine != found).double().mean())
        error = float((engine.double() - found.double()).norm() / engine.double().norm())
        print(f"{name:30} {differing:9.2e} {error:9.2e}", flush=True)
    return 0


def compare_engine(options: argparse.Namespace) -> int:
    """Capture one prefill, keep it, and compare it operation by operation."""
    import vllm_refit

    for key, value in {**vllm_refit.ENVIRONMENT, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}.items():
        os.environ.setdefault(key, value)
    engine = vllm_refit.start_engine(options.checkpoint)
    config = engine.llm_engine.vllm_config.model_config.hf_config
    generator = torch.Generator().manual_seed(11)
    prompts = torch.randint(2, config.vocab_size, (options.prompts, options.tokens), generator=generator).tolist()
    layers, kept, norm = capture(engine, prompts)
    ids = torch.tensor([token for prompt in prompts for token in prompt], device="cuda")
    text = (options.checkpoint / "config.json").read_text(encoding="utf-8")
    torch.save({"config": text, "ids": ids, "prompts": options.prompts, "layers": kept, **norm}, options.file)
    weights = Weights(options.checkpoint)
    limit = float(config.swiglu_limit or torch.inf)
    print(f"{len(ids)} tokens in {options.prompts} prompts; {torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'layer':5}  {'operation':24} {'way':16} {'differing':>9} {'rel. error':>9}")
    for number in options.layers or range(len(layers)):
        show(number, rows_of(number, layers[number], kept[number], weights, ids, limit))
    return 0


def read_options() -> argparse.Namespace:
    """Options of the command line, of which this machine can do what they ask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=("engine", "trainer"))
    parser.add_argument("checkpoint", type=Path, help="folder of an FP8 checkpoint")
    parser.add_argument("file", type=Path, help="what the engine made; `engine` writes it")
    parser.add_argument("--prompts", type=at_least(1), default=8)
    parser.add_argument("--tokens", type=at_least(2), default=60, help="length of each prompt")
    parser.add_argument("--layers", type=at_least(0), nargs="+", help="default: all")
    parser.add_argument("--train-mode", choices=("qat", "fp8"), default="fp8", help="of `trainer`")
    parser.add_argument(
        "--float32-products", action="store_true", help="`trainer`: no tensor cores where sums are float32"
    )
    parser.add_argument(
        "--split", type=at_least(1), help="`trainer`: columns of a TF32 sum of its own (products.SPLIT)"
    )
    options = parser.parse_args()
    if not (options.checkpoint / "config.json").is_file():
        parser.error(f"{options.checkpoint}: no config.json; wanted the folder of a checkpoint")
    layers = read_config(options.checkpoint, for_training=options.phase == "trainer")["num_hidden_layers"]
    beyond = [number for number in options.layers or () if number >= layers]
    if beyond:
        parser.error(f"--layers {beyond[0]}: the checkpoint has layers 0 to {layers - 1}")
    if options.split and options.split % 64:
        parser.error(f"--split {options.split}: wanted a multiple of 64")
    if options.phase == "engine" and (options.file.is_dir() or not options.file.resolve().parent.is_dir()):
        parser.error(f"{options.file}: wanted a file in a folder that exists; make the folder first")
    if options.phase == "trainer" and not options.file.is_file():
        parser.error(f"{options.file}: no such file; `engine` writes it")
    if options.phase == "engine" and importlib.util.find_spec("vllm") is None:
        parser.error("no vllm in this environment; wanted vLLM 0.26.0, start this with that one's interpreter")
    if not torch.cuda.is_available():
        parser.error("torch sees 0 GPUs here; wanted a Hopper GPU")
    if torch.version.hip is not None or torch.cuda.get_device_capability()[0] != 9:
        parser.error(f"{torch.cuda.get_device_name()}: wanted a Hopper GPU")
    return options


@torch.no_grad()
def main() -> int:
    """Run one phase."""
    options = read_options()
    return compare_engine(options) if options.phase == "engine" else compare_trainer(options)


if __name__ == "__main__":
    sys.exit(guarded(main, lower="lower --prompts or --tokens"))
