"""The vLLM engine's wrapper against a stand-in of the `vllm` module; the real one runs on a GPU."""

import sys
import types
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import BaseModel, Field

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.generation.sampling import SamplingParams
from nemo_rl_dsv4.generation.vllm_settings import VllmSpec

LAYERS, TOP_K = 3, 2


@dataclass
class Requested:
    """The keyword arguments that vLLM's SamplingParams would get."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop_token_ids: Any = None
    stop: Any = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True


class FakeLLM:
    """Answers with `max_tokens` fixed tokens, or stops at 7; logprob of token t is -t / 100."""

    environment_override: dict[str, str] | None = None
    routes_missing = 0

    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments

    def collective_rpc(self, method: str) -> list[dict[str, Any]]:
        import os

        assert method == "describe_numerics"
        environment = {**os.environ, **(self.environment_override or {})}
        return [
            {
                "kv_cache_dtype": self.arguments["kv_cache_dtype"],
                "logprobs_mode": "raw_logprobs",
                "environment": environment,
                "capability": [9, 0],
                "architecture": "",
            }
        ]

    def generate(self, prompts: list[dict], requests: Any, use_tqdm: bool) -> list[Any]:
        requests = requests if isinstance(requests, list) else [requests] * len(prompts)
        return [self._answer(p["prompt_token_ids"], r) for p, r in zip(prompts, requests, strict=True)]

    def _answer(self, prompt: list[int], request: Requested) -> Any:
        tokens = [5, 6, 7][: request.max_tokens]
        stopped = 7 in tokens and 7 in (request.stop_token_ids or [])
        rows = len(prompt) + len(tokens) - 1 - self.routes_missing
        result = SimpleNamespace(
            token_ids=tuple(tokens),
            logprobs=[{token: SimpleNamespace(logprob=-token / 100)} for token in tokens],
            finish_reason="stop" if stopped else "length",
            routed_experts=np.ones((rows, LAYERS, TOP_K), dtype=np.uint8),
        )
        prompt_logprobs = [None, *({token: SimpleNamespace(logprob=-token / 100)} for token in prompt[1:])]
        return SimpleNamespace(prompt_token_ids=prompt, outputs=[result], prompt_logprobs=prompt_logprobs)


@dataclass
class EngineArguments:
    model: str
    max_num_batched_tokens: int = 1


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("vllm")
    module.__version__ = "0.26.0"  # type: ignore[attr-defined]
    module.LLM, module.SamplingParams = FakeLLM, Requested  # type: ignore[attr-defined]
    module.EngineArgs = EngineArguments  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    for name in ("VLLM_USE_DEEP_GEMM", "VLLM_USE_DEEP_GEMM_E8M0", "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER"):
        monkeypatch.setenv(name, "unset before the engine starts")
    for name in ("VLLM_NO_USAGE_STATS", "VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "0")
    return module


def engine(**changes: Any) -> Any:
    from nemo_rl_dsv4.generation.vllm_engine import VllmEngine

    return VllmEngine(VllmSpec(model="m", profile="vllm-hopper", max_model_len=16, **changes))


def test_completions_carry_tokens_logprobs_and_routes(vllm) -> None:
    done = engine(return_routed_experts=True).generate(
        [[1, 2], [1, 2, 3]], SamplingParams(8, stop_token_ids=(7,)), seed=3
    )
    assert [c.tokens for c in done] == [[5, 6, 7]] * 2
    assert done[0].logprobs == [-0.05, -0.06, -0.07]
    assert [c.truncated for c in done] == [False, False]
    assert done[1].routed_experts is not None and tuple(done[1].routed_experts.shape) == (5, LAYERS, TOP_K)


def test_a_length_limit_truncates_and_long_prompts_are_refused(vllm) -> None:
    rollout = engine()
    (done,) = rollout.generate([list(range(14))], SamplingParams(8, stop_token_ids=(7,)), seed=0)
    assert (done.tokens, done.truncated) == ([5, 6], True)
    for prompt in ([], list(range(16))):
        with pytest.raises(UserError, match="a prompt has"):
            rollout.generate([prompt], SamplingParams(8), seed=0)


def test_seed_and_request_fix_the_draws(vllm) -> None:
    rollout, seen = engine(), []
    rollout.llm.generate = lambda prompts, requests, use_tqdm: seen.append([r.seed for r in requests]) or []
    for seed, ids in ((1, [0, 1]), (1, [1, 0]), (2, [0, 1])):
        rollout.generate([[1], [1]], SamplingParams(1), seed=seed, request_ids=ids)
    assert seen[0] == seen[1][::-1]
    assert len({*seen[0], *seen[2]}) == 4


def test_missing_routes_are_an_error(vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines have returned fewer rows of routes than tokens; replay would then be shifted."""
    monkeypatch.setattr(FakeLLM, "routes_missing", 1)
    with pytest.raises(RuntimeError, match="3 rows of routed experts for a request of 5 tokens"):
        engine(return_routed_experts=True).generate([[1, 2]], SamplingParams(8), seed=0)


