"""vLLM worker extension: refit a live DeepSeek-V4 engine, give `worker_extension_cls` this class's dotted name.

    LLM(model, worker_extension_cls="nemo_rl_dsv4.refit.vllm_extension.RefitWorkerExtension")
    call_workers(llm, "dsv4_refit_prepare")                          # once, after start
    call_workers(llm, "dsv4_refit_from_folder", folder)              # after each policy update

vLLM's layerwise reload turns checkpoint tensors into kernel tensors and copies those into the storage the kernels know.
What it leaves wrong is put right here: kernels that keep the scale objects of before (or of the reload itself), sinks
that a bare copy_ writes, tensors derived at load time. See `refit.live` for the order and the verification.

Imports nothing of AutoModel or transformers: it runs in vLLM's environment.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.hf_config import read_config
from nemo_rl_dsv4.model.official_names import expected_tensors
from nemo_rl_dsv4.refit.live import LiveRefit
from nemo_rl_dsv4.refit.report import Checks, Stream
from nemo_rl_dsv4.refit.staging import StagedWeights
from nemo_rl_dsv4.refit.transport.broadcast import BroadcastReceiver
from nemo_rl_dsv4.refit.transport.channel import Channel, open_channel
from nemo_rl_dsv4.refit.transport.file import read_folder
from nemo_rl_dsv4.refit.transport.protocol import BucketReceiver, receive_staged
from nemo_rl_dsv4.refit.transport.shared import Address, SharedReceiver, gpu_name
from nemo_rl_dsv4.refit.vllm_layout import Memory, VllmLayout
from nemo_rl_dsv4.refit.vllm_symbols import BROADCAST, SINKS, check_vllm
from nemo_rl_dsv4.refit.worker_calls import Answer, call_method


class VllmEngine:
    """A vLLM worker's model as a `LiveEngine`.

    Args:
        worker: vLLM's GPU worker.

    Raises:
        UserError: a vLLM whose insides the table does not describe, or another model than DeepSeek-V4.
    """

    def __init__(self, worker: Any) -> None:
        check_vllm(importlib.import_module("vllm").__version__)
        layerwise = importlib.import_module("vllm.model_executor.model_loader.reload.layerwise")
        self._begin, self._finish = layerwise.initialize_layerwise_reload, layerwise.finalize_layerwise_reload
        self._skipped: set[str] = importlib.import_module("vllm.model_executor.model_loader.reload.meta").SKIP_TENSORS
        self._current_config = importlib.import_module("vllm.config").set_current_vllm_config
        self._worker = worker
        self.model: torch.nn.Module = worker.model_runner.get_model()
        config = worker.vllm_config.model_config.hf_config
        model_type = getattr(config, "model_type", None)
        if model_type != "deepseek_v4":
            raise UserError(f"refit: the engine serves model_type {model_type!r}; wanted 'deepseek_v4'")
        self.expected = expected_tensors(_official_config(worker.vllm_config.model_config))
        parallel = importlib.import_module("vllm.distributed.parallel_state")
        rank, size = parallel.get_tensor_model_parallel_rank(), parallel.get_tensor_model_parallel_world_size()
        in_experts = worker.vllm_config.parallel_config.enable_expert_parallel
        expert_rank = parallel.get_ep_group().rank_in_group if in_experts else None
        self.rank = rank
        self._layout = VllmLayout(self.model, self.expected, rank, size, expert_rank)
        self._derived = [m for m in self.model.modules() if isinstance(getattr(m, BROADCAST, None), torch.Tensor)]
        self._sinks = [p.data for name, p in self.model.named_parameters() if name.endswith(f".{SINKS}")]
        bare = any(
            not hasattr(parameter, "weight_loader")
            for name, parameter in self.model.named_parameters()
            if name.endswith(f".{SINKS}")
        )
        self._patched = {SINKS} if bare else set()

    @torch.inference_mode()
    def load(self, stream: Stream) -> set[str]:
        """Reload layer by layer; see `LiveEngine.load`."""
        broadcasts = [getattr(module, BROADCAST) for module in self._derived]
        for sink in self._sinks:  # heads that pad a kernel's tile have no sink; a level-2 sleep forgets that
            sink.fill_(-torch.inf)
        try:
            with self._current_config(self._worker.vllm_config), _added(self._skipped, self._patched):
                try:
                    self._begin(self.model)
                    return set(self.model.load_weights(iter(stream)))  # type: ignore[operator]
                finally:
                    # Also after an error: layers that were not reached get their old kernel tensors back.
                    self._finish(self.model, self._worker.vllm_config.model_config)
        finally:
            self._layout.forget()
            for module, tensor in zip(self._derived, broadcasts, strict=True):
                object.__setattr__(module, BROADCAST, tensor)

    @torch.inference_mode()
    def refresh_derived(self) -> None:
        """Sum hc_attn_fn over streams into the tensor that layer 0 and captured graphs know."""
        for module in self._derived:
            own: Any = module
            own.hc_attn_fn_broadcast.copy_(own.hc_attn_fn.detach().view(-1, own.hc_mult, own.hidden_size).sum(dim=1))

    def read_back(self, name: str) -> tuple[torch.Tensor, tuple[slice, ...]] | None:
        """See `VllmLayout.read_back`."""
        return self._layout.read_back(name)

    def memory(self, name: str) -> Memory | None:
        """See `VllmLayout.memory`."""
        return self._layout.memory(name)

    def derived(self) -> list[torch.Tensor]:
        """What `refresh_derived` computes."""
        return [getattr(module, BROADCAST) for module in self._derived]

    def scales(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `VllmLayout.scales`."""
        return self._layout.scales()

    def reset_caches(self) -> None:
        """Drop multi-modal and encoder caches; the prefix cache is the scheduler's: `LLM.reset_prefix_cache()`."""
        self._worker.reset_mm_cache()
        self._worker.reset_encoder_cache()


