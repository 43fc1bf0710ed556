"""Refit a real vLLM engine twice and compare its log-probabilities with a fresh engine's, on one or more Hopper GPUs.

    python benchmarks/vllm_refit.py make DIR            weights of three versions; FP8 checkpoints DIR/v0 and DIR/v2
    python benchmarks/vllm_refit.py refit DIR           engine on v0, refits to v1 and v2, then the injected fault
    python benchmarks/vllm_refit.py fresh DIR           engine on v2, the same requests
    python benchmarks/vllm_refit.py compare DIR         exit status 0 only if every number is equal

Each phase is a process of its own, with vLLM 0.26.0 on the path for `refit` and `fresh` (AutoModel and transformers'
DeepSeek-V4 are not needed). `refit --sleep` puts the engine to sleep (level 2) before the second refit. `--direct`
refits four times (versions 1, 2, 1, 2), the last two straight into the kernels' memory.

    python benchmarks/vllm_refit.py refit DIR --tensor-parallel 2 --transport folder ipc broadcast --ranks 2
    python benchmarks/vllm_refit.py fresh DIR --tensor-parallel 2

With `--ranks` the weights come from training ranks with shards of them (`refit_ranks.py`), over each transport in turn:
refits to versions 1 and 2, then one that breaks (a NaN on one rank), which must leave version 2 in every worker.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from refit_ranks import Ranks, processes, sender_of
from vllm_refit_arguments import check_phase, read_options

from nemo_rl_dsv4.cli.guard import guarded
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.checkpoint_format import AUTOMODEL
from nemo_rl_dsv4.model.official_names import expected_tensors, tensor_kind
from nemo_rl_dsv4.refit import export_weights
from nemo_rl_dsv4.refit.transport.file import write_folder
from nemo_rl_dsv4.refit.worker_calls import call_workers

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "vocab_size": 4096,
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 512,
    "o_lora_rank": 256,
    "o_groups": 8,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "max_position_embeddings": 65536,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "compress_ratios": [0, 0, 4, 128, 4, 128],
    "sliding_window": 128,
    "num_hash_layers": 1,
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "expert_dtype": "fp8",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0",
    },
}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_DEEP_GEMM": "1",
    "VLLM_USE_DEEP_GEMM_E8M0": "1",
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
BUCKET_BYTES = 64 << 20
EXTENSION = "nemo_rl_dsv4.refit.vllm_extension.RefitWorkerExtension"


def hash_table(shape: torch.Size | tuple[int, ...], experts: int, generator: torch.Generator) -> torch.Tensor:
    """Random int64 [vocabulary, top_k] on the generator's device; a token's experts differ, as a router's do."""
    drawn = torch.rand(shape[0], experts, generator=generator, device=generator.device)
    return drawn.argsort(dim=1)[:, : shape[1]]


