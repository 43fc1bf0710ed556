"""An engine with vLLM's habits around weights, small enough for a CPU.

It fuses wq_a with wkv and a shared expert's w1 with w3, stacks routed experts as `w13_weight` and `w2_weight`, turns
checkpoint tensors into a kernel layout after loading (float grid, the same with blocks quantized anew as vLLM does on
Hopper, packed int32 with four exponents a word, or codes whose rows are shuffled behind an unchanged shape), and its
MoE kernels compute with scale objects of their own. Sinks have no loader, one tensor is derived at load time, and a
hash table is a frozen parameter.

`forward_value` is what it would compute with: a checksum over dequantized weights as the kernels see them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch

from nemo_rl_dsv4.numerics.packing import pack_ue8m0, unpack_ue8m0
from nemo_rl_dsv4.refit.report import Stream
from nemo_rl_dsv4.refit.vllm_layout import Memory, VllmLayout

LayoutName = Literal["float", "requantized", "packed", "shuffled"]
Loader = Callable[..., None]


def parameter(shape: tuple[int, ...], dtype: torch.dtype, loader: Loader | None = None) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
    if loader is not None:
        made.weight_loader = loader  # type: ignore[attr-defined]
    return made


class Leaf(torch.nn.Module):
    """A module that owns one plain tensor."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, leaf: str = "weight") -> None:
        super().__init__()
        setattr(self, leaf, parameter(shape, dtype, lambda p, value: p.data.copy_(value)))