def test_an_engine_that_computes_otherwise_is_refused(vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeLLM, "environment_override", {"VLLM_USE_DEEP_GEMM_E8M0": "0"})
    with pytest.raises(UserError, match="does not compute what profile vllm-hopper says.*VLLM_USE_DEEP_GEMM_E8M0"):
        engine()


def test_an_argument_that_vllm_does_not_have_is_named_before_weights_are_read(vllm) -> None:
    with pytest.raises(UserError, match=r"vllm_kwargs.max_num_batch_tokens is no argument of vLLM 0.26.0.*batched_tok"):
        engine(engine_arguments={"max_num_batch_tokens": 1})
    assert engine(engine_arguments={"max_num_batched_tokens": 512}).version == "0.26.0"


def raise_value_error(text: str) -> None:
    raise ValueError(text)


class Arguments(BaseModel):
    """Refuses as vLLM's own classes do."""

    max_num_batched_tokens: int = Field(default=1, le=100)


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (
            lambda: Arguments(max_num_batched_tokens=512),
            r"vLLM 0.26.0 does not start with what the recipe asks of it: max_num_batched_tokens: Input should be less "
            r"than or equal to 100; change policy.generation.vllm_kwargs.max_num_batched_tokens \(512\)$",
        ),
        (
            lambda: raise_value_error("16 tokens need more\nmemory: decrease `max_model_len`."),
            r": 16 tokens need more memory: decrease `max_model_len`; change "
            r"policy.generation.vllm_cfg.max_model_len \(16\)$",
        ),
        (
            lambda: int(None),  # type: ignore[arg-type]
            r"int\(\) argument must be .*; change policy.generation.vllm_kwargs.max_num_batched_tokens \(512\)$",
        ),
    ],
)
def test_what_vllm_refuses_at_its_start_is_one_line_with_the_keys(vllm, raised, message) -> None:
    """It ended in vLLM's traceback, from an actor."""

    class Refusing(FakeLLM):
        def __init__(self, **arguments: Any) -> None:
            raised()

    vllm.LLM = Refusing
    with pytest.raises(UserError, match=message) as caught:
        engine(engine_arguments={"max_num_batched_tokens": 512})
    assert "\n" not in str(caught.value)


def test_versions_of_vllm(vllm) -> None:
    vllm.__version__ = "0.24.1"
    with pytest.raises(UserError, match="vLLM is 0.24.1; wanted vLLM 0.25 to 0.33"):
        engine()


def test_without_vllm_the_error_says_how_to_make_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from nemo_rl_dsv4.generation.vllm_engine import require_vllm

    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match="uv sync --no-default-groups --extra vllm"):
        require_vllm()


def test_score_gives_every_token_but_the_first(vllm) -> None:
    assert engine().score([[1, 2, 3]]) == [[-0.02, -0.03]]


def test_memory_that_another_process_took_while_an_engine_fell_asleep_is_said(vllm, monkeypatch) -> None:
    """vLLM's bare AssertionError, on an H200 on which other runs were starting."""

    def sleep(self: Any, level: int) -> None:
        assert level == 2
        raise AssertionError("Memory usage increased after sleeping.")

    monkeypatch.setattr(FakeLLM, "sleep", sleep, raising=False)
    with pytest.raises(UserError, match="another process takes memory there; give the run the GPU to itself"):
        engine().sleep()