def training_weights(version: int) -> dict[str, torch.Tensor]:
    """BF16 weights under AutoModel's names; each version changes every tensor but the hash tables."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(version)
    base = torch.Generator(device).manual_seed(1000)
    state: dict[str, torch.Tensor] = {}
    for name, shape in expected_tensors(CONFIG).items():
        kind, slot = tensor_kind(name), AUTOMODEL.slot(name)
        if kind == "integer":
            value = hash_table(shape, CONFIG["n_routed_experts"], base)
        else:
            value = torch.randn(shape, generator=generator, device=device)
            if "norm" in name or name.endswith("_scale"):
                value = 1.0 + 0.1 * value
            elif name.endswith(("ape", "_base", "bias")):
                value = 0.1 * value
            elif "attn_sink" not in name:
                value = value * shape[-1] ** -0.5
            value = value if kind == "fp32" else value.bfloat16()
        if slot.expert is None:
            state[slot.key] = value
            continue
        if slot.key not in state:
            stack = AUTOMODEL.stack_shape(shape, slot, CONFIG["n_routed_experts"])
            state[slot.key] = torch.empty(stack, dtype=value.dtype, device=device)
        AUTOMODEL.view(state[slot.key], slot).copy_(value)
    return state


def make(folder: Path) -> None:
    """Write checkpoints of versions 0 and 2, and the buckets of versions 1 to 3.

    Raises:
        UserError: the folder cannot be written.
    """
    from safetensors.torch import save_file

    try:
        for name in ("v0", "v2", "buckets1", "buckets2", "buckets3"):
            (folder / name).mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder / name).close()
    except OSError as error:
        raise UserError(f"{folder}: `make` cannot write there ({error.strerror}); give another folder") from error
    for version in (0, 1, 2, 3):
        state = training_weights(version)
        if version in (0, 2):
            target = folder / f"v{version}"
            stream = {name: tensor.cpu().contiguous() for name, tensor in export_weights(state, "vllm-hopper")}
            save_file(stream, target / "model.safetensors", metadata={"format": "pt"})
            (target / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
        if version > 0:
            count = write_folder(
                export_weights(state, "vllm-hopper"),
                folder / f"buckets{version}",
                capacity_bytes=BUCKET_BYTES,
                version=version,
            )
            print(f"version {version}: {count} buckets")


def start_engine(
    checkpoint: Path, *, sleep_mode: bool = False, extension: bool = False, tensor_parallel: int = 1
) -> Any:
    """A vLLM engine driven by this process."""
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    from vllm import LLM

    # A KV pool of a stated size: nothing is measured while other processes take memory on the same GPU.
    arguments: dict[str, Any] = {"gpu_memory_utilization": 0.08, "kv_cache_memory_bytes": 4 << 30}
    if tensor_parallel > 1:
        arguments |= {
            "tensor_parallel_size": tensor_parallel,
            "distributed_executor_backend": "mp",
            "disable_custom_all_reduce": True,
            "gpu_memory_utilization": 0.2,
        }
    return LLM(
        model=str(checkpoint),
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_cache_dtype="fp8",
        block_size=256,
        max_model_len=2048,
        max_num_seqs=32,
        disable_log_stats=True,
        enable_prefix_caching=False,
        enable_sleep_mode=sleep_mode,
        **({"worker_extension_cls": EXTENSION} if extension else {}),
        **arguments,
    )


def logprobs(engine: Any) -> dict[str, torch.Tensor]:
    """Prompt log-probabilities of 16 fixed sequences, and 32 sampled tokens with theirs for each."""
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(16, 700, (16,), generator=generator).tolist()
    prompts = [torch.randint(2, CONFIG["vocab_size"], (n,), generator=generator).tolist() for n in lengths]
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    scored = engine.generate(
        requests, SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=1.0, detokenize=False), use_tqdm=False
    )
    prompt = [
        out.prompt_logprobs[i][tokens[i]].logprob
        for out, tokens in zip(scored, prompts, strict=True)
        for i in range(1, len(tokens))
    ]
    sampling = SamplingParams(
        max_tokens=32, min_tokens=32, ignore_eos=True, temperature=1.0, logprobs=0, detokenize=False, seed=5
    )
    sampled = engine.generate(requests, sampling, use_tqdm=False)
    tokens = [token for out in sampled for token in out.outputs[0].token_ids]
    values = [
        step[token].logprob
        for out in sampled
        for step, token in zip(out.outputs[0].logprobs, out.outputs[0].token_ids, strict=True)
    ]
    return {
        "prompt": torch.tensor(prompt, dtype=torch.float64),
        "tokens": torch.tensor(tokens),
        "sampled": torch.tensor(values, dtype=torch.float64),
    }


def refit(folder: Path, *, sleep: bool, direct: bool = False) -> int:
    """Two refits with every weight compared, then one that leaves kernel references as the reload left them.

    With `direct` two more instead of that, which must not go through the loaders.
    """
    engine = start_engine(folder / "v0", sleep_mode=sleep, extension=True)
    print("prepared:", call_workers(engine, "dsv4_refit_prepare", "all", direct))
    results = {"v0": logprobs(engine)}
    bad, notes = 0, []
    for number, version in enumerate((1, 2, 1, 2) if direct else (1, 2)):
        if sleep and version == 2:
            engine.sleep(level=2)
            engine.wake_up(tags=["weights"])
        free = torch.cuda.mem_get_info()[0]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        started = time.perf_counter()
        report = call_workers(engine, "dsv4_refit_from_folder", str(folder / f"buckets{version}"))[0]
        seconds = time.perf_counter() - started
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        kept = (free - torch.cuda.mem_get_info()[0]) / 2**20
        if sleep and version == 2:
            engine.wake_up(tags=["kv_cache"])
        engine.reset_prefix_cache()
        shown = {key: report[key] for key in ("version", "tensors", "quantized", "bytes", "checksum", "phases")}
        print(f"refit {version}: {seconds:.2f} s, peak +{peak:.0f} MiB, kept {kept:.0f} MiB, {shown}")
        print(f"refit {version}: {len(report['findings'])} findings {report['findings'][:5]} {report['notes']}")
        bad += len(report["findings"])
        notes += report["notes"]
        bad += direct and number == 1 and not any("straight into" in note for note in notes)
        results[f"v{version}"] = logprobs(engine)
    torch.save(results, folder / "refit.pt")
    if direct:
        return 1 if bad else 0
    report = call_workers(engine, "dsv4_refit_from_folder", str(folder / "buckets3"), skip_repointing=True)[0]
    stale = [finding for finding in report["findings"] if "stale" in finding]
    print(f"re-pointing skipped: {len(stale)} stale references found, first {stale[:2]}")
    report = call_workers(engine, "dsv4_refit_from_folder", str(folder / "buckets2"))[0]
    print(f"refit after the fault: {len(report['findings'])} findings {report['findings'][:5]}")
    again = logprobs(engine)
    print("version 2 once more: equal", all(torch.equal(again[key], results["v2"][key]) for key in again))
    return 1 if bad or not stale or report["findings"] else 0


class Served:
    """An engine whose weights come from training ranks over one transport.

    Args:
        engine: `LLM`, or anything that `call_workers` can call.
        ranks: the training ranks.
        transport: `folder`, `ipc` or `broadcast`.
        workers: number of the engine's workers.
        scratch: folder for buckets.
    """

    def __init__(self, engine: Any, ranks: Ranks, transport: str, workers: int, scratch: Path) -> None:
        self.engine, self.ranks, self.transport, self.scratch = engine, ranks, transport, scratch
        if transport == "folder":
            return
        offers = ranks.call("offer", transport, workers)
        if transport == "ipc":
            self.addresses = {offer[0]: offer[1:] for offer in offers if offer}
            return
        served = [sender_of(worker, len(offers), transport) for worker in range(workers)]
        places = [
            (*offers[rank][:2], 1 + served[:worker].count(rank), offers[rank][2]) for worker, rank in enumerate(served)
        ]
        for link, offer in zip(ranks.links, offers, strict=True):
            link.send(("connect", (offer[2],), {}))
        call_workers(engine, "dsv4_refit_join", places, timeout=60.0)
        ranks.finish("connect")

    def refit(self, version: int) -> tuple[list[Any], list[Any]]:
        """Send what the ranks hold as a version; reports of the ranks and of the workers.

        Raises:
            UserError: it broke; every process has given it up.
        """
        where = str(self.scratch / "sent")
        self.ranks.start("send", self.transport, version, where)
        errors: list[Exception] = []
        sent: list[Any] = []
        received: list[Any] = []
        if self.transport == "folder":
            sent = self.ranks.finish("send")
            received = call_workers(self.engine, "dsv4_refit_from_folder", where)
            return sent, received
        try:
            if self.transport == "ipc":
                received = call_workers(self.engine, "dsv4_refit_from_senders", self.addresses, timeout=60.0)
            else:
                received = call_workers(self.engine, "dsv4_refit_from_broadcast", version)
        except UserError as error:
            errors.append(error)
        try:
            sent = self.ranks.finish("send")
        except UserError as error:
            errors.insert(0, error)
        if errors:
            raise errors[0]
        return sent, received


def refit_from_ranks(folder: Path, options: argparse.Namespace) -> int:
    """Refits over every transport, from shards; 0 if all are clean and a broken one changes nothing."""
    ranks = Ranks(options.ranks, processes(options.ranks, "cuda", training_weights, BUCKET_BYTES))
    engine = start_engine(folder / "v0", extension=True, tensor_parallel=options.tensor_parallel)
    print("prepared:", call_workers(engine, "dsv4_refit_prepare", "all"), flush=True)
    results = {"v0": logprobs(engine)}
    bad, number = 0, 0
    for transport in options.transport:
        started = time.perf_counter()
        served = Served(engine, ranks, transport, options.tensor_parallel, folder)
        print(f"{transport}: connected in {time.perf_counter() - started:.2f} s", flush=True)
        for version in (1, 2):
            shards = ranks.call("load", version)
            number += 1
            started = time.perf_counter()
            sent, received = served.refit(number)
            seconds = time.perf_counter() - started
            print(f"{transport}: version {version}, {seconds:.2f} s, shards of {shards[0]:.3f} GiB, ranks {sent}")
            for worker, report in enumerate(received):
                shown = {key: report[key] for key in ("tensors", "bytes", "checksum", "phases")}
                print(f"  worker {worker}: {len(report['findings'])} findings {report['findings'][:3]} {shown}")
                bad += len(report["findings"])
        results["v2"] = logprobs(engine)
        torch.save(results, folder / f"refit-{transport}.pt")
        if transport != "folder":
            number += 1
            ranks.call("load", 3, spoiled=True)
            try:
                served.refit(number)
                print(f"{transport}: a refit with a NaN was not refused")
                bad += 1
            except UserError as error:
                print(f"{transport}: broken on purpose: {error}")
            held, again = call_workers(engine, "dsv4_refit_version"), logprobs(engine)
            same = all(torch.equal(again[key], results["v2"][key]) for key in again)
            print(f"{transport}: afterwards {held}, logprobs of version 2 equal: {same}", flush=True)
            bad += not same or any(found != {"version": number - 1, "valid": True} for found in held)
    ranks.end()
    torch.save(results, folder / "refit.pt")
    return 1 if bad else 0


def fresh(folder: Path, tensor_parallel: int) -> None:
    """The same requests on an engine that loaded version 2 from disk; twice, for the engine's own reproducibility."""
    engine = start_engine(folder / "v2", tensor_parallel=tensor_parallel)
    first, second = logprobs(engine), logprobs(engine)
    print("fresh engine against itself: equal", all(torch.equal(first[key], second[key]) for key in first))
    torch.save(first, folder / "fresh.pt")


