"""A vLLM engine in this process, behind the interface of the CPU reference engine.

Runs in vLLM's own environment (see docs/rollout.md): nothing here imports AutoModel or transformers.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.generation.completion import Completion
from nemo_rl_dsv4.generation.sampling import SamplingParams
from nemo_rl_dsv4.generation.served_model import check_window_yarn
from nemo_rl_dsv4.generation.vllm_settings import (
    MAKE_VLLM,
    VllmSpec,
    check_hidden_size,
    engine_arguments,
    engine_environment,
    engine_findings,
)
from nemo_rl_dsv4.model.hf_config import read_config
from nemo_rl_dsv4.numerics import get_profile
from nemo_rl_dsv4.refit.worker_calls import call_workers

log = logging.getLogger(__name__)

SUPPORTED = ((0, 25), (0, 34))
"""First version of vLLM that is known to work, and the first that is not."""


def _vllm() -> Any:
    """The library: in its own environment only, so nothing here is checked against its types."""
    return importlib.import_module("vllm")


def require_vllm() -> str:
    """Version of the vLLM that this process imports.

    Raises:
        UserError: there is none, or it is not one of the supported versions.
    """
    wanted = f"vLLM {SUPPORTED[0][0]}.{SUPPORTED[0][1]} to {SUPPORTED[1][0]}.{SUPPORTED[1][1] - 1}"
    try:
        vllm = _vllm()
    except ImportError as error:
        raise UserError(
            f"vLLM cannot be imported here ({error}); wanted {wanted}. Make its environment with `{MAKE_VLLM}`"
        ) from error
    found = tuple(int(part) for part in vllm.__version__.split(".")[:2])
    if not SUPPORTED[0] <= found < SUPPORTED[1]:
        raise UserError(f"vLLM is {vllm.__version__}; wanted {wanted}")
    return vllm.__version__


def _require_known(own: Mapping[str, Any]) -> None:
    """The recipe's own arguments are arguments of the installed vLLM."""
    vllm = _vllm()
    known = {*inspect.signature(vllm.LLM).parameters, *inspect.signature(vllm.EngineArgs).parameters}
    for name in own:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(
                f"policy.generation.vllm_kwargs.{name} is no argument of vLLM {vllm.__version__}: drop it{hint}"
            )


KEYS = {
    "seed": "grpo.seed",
    "enable_expert_parallel": "policy.generation.vllm_cfg.expert_parallel_size",
    "enable_sleep_mode": "policy.dsv4.engine_sleep",
    **{
        name: f"policy.generation.vllm_cfg.{name}"
        for name in (
            "tensor_parallel_size",
            "kv_cache_dtype",
            "max_model_len",
            "gpu_memory_utilization",
            "enforce_eager",
            "logprobs_mode",
            "enable_return_routed_experts",
        )
    },
}
"""Argument of the engine -> key of the recipe that decides it."""


def _refused(error: ValueError | TypeError, arguments: Mapping[str, Any], spec: VllmSpec, version: str) -> str:
    """What vLLM said when it was given its arguments, and the keys that it may mean."""
    if isinstance(error, ValidationError):
        told = [(".".join(map(str, part["loc"])), part["msg"]) for part in error.errors(include_url=False)]
        text = "; ".join(f"{where}: {message}" if where else message for where, message in told)
    else:
        text = " ".join(str(error).split()) or type(error).__name__
    keys = KEYS | {name: f"policy.generation.vllm_kwargs.{name}" for name in spec.engine_arguments}
    named = [name for name in keys if name in arguments and re.search(rf"\b{name}\b", text)]
    shown = ", ".join(f"{keys[name]} ({arguments[name]!r})" for name in named or spec.engine_arguments)
    fix = f"change {shown}" if shown else "change the keys of policy.generation.vllm_cfg that it speaks of"
    return f"vLLM {version} does not start with what the recipe asks of it: {text.rstrip('.')}; {fix}"