def test_stop_strings_need_a_tokenizer(vllm) -> None:
    with pytest.raises(UserError, match="stop_strings is set"):
        engine().generate([[1]], SamplingParams(1, stop_strings=("x",)), seed=0)


def test_refits_are_prepared_once_and_a_finding_stops_or_is_reported(vllm) -> None:
    calls: list[tuple[str, Any]] = []
    findings: list[str] = []
    refused = False

    def rpc(method: str, args: tuple = (), kwargs: Any = None) -> list[Any]:
        assert method == "dsv4_answer"
        method, args, _ = args
        calls.append((method, args))
        if method != "dsv4_refit_from_folder":
            return [("result", {})] * 2
        if refused:
            return [("refused", "the transfer ended"), ("result", {"version": 3, "findings": [], "notes": []})]
        report = {"version": 3, "findings": [], "notes": ["decided"]}
        return [("result", report), ("result", {**report, "findings": list(findings)})]

    for on_finding in ("stop", "warn"):
        findings.clear()
        calls.clear()
        rollout = engine(refit_on_finding=on_finding, refit_checks="all")
        rollout.llm.collective_rpc = rpc
        rollout.llm.reset_prefix_cache = lambda: calls.append(("reset", ()))
        assert rollout.update_weights_from_folder("buckets") == {
            "version": 3,
            "findings": [],
            "notes": ["decided"],
        }
        rollout.update_weights_from_folder("buckets")
        expected = [("dsv4_refit_from_folder", ("buckets",)), ("reset", ())]
        assert calls == [("dsv4_refit_prepare", ("all", False)), *expected, *expected]
        findings.append("norm: stale")
        if on_finding == "stop":
            with pytest.raises(UserError, match="version 3: 1 findings: worker 1: norm: stale"):
                rollout.update_weights_from_folder("buckets")
        else:
            assert rollout.update_weights_from_folder("buckets")["findings"] == ["worker 1: norm: stale"]
    refused = True
    with pytest.raises(UserError, match="worker 0: the transfer ended"):
        rollout.update_weights_from_folder("buckets")


@pytest.mark.parametrize(
    ("transport", "addresses", "method", "args"),
    [
        (
            "cuda_ipc",
            {"g": ("s", "k"), "h": ("t", "l")},
            "dsv4_refit_from_senders",
            ({"g": ("s", "k"), "h": ("t", "l")},),
        ),
        ("shared_memory", {"g": ("s", "k")}, "dsv4_refit_from_sender", ("s", "k")),
        ("broadcast", {"g": ("h", 5, 1, 2)}, "dsv4_refit_by_broadcast", ({"g": ("h", 5, 1, 2)}, 3)),
    ],
)
@pytest.mark.parametrize("on_finding", ["stop", "warn"])
def test_weights_come_from_senders(
    vllm, monkeypatch: pytest.MonkeyPatch, caplog, transport, addresses, method, args, on_finding
) -> None:
    """Prepared once; every worker is asked; what one of them finds ends the run unless the recipe says to go on."""
    calls: list[tuple[str, Any]] = []
    report = {"version": 4, "findings": [], "notes": [], "bytes": 8}

    def rpc(self: FakeLLM, name: str, args: Any = (), kwargs: Any = None) -> list[Any]:
        calls.append((args[0], args[1]))
        findings = ["stale"] if len(calls) > 2 else []
        return [("result", report), ("result", {**report, "findings": findings})]

    rollout = engine(refit_checks="all", refit_on_finding=on_finding)
    monkeypatch.setattr(FakeLLM, "collective_rpc", rpc)
    monkeypatch.setattr(FakeLLM, "reset_prefix_cache", lambda self: None, raising=False)
    assert rollout.update_weights_from_senders(transport, addresses, 3)["findings"] == []
    assert calls == [("dsv4_refit_prepare", ("all", False)), (method, args)]
    if on_finding == "stop":
        with pytest.raises(UserError, match="refit of version 4: 1 findings: worker 1: stale"):
            rollout.update_weights_from_senders(transport, addresses, 3)
    else:
        assert rollout.update_weights_from_senders(transport, addresses, 3)["findings"] == ["worker 1: stale"]
        assert "worker 1: stale" in caplog.text
    assert calls[2:] == [(method, args)]