def read_measured(path: Path, command: str, *versions: str) -> dict[str, Any]:
    """What `refit` (of each version) or `fresh` measured: `prompt`, `sampled` and `tokens`.

    Raises:
        UserError: another file.
    """
    again = f"run `python benchmarks/vllm_refit.py {command}` again"
    try:
        found = torch.load(path)
    except Exception as error:  # torch.load has no errors of its own: text alone ends in an IndexError
        raise UserError(f"{path} cannot be read ({type(error).__name__}); {again}") from error
    parts = [found.get(version) for version in versions] if versions and isinstance(found, dict) else [found]
    for part in parts:
        held = part if isinstance(part, dict) else {}
        lacks = [key for key in ("prompt", "sampled", "tokens") if not isinstance(held.get(key), torch.Tensor)]
        if lacks:
            raise UserError(f"{path} holds no tensor {lacks[0]!r} where one was measured; {again}")
    return found


def compare(folder: Path, transports: list[str]) -> int:
    """Print the differences; 0 only if there are none between the second refit and the fresh engine."""
    wanted = read_measured(folder / "fresh.pt", f"fresh {folder}")
    worst = 0.0
    for name in [f"refit-{transport}.pt" for transport in transports] or ["refit.pt"]:
        refitted = read_measured(folder / name, f"refit {folder}", "v0", "v2")
        for key in ("prompt", "sampled"):
            if refitted["v2"][key].shape != wanted[key].shape:
                shapes = f"{list(refitted['v2'][key].shape)}; fresh.pt has {list(wanted[key].shape)}"
                raise UserError(f"{folder / name}: {key} is {shapes}; run `refit` and `fresh` with one revision")
            difference = (refitted["v2"][key] - wanted[key]).abs().max().item()
            difference = difference if math.isfinite(difference) else math.inf
            moved = (refitted["v2"][key] - refitted["v0"][key]).abs().max().item()
            print(f"{name}: {key}: {wanted[key].numel()} logprobs, max difference to fresh {difference:g}, ", end="")
            print(f"to v0 {moved:.3f}")
            worst = max(worst, difference)
        same_tokens = torch.equal(refitted["v2"]["tokens"], wanted["tokens"])
        print(f"{name}: sampled tokens equal: {same_tokens}")
        worst = worst if same_tokens else float("inf")
    return 0 if worst == 0.0 else 1


def main() -> int:
    """Run a phase."""
    options = read_options(__doc__ or "")
    check_phase(options)
    if options.phase == "make":
        make(options.folder)
    elif options.phase == "fresh":
        fresh(options.folder, options.tensor_parallel)
    elif options.phase == "compare":
        return compare(options.folder, options.transport)
    elif options.ranks:
        return refit_from_ranks(options.folder, options)
    else:
        return refit(options.folder, sleep=options.sleep, direct=options.direct)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