class RefitWorkerExtension:
    """Methods that vLLM mixes into its worker, to be called by `collective_rpc`."""

    _dsv4_refit: LiveRefit | None = None
    _dsv4_channel: Channel | None = None

    def dsv4_answer(self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Answer:
        """Call one of the methods below for `refit.worker_calls.call_workers`."""
        return call_method(self, method, args, kwargs)

    def dsv4_refit_prepare(self, checks: Checks = "sampled", direct: bool = False) -> dict[str, int]:
        """Remember where every parameter lies and who holds it; call once, before the first refit.

        Args:
            checks, direct: see `LiveRefit`.

        Returns:
            Numbers of parameters and of references from kernels found.

        Raises:
            UserError: see `VllmEngine`; or routed experts whose kernels hold no scale, which means they moved.
        """
        self._dsv4_refit = LiveRefit(VllmEngine(self), checks=checks, direct=direct)
        held = {reference.parameter.rpartition(".")[2] for reference in self._dsv4_refit.references}
        parameters = [name for name, _ in self._dsv4_refit.engine.model.named_parameters()]
        for leaf in ("w13_weight_scale_inv", "w2_weight_scale_inv"):
            if leaf not in held and any(name.endswith(leaf) for name in parameters):
                raise UserError(
                    f"refit: no object of the MoE kernels holds {leaf}; this vLLM keeps scales in a place the search "
                    "does not reach, so a stale scale would go unnoticed"
                )
        return {"parameters": len(parameters), "references": len(self._dsv4_refit.references)}

    def dsv4_refit_from_folder(
        self, folder: str, stage_on: str = "cpu", timeout: float = 600.0, skip_repointing: bool = False
    ) -> dict[str, object]:
        """Load the buckets of a folder that `write_folder` filled; return the `RefitReport` as plain values.

        Args:
            folder: where the buckets are.
            stage_on: device that holds them until the set is complete.
            timeout: seconds to wait for the last bucket.
            skip_repointing: see `LiveRefit.apply`.

        Raises:
            UserError: see `LiveRefit.apply`; the engine keeps its old weights while the set is not complete.
        """
        refit = self._dsv4_prepared()
        staged = StagedWeights(refit.engine.expected, stage_on)  # type: ignore[attr-defined]
        started = time.perf_counter()
        for manifest, buffer in read_folder(Path(folder), timeout=timeout):
            staged.add(manifest, buffer)
        received = time.perf_counter() - started
        report = refit.apply(staged, skip_repointing=skip_repointing)
        return report.with_receive(received).to_dict()

    def dsv4_refit_from_sender(
        self, socket: str, key: str, stage_on: str = "cpu", timeout: float = 600.0
    ) -> dict[str, object]:
        """Load one refit of a `SharedSender` on this host (shared memory, or CUDA IPC on the same GPU).

        Every worker of every engine that is refitted together connects; the sender lets all commit or none.

        Args:
            socket, key: the sender's `address`.
            stage_on, timeout: as above.

        Raises:
            UserError: see `receive_staged`; the engine then keeps its old weights.
        """
        return self._dsv4_receive(SharedReceiver(Address(socket, key), timeout=timeout), stage_on)

    def dsv4_refit_from_senders(
        self, addresses: Mapping[str, tuple[str, str]], stage_on: str = "cpu", timeout: float = 600.0
    ) -> dict[str, object]:
        """Load one refit of several `SharedSender`s, one a GPU (CUDA IPC): each worker takes that of its own GPU.

        Args:
            addresses: `gpu_name` of each sender's GPU -> its socket and key.
            stage_on, timeout: as above.

        Raises:
            UserError: no sender on this worker's GPU; otherwise as above.
        """
        device = next(self._dsv4_prepared().engine.model.parameters()).device
        own = gpu_name(device)
        if own not in addresses:
            raise UserError(f"refit: this worker is on GPU {own}; senders are on {sorted(addresses)}")
        receiver = SharedReceiver(Address(*addresses[own]), timeout=timeout, device=device.index)
        return self._dsv4_receive(receiver, stage_on)

    def dsv4_refit_join(self, places: Sequence[tuple[str, int, int, int]], timeout: float = 600.0) -> None:
        """Join the broadcast of a sender elsewhere; once, and again after a broadcast has failed.

        Args:
            places: for each worker of this engine, in tensor-parallel order: host and port of the sender's store, the
                worker's rank in that channel (from 1), and the channel's size. Workers of one engine may have
                different senders.
            timeout: seconds that any wait may take.

        Raises:
            UserError: see `open_channel`.
        """
        host, port, rank, size = places[self._dsv4_prepared().engine.rank]  # type: ignore[attr-defined]
        device = next(self._dsv4_prepared().engine.model.parameters()).device
        if self._dsv4_channel is not None:
            self._dsv4_channel.close()
        self._dsv4_channel = None
        self._dsv4_channel = open_channel((host, port), rank=rank, size=size, device=device, timeout=timeout)

    def dsv4_refit_from_broadcast(self, version: int, stage_on: str = "cpu") -> dict[str, object]:
        """Load one refit of a `BroadcastSender` whose channel this worker has joined.

        Args:
            version: policy version that the sender was told to send.
            stage_on: as above.

        Raises:
            UserError: no channel; otherwise as above.
        """
        if self._dsv4_channel is None:
            raise UserError("refit: call dsv4_refit_join before a refit by broadcast")
        return self._dsv4_receive(BroadcastReceiver(self._dsv4_channel, version=version), stage_on)

    def dsv4_refit_by_broadcast(
        self,
        places: Mapping[str, tuple[str, int, int, int]],
        version: int,
        stage_on: str = "cpu",
        timeout: float = 600.0,
    ) -> dict[str, object]:
        """Load one refit through a channel of its own, which is gone afterwards.

        Args:
            places: `gpu_name` of each worker -> host and port of its sender's store, its rank in that channel (from 1)
                and the channel's size.
            version, stage_on, timeout: as above.

        Raises:
            UserError: see `open_channel` and `receive_staged`; the engine then keeps its old weights.
        """
        device = next(self._dsv4_prepared().engine.model.parameters()).device
        host, port, rank, size = places[gpu_name(device)]
        channel = open_channel((host, port), rank=rank, size=size, device=device, timeout=timeout)
        try:
            return self._dsv4_receive(BroadcastReceiver(channel, version=version), stage_on)
        finally:
            channel.close()

    def _dsv4_receive(self, receiver: BucketReceiver, stage_on: str) -> dict[str, object]:
        refit, started = self._dsv4_prepared(), time.perf_counter()
        expected = refit.engine.expected  # type: ignore[attr-defined]
        staged = receive_staged(receiver, expected, stage_on)
        received = time.perf_counter() - started
        report = refit.apply(staged)
        return report.with_receive(received).to_dict()

    def _dsv4_prepared(self) -> LiveRefit:
        if self._dsv4_refit is None:
            raise UserError("refit: call dsv4_refit_prepare once after the engine has started")
        return self._dsv4_refit

    def dsv4_refit_version(self) -> dict[str, object]:
        """Policy version of the weights in the engine (None: those it started with), and whether they are whole."""
        refit = self._dsv4_refit
        return {"version": None if refit is None else refit.version, "valid": refit is None or refit.valid}


@contextmanager
def _added(target: set[str], names: set[str]) -> Iterator[None]:
    """Add names to a set of vLLM's for the time of a reload, and take back exactly what was added."""
    new = names - target
    target |= new
    try:
        yield
    finally:
        target -= new


def _official_config(model_config: Any) -> dict[str, Any]:
    """config.json of the served model, from its folder, else as vLLM read it; vLLM's `hf_overrides` win."""
    overrides = model_config.hf_overrides if isinstance(model_config.hf_overrides, dict) else {}
    folder = Path(model_config.model)
    if (folder / "config.json").is_file():
        return read_config(folder, {**overrides, "num_nextn_predict_layers": 0})  # a drafter is not refitted
    return {**model_config.hf_config.to_dict(), "num_nextn_predict_layers": 0}