class VllmEngine:
    """Starts the engine; the weights are those of `spec.model` until the first refit.

    Args:
        spec: settings; checked against its profile before anything starts.

    Raises:
        UserError: settings that contradict the profile, no usable vLLM, an argument that it does not have or does not
            take, or an engine that says it computes otherwise.
    """

    def __init__(self, spec: VllmSpec) -> None:
        self.spec, self.profile = spec, get_profile(spec.profile)
        arguments = engine_arguments(spec, self.profile)
        path = Path(spec.model) / "config.json"
        served = read_config(path.parent, {}) if path.is_file() else {}
        if "rocm" not in spec.profile and served:
            check_hidden_size(served["hidden_size"], f"hidden_size of {path}")
        # Read by vLLM when it is imported, and inherited by its worker processes.
        os.environ.update(engine_environment(self.profile, spec.environment))
        # The engine's loop runs in this process; several tensor-parallel workers are its children.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        self.version = require_vllm()
        own = spec.window_yarn
        check_window_yarn(self.version, self.profile.yarn_on_window_layers if own is None else own, served)
        _require_known(spec.engine_arguments)
        try:
            self.llm = _vllm().LLM(**arguments)
        except (ValueError, TypeError) as error:  # pydantic's are ValueErrors
            raise UserError(_refused(error, arguments, spec, self.version)) from error
        self._refit_prepared = False
        findings = engine_findings(self.describe(), self.profile)
        if findings:
            raise UserError(f"the engine does not compute what profile {spec.profile} says: {'; '.join(findings)}")

    def describe(self) -> dict[str, Any]:
        """What the engine's first worker says of itself; the keys are those that `engine_findings` reads."""
        return {"vllm": self.version, **self.llm.collective_rpc("describe_numerics")[0]}

    def generate(
        self, prompts: list[list[int]], params: SamplingParams, *, seed: int, request_ids: list[int] | None = None
    ) -> list[Completion]:
        """Continue prompts.

        Args:
            prompts: token ids, none empty.
            params: how to sample; temperature 0 is greedy.
            seed: with a request's id it fixes that request's draws.
            request_ids: one per prompt; default 0, 1, ...

        Raises:
            UserError: a prompt that is empty or leaves no room for a token; stop strings without a tokenizer.
        """
        if params.stop_strings and self.spec.tokenizer is None:
            raise UserError("policy.generation.stop_strings is set, but the engine was started without a tokenizer")
        ids = list(range(len(prompts))) if request_ids is None else request_ids
        requests = [
            self._sampling(prompt, params, seed, request_id) for prompt, request_id in zip(prompts, ids, strict=True)
        ]
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], requests, use_tqdm=False)
        return [self._completion(output) for output in outputs]

    def _sampling(self, prompt: list[int], params: SamplingParams, seed: int, request_id: int) -> Any:
        room = self.spec.max_model_len - len(prompt)
        if not prompt or room < 1:
            raise UserError(
                f"a prompt has {len(prompt)} tokens; wanted 1 to {self.spec.max_model_len - 1} "
                "(policy.generation.vllm_cfg.max_model_len less one)"
            )
        return _vllm().SamplingParams(
            max_tokens=min(params.max_new_tokens, room),
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=-1 if params.top_k is None else params.top_k,
            seed=(seed * 1_000_003 + request_id * 7_919 + 17) % 2**31,
            stop_token_ids=list(params.stop_token_ids),
            stop=list(params.stop_strings) or None,
            include_stop_str_in_output=bool(params.stop_strings),
            ignore_eos=True,
            logprobs=0,
            detokenize=bool(params.stop_strings),
        )

    def _completion(self, output: Any) -> Completion:
        result = output.outputs[0]
        tokens = list(result.token_ids)
        logprobs = [float(position[token].logprob) for position, token in zip(result.logprobs, tokens, strict=True)]
        routes = getattr(result, "routed_experts", None)
        if self.spec.return_routed_experts:
            wanted = len(output.prompt_token_ids) + len(tokens) - 1
            if routes is None or len(routes) != wanted:
                found = "none" if routes is None else f"{len(routes)} rows"
                raise RuntimeError(
                    f"the engine returned {found} of routed experts for a request of {wanted + 1} tokens"
                )
        return Completion(
            tokens,
            logprobs,
            result.finish_reason == "length",
            None if routes is None else torch.from_numpy(routes.astype("int16")),
        )

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probability of every token but the first under one prefill of each whole sequence.

        Beside the logprobs of `generate` this shows how far the engine's decoding is from its own prefill.
        """
        request = _vllm().SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=1.0, detokenize=False)
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in sequences], request, use_tqdm=False)
        return [
            [float(row[token].logprob) for row, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
            for output, ids in zip(outputs, sequences, strict=True)
        ]

    def hidden_states(self, sequences: list[list[int]]) -> list[torch.Tensor]:
        """What each layer hands to the next in the prefill of sequences of one length.

        Returns:
            One float32 tensor [sequences, tokens, streams, hidden] a layer.

        Raises:
            UserError: the engine runs layers inside CUDA graphs, or its first layer returns something else.
        """
        if not self.spec.enforce_eager:
            raise UserError(
                "hidden states of layers can be read of an eager engine only; set "
                "policy.generation.vllm_cfg.enforce_eager to true"
            )
        request = _vllm().SamplingParams(max_tokens=1, detokenize=False)
        rows = []
        for ids in sequences:
            self.llm.collective_rpc("dsv4_capture_start")
            try:
                self.llm.generate([{"prompt_token_ids": ids}], request, use_tqdm=False)
            finally:
                layers = self.llm.collective_rpc("dsv4_capture_stop")[0]
            rows.append([layer[: len(ids)] for layer in layers])
        return [torch.stack(of_layer) for of_layer in zip(*rows, strict=True)]

    def update_weights_from_folder(self, folder: str, *, timeout: float = 600.0) -> dict[str, Any]:
        """Refit every worker with the buckets of a folder (`refit.transport.file.write_folder`).

        Returns:
            The first worker's `RefitReport` as plain values, with the findings and notes of all workers.

        Raises:
            UserError: the buckets are incomplete or damaged (the old weights stay), or a finding and `spec` says stop.
        """
        return self._refit("dsv4_refit_from_folder", folder, timeout=timeout)

    def update_weights_from_senders(
        self, transport: str, addresses: Mapping[str, Any], version: int, *, timeout: float = 600.0
    ) -> dict[str, Any]:
        """Refit every worker with what training ranks send.

        Args:
            transport: `cuda_ipc` (each worker takes the sender of its own GPU), `shared_memory` (one for all) or
                `broadcast`.
            addresses: `gpu_name` of each sender's device -> its socket and key. By broadcast `gpu_name` of each worker
                -> host and port of its sender's store, its rank there and the number of ends.
            version: policy version that is sent.
            timeout: seconds without any progress after which it is given up.

        Returns:
            As above.

        Raises:
            UserError: a worker here or elsewhere could not stage the weights (all keep the old ones), or a finding and
                `spec` says stop.
        """
        if transport == "broadcast":
            return self._refit("dsv4_refit_by_broadcast", dict(addresses), version, timeout=timeout)
        if transport == "cuda_ipc":
            return self._refit("dsv4_refit_from_senders", dict(addresses), timeout=timeout)
        ((socket, key),) = addresses.values()
        return self._refit("dsv4_refit_from_sender", socket, key, timeout=timeout)

    def gpu_names(self) -> list[str]:
        """What every process of this host calls the GPU of each worker."""
        return call_workers(self.llm, "dsv4_gpu_name")

    def _refit(self, method: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if not self._refit_prepared:
            call_workers(self.llm, "dsv4_refit_prepare", self.spec.refit_checks, self.spec.refit_direct)
            self._refit_prepared = True
        reports = call_workers(self.llm, method, *args, **kwargs)
        self.llm.reset_prefix_cache()
        findings = [f"worker {rank}: {text}" for rank, report in enumerate(reports) for text in report["findings"]]
        if findings and self.spec.refit_on_finding == "stop":
            shown = "; ".join(findings[:3])
            raise UserError(f"refit of version {reports[0]['version']}: {len(findings)} findings: {shown}")
        if findings:
            log.warning("refit of version %s: %d findings: %s", reports[0]["version"], len(findings), findings[:3])
        notes = list(dict.fromkeys(note for report in reports for note in report["notes"]))
        return {**reports[0], "findings": findings, "notes": notes}

    def sleep(self) -> None:
        """Give weights and KV cache back to the GPU; the next refit must bring all weights.

        Raises:
            UserError: another process took GPU memory meanwhile; vLLM compares what the whole GPU has free before and
                after, and is in no state to go on when there is less.
        """
        try:
            self.llm.sleep(level=2)
        except AssertionError as error:
            raise UserError(
                f"an engine fell asleep and its GPU has less free memory than before (vLLM: {error}): another process "
                "takes memory there; give the run the GPU to itself, or set policy.dsv4.engine_sleep to false"
            ) from error

    def wake_up(self, *tags: str) -> None:
        """Take memory again: `weights` before a refit, `kv_cache` after it, or both without tags."""
        self.llm.wake_up(list(tags) or None)