class Block(torch.nn.Module):
    """FP8 linear layer of one or two fused weights: `weight` and `weight_scale_inv`."""

    def __init__(self, rows: list[int], cols: int, layout: LayoutName) -> None:
        super().__init__()
        self.rows, self.cols, self.layout = rows, cols, layout
        self.reset()

    def reset(self) -> None:
        """Register parameters in checkpoint layout."""
        grid = [-(-rows // 128) for rows in self.rows]
        self.weight = parameter((sum(self.rows), self.cols), torch.float8_e4m3fn, self._load(self.rows))
        self.weight_scale_inv = parameter((sum(grid), -(-self.cols // 128)), torch.float32, self._load(grid))

    @staticmethod
    def _load(sizes: list[int]) -> Loader:
        def load(target: torch.nn.Parameter, value: torch.Tensor, shard: int = 0) -> None:
            start = sum(sizes[:shard])
            target.data[start : start + sizes[shard]].copy_(value)

        return load

    def process(self) -> None:
        """Checkpoint layout to kernel layout."""
        if self.layout == "packed":
            spread = self.weight_scale_inv.data.repeat_interleave(128, 0)[: sum(self.rows)]
            self.weight_scale_inv = torch.nn.Parameter(pack_ue8m0(spread), requires_grad=False)
        if self.layout == "requantized" and all(rows % 128 == 0 for rows in self.rows):  # else no grid of blocks
            requantize(self.weight.data, self.weight_scale_inv.data)


def requantize(codes: torch.Tensor, scale: torch.Tensor) -> None:
    """Quantize FP8 blocks [..., rows, cols] anew in place: where no code is above 224 they double."""
    rows, cols = codes.shape[-2:]
    values = codes.float()
    for i in range(scale.shape[-2]):
        for j in range(scale.shape[-1]):
            block = values[..., 128 * i : min(128 * i + 128, rows), 128 * j : min(128 * j + 128, cols)]
            factor = torch.where(block.abs().amax((-2, -1)) <= 224.0, 2.0, 1.0)
            block *= factor[..., None, None]
            scale[..., i, j] /= factor
    codes.copy_(values.to(codes.dtype))


class Kernel:
    """Computes with the scale objects it was made with, as vLLM's modular MoE kernels do."""

    def __init__(self, w13_scale: torch.Tensor, w2_scale: torch.Tensor) -> None:
        self.quant_config = {"w1": w13_scale, "w2": w2_scale}


class Experts(torch.nn.Module):
    """Routed experts of one layer."""

    def __init__(self, experts: int, hidden: int, width: int, layout: LayoutName) -> None:
        super().__init__()
        self.sizes, self.layout = (experts, hidden, width), layout
        self.reset()
        self.kernel: Kernel | None = None

    def reset(self) -> None:
        """Register parameters in checkpoint layout."""
        experts, hidden, width = self.sizes

        def load(target: torch.nn.Parameter, value: torch.Tensor, expert: int, part: str) -> None:
            half = target.shape[1] // 2
            rows = {"w1": slice(0, half), "w3": slice(half, None), "w2": slice(None)}[part]
            target.data[expert, rows].copy_(value)

        grid = (-(-hidden // 128), -(-width // 128))
        self.w13_weight = parameter((experts, 2 * width, hidden), torch.float8_e4m3fn, load)
        self.w13_weight_scale_inv = parameter((experts, 2 * grid[1], grid[0]), torch.float32, load)
        self.w2_weight = parameter((experts, hidden, width), torch.float8_e4m3fn, load)
        self.w2_weight_scale_inv = parameter((experts, *grid), torch.float32, load)

    def process(self) -> None:
        """Checkpoint layout to kernel layout; the kernel is made once, with the scales of that time."""
        for leaf in ("w13_weight", "w2_weight"):
            if self.layout == "packed":
                name = f"{leaf}_scale_inv"
                rows = getattr(self, leaf).shape[1]
                spread = getattr(self, name).data.repeat_interleave(128, 1)[:, :rows]
                setattr(self, name, torch.nn.Parameter(pack_ue8m0(spread), requires_grad=False))
            if self.layout == "requantized":
                requantize(getattr(self, leaf).data, getattr(self, f"{leaf}_scale_inv").data)
            if self.layout == "shuffled":
                setattr(self, leaf, torch.nn.Parameter(shuffle(getattr(self, leaf).data), requires_grad=False))
                getattr(self, leaf).is_shuffled = True
        if self.kernel is None:
            self.kernel = Kernel(self.w13_weight_scale_inv, self.w2_weight_scale_inv)


def shuffle(codes: torch.Tensor) -> torch.Tensor:
    """Another order of rows, same shape and dtype."""
    raw = codes.view(torch.uint8)
    return raw.roll(1, -2).contiguous().view(codes.dtype)


def unshuffle(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8).roll(-1, -2).contiguous().view(codes.dtype)


class FakeEngine:
    """See the module; `load` follows vLLM's layerwise reload, `naive_*` what goes wrong without one.

    Args:
        expected: official name -> shape, of a model with experts whose width is a multiple of 128.
        layout: kernel layout.
    """

    def __init__(self, expected: dict[str, tuple[int, ...]], layout: LayoutName = "float") -> None:
        self.expected, self.layout = expected, layout
        self.model = torch.nn.Module()
        self.processed = 0  # calls of `process`, over all modules
        self.caches_reset = 0
        self.loads = 0
        self._build()
        self._readings = VllmLayout(self.model, expected)

    # --- structure -----------------------------------------------------------------------------------------------

    def _build(self) -> None:
        fused = {"attn.wq_a": "attn.fused_wqa_wkv", "ffn.shared_experts.w1": "ffn.shared_experts.gate_up_proj"}
        partners = {"attn.wq_a": "attn.wkv", "ffn.shared_experts.w1": "ffn.shared_experts.w3"}
        fused |= {f"attn.{c}.wkv": f"attn.{c}.fused_wkv_wgate" for c in ("compressor", "indexer.compressor")}
        partners |= {f"attn.{c}.wkv": f"attn.{c}.wgate" for c in ("compressor", "indexer.compressor")}
        tops = {"embed.weight": "model.embed_tokens", "head.weight": "lm_head", "norm.weight": "model.norm"}
        for name, shape in self.expected.items():
            if name in tops:
                self._put(tops[name], Leaf(shape, torch.bfloat16))
                continue
            if ".experts." in name:
                if name.endswith(".0.w1.weight"):
                    count = sum(n.startswith(name.split("0.w1")[0]) and n.endswith("w1.weight") for n in self.expected)
                    self._put(f"model.{name.split('.0.w1')[0]}", Experts(count, shape[1], shape[0], self.layout))
                continue
            prefix, _, leaf = name.rpartition(".")
            short = prefix.split(".", 2)[2] if prefix.count(".") > 1 else prefix
            if short in partners.values():
                continue
            rows = [shape[0]]
            if short in partners:
                rows.append(self.expected[f"{prefix.removesuffix(short)}{partners[short]}.weight"][0])
            target = "model." + prefix.replace(
                short, fused.get(short, short).replace("shared_experts.w2", "shared_experts.down_proj")
            )
            if short.startswith(("attn.wq", "attn.wkv", "attn.wo", "attn.indexer.wq_b", "ffn.shared_experts")):
                self._put(target, Block(rows, shape[1], self.layout))
            elif leaf == "weight" and len(rows) == 2:
                block = Block(rows, shape[1], "float")
                del block.weight_scale_inv
                block.weight = parameter((sum(rows), shape[1]), torch.bfloat16, block._load(rows))
                self._put(target, block)
            elif leaf == "weight":
                self._put(target, Leaf(shape, torch.bfloat16))
            else:
                self._plain(f"model.{prefix}" if prefix else "model", name, leaf, shape)

    def _plain(self, path: str, name: str, leaf: str, shape: tuple[int, ...]) -> None:
        owner = self._module(path)
        leaf = "e_score_correction_bias" if name.endswith("gate.bias") else leaf
        dtype = torch.int32 if leaf == "tid2eid" else torch.float32
        made = parameter(shape, dtype)
        if leaf != "attn_sink":  # vLLM up to 0.32 writes sinks by a bare copy_
            made.weight_loader = lambda p, value: p.data.copy_(value)  # type: ignore[attr-defined]
        owner.register_parameter(leaf, made)
        if leaf == "hc_attn_fn" and ".0." in name:
            owner.derived = made.data.sum(0)  # type: ignore[assignment]

    def _module(self, path: str) -> torch.nn.Module:
        module = self.model
        for part in path.split("."):
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]  # type: ignore[assignment]
        return module

    def _put(self, path: str, module: torch.nn.Module) -> None:
        parent, _, leaf = path.rpartition(".")
        owner = self._module(parent) if parent else self.model
        old = owner._modules.get(leaf)
        if old is not None:
            for name, child in old.named_children():
                module.add_module(name, child)
            for name, value in old.named_parameters(recurse=False):
                module.register_parameter(name, value)
        owner.add_module(leaf, module)

    def _layers(self) -> list[Any]:
        return [m for m in self.model.modules() if isinstance(m, (Block, Experts)) and hasattr(m, "process")]

    # --- loading -------------------------------------------------------------------------------------------------

    def write(self, name: str, value: torch.Tensor) -> str:
        """Run the loader of one official tensor; return the parameter's name."""
        scale = name.endswith(".scale")
        weight = name.removesuffix(".scale") + ".weight" if scale else name
        from nemo_rl_dsv4.refit.vllm_layout import place_of

        parameters = dict(self.model.named_parameters())
        place = place_of(weight, parameters)
        target = place.parameter + ("_scale_inv" if scale else "")
        live = parameters[target]
        if place.expert is not None:
            live.weight_loader(live, value, place.expert, weight.split(".")[-2])  # type: ignore[attr-defined]
        elif place.fused:
            live.weight_loader(live, value, int(place.second))  # type: ignore[attr-defined]
        else:
            getattr(live, "weight_loader", lambda p, v: p.data.copy_(v))(live, value)
        return target

    def process_all(self) -> None:
        """Kernel layouts of every layer."""
        for layer in self._layers():
            if hasattr(layer, "weight_scale_inv") or isinstance(layer, Experts):
                layer.process()
        self.processed += 1

    def start(self, stream: Stream) -> None:
        """What an engine does with its checkpoint."""
        for name, value in stream:
            self.write(name, value)
        self.process_all()
        self.refresh_derived()

    def load(self, stream: Stream) -> set[str]:
        """vLLM's layerwise reload in short: checkpoint layout anew, load all, process once, copy into old storage."""
        layers = [m for m in self._layers() if hasattr(m, "weight_scale_inv") or isinstance(m, Experts)]
        old = {id(layer): dict(layer._parameters) for layer in layers}
        written = set()
        try:
            for layer in layers:
                layer.reset()
            for name, value in stream:
                written.add(self.write(name, value))
            for layer in layers:
                if isinstance(layer, Experts):
                    layer.kernel = None  # rebuilt with the scales of this reload
            self.process_all()
            for layer in layers:
                for name, tensor in old[id(layer)].items():
                    tensor.data.copy_(getattr(layer, name).data)
        finally:
            for layer in layers:
                layer._parameters.update(old[id(layer)])
            self._readings.forget()
            self.loads += 1
        return written

    # --- LiveEngine ----------------------------------------------------------------------------------------------

    def refresh_derived(self) -> None:
        for module in self.model.modules():
            if isinstance(getattr(module, "derived", None), torch.Tensor):
                module.derived.copy_(module.hc_attn_fn.data.sum(0))  # type: ignore[operator,union-attr]

    def read_back(self, name: str) -> tuple[torch.Tensor, tuple[slice, ...]] | None:
        held = [m for m in self.model.modules() if isinstance(m, Experts) and self.layout == "shuffled"]
        backup = [(m, leaf, getattr(m, leaf).data) for m in held for leaf in ("w13_weight", "w2_weight")]
        for module, leaf, data in backup:
            getattr(module, leaf).data = unshuffle(data)
        try:
            return self._readings.read_back(name)
        finally:
            for module, leaf, data in backup:
                getattr(module, leaf).data = data

    def memory(self, name: str) -> Memory | None:
        return self._readings.memory(name)

    def derived(self) -> list[torch.Tensor]:
        held = (getattr(module, "derived", None) for module in self.model.modules())
        return [tensor for tensor in held if isinstance(tensor, torch.Tensor)]

    def scales(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._readings.scales()

    def reset_caches(self) -> None:
        self.caches_reset += 1

    # --- what it computes with -----------------------------------------------------------------------------------

    def kernel_values(self) -> dict[str, torch.Tensor]:
        """Dequantized experts with the scale objects of the kernels, and everything else as registered."""
        values = {}
        for name, module in self.model.named_modules():
            if isinstance(module, Experts):
                assert module.kernel is not None
                for leaf, scale in zip(("w13_weight", "w2_weight"), module.kernel.quant_config.values(), strict=True):
                    codes = getattr(module, leaf).data
                    codes = unshuffle(codes) if self.layout == "shuffled" else codes
                    if scale.dtype == torch.int32:
                        spread = unpack_ue8m0(scale.data, -(-codes.shape[2] // 128))
                    else:
                        spread = scale.data.repeat_interleave(128, 1)[:, : codes.shape[1]]
                    spread = spread.repeat_interleave(128, 2)[:, :, : codes.shape[2]]
                    values[f"{name}.{leaf}"] = codes.float() * spread
            elif isinstance(getattr(module, "derived", None), torch.Tensor):
                values[f"{name}.derived"] = module.derived.clone()  # type: ignore[operator,union-attr]
        for name, tensor in self.model.named_parameters():
            if ".experts." not in name:
                values[name] = tensor.data.clone()
        return values
