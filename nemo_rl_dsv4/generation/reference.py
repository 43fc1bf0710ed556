"""The CPU rollout engine: transformers' DeepSeek-V4 with a KV cache and an FP8 engine's numerics.

It is a second implementation of the model, fed only through the refit exporter (FP8 bytes + UE8M0 scales) and rounded
by a rollout profile, so on a laptop it plays the part vLLM plays on a cluster: any difference between what the trainer
computes and what the engine computes shows up as `gen_kl_error`.

Sequences of one batch share the absolute position: prompts of unequal length are fed forward together, and a sequence
whose prompt has ended feeds back its own samples. Nothing is ever left-padded, which would shift the compressors'
windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers import DynamicCache
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.generation.completion import Completion
from nemo_rl_dsv4.generation.engine_numerics import install_engine_numerics
from nemo_rl_dsv4.generation.rounding import install_rollout_rounding
from nemo_rl_dsv4.generation.route_capture import RouteCapture
from nemo_rl_dsv4.generation.sampling import SamplingParams, request_uniforms, sample_tokens, token_logprobs
from nemo_rl_dsv4.model.checkpoint_format import transformers_config
from nemo_rl_dsv4.numerics.profiles import RolloutProfile
from nemo_rl_dsv4.refit.receive import receive_weights
from nemo_rl_dsv4.refit.report import Checks, RefitReport


class ReferenceEngine:
    """A rollout engine in one process.

    Args:
        hf_config: the model's official `config.json` as a dictionary.
        profile: the engine whose rounding it imitates; `bf16` rounds nothing.
        max_batch_size: most sequences decoded together.
        length_slack: most tokens by which prompt lengths in one batch may differ.
        experts: transformers' implementation of the expert products.
        max_length: most tokens of prompt and response together; a response is cut there. None for the model's limit.
        decode: token ids -> text, needed only for stop strings.
        capture_routes: record the experts that every token was given.
        dtype: of weights and activations, float32 or bfloat16; with bfloat16 it computes in float32 and rounds where an
            FP8 engine's kernels do.
    """

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        profile: RolloutProfile,
        *,
        max_batch_size: int = 128,
        length_slack: int = 12,
        experts: str = "eager",
        max_length: int | None = None,
        decode: Callable[[list[int]], str] | None = None,
        capture_routes: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        config = transformers_config(dict(hf_config))
        if profile.yarn_on_window_layers:
            rope: Any = config.rope_parameters
            rope["main"] = {**rope["compress"], "rope_theta": rope["main"]["rope_theta"]}
        config._attn_implementation = "eager"
        config._experts_implementation = experts
        self.config = config
        self.profile = profile
        self.max_batch_size, self.length_slack, self.decode = max_batch_size, length_slack, decode
        self.max_length = min(int(config.max_position_embeddings), max_length or int(config.max_position_embeddings))
        self.model = hf.DeepseekV4ForCausalLM(config).float().eval().requires_grad_(False)
        install_engine_numerics(self.model, dtype, profile)
        self.rounded_sites = install_rollout_rounding(self.model, profile)
        self.route_capture = RouteCapture(self.model) if capture_routes else None
        self.has_weights = False

    def update_weights(
        self, stream: Iterable[tuple[str, torch.Tensor]], checksum: str | None = None, *, checks: Checks = "sampled"
    ) -> RefitReport:
        """Load what the refit exporter yields, in place, and return the report.

        Args:
            stream: official names with tensors.
            checksum: what the sender computed over them.
            checks: see `receive_weights`.

        Raises:
            UserError: the stream is incomplete or damaged; the engine keeps the weights it had.
        """
        report = receive_weights(self.model, iter(stream), checksum=checksum, checks=checks)
        self.has_weights = True
        return report

    def generate(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        seed: int,
        request_ids: list[int] | None = None,
        on_finished: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Continue every prompt.

        Args:
            prompts: token ids, each at least one.
            params: how to sample and stop.
            seed: with `request_ids` it fixes every draw.
            request_ids: one number a prompt, default its index.
            on_finished: called with the number of sequences each batch completed.

        Returns:
            One completion a prompt, in the order given.

        Raises:
            UserError: no weights yet, an empty prompt, or a sequence beyond the model's limit.
        """
        self._check(prompts, params)
        request_ids = list(range(len(prompts))) if request_ids is None else request_ids
        uniforms = request_uniforms(seed, request_ids, params.max_new_tokens)
        done: list[Completion | None] = [None] * len(prompts)
        for rows in self._batches([len(p) for p in prompts]):
            finished = self._generate_batch([prompts[i] for i in rows], uniforms[rows], params)
            for i, completion in zip(rows, finished, strict=True):
                done[i] = completion
            if on_finished is not None:
                on_finished(len(rows))
        return [completion for completion in done if completion is not None]

    def _check(self, prompts: list[list[int]], params: SamplingParams) -> None:
        if not self.has_weights:
            raise UserError("the engine has no weights yet: refit it before generating")
        if any(not p for p in prompts):
            empty = next(i for i, p in enumerate(prompts) if not p)
            raise UserError(f"prompt {empty} is empty; wanted a token or more")
        longest = max((len(p) for p in prompts), default=0)
        if longest >= self.max_length:
            raise UserError(
                f"a prompt of {longest} tokens leaves no room for a response: sequences may have {self.max_length} "
                "(policy.max_total_sequence_length, or the model's max_position_embeddings)"
            )
        if params.stop_strings and self.decode is None:
            raise UserError("stop_strings need a tokenizer; give the engine one")

    def _batches(self, lengths: list[int]) -> Iterator[list[int]]:
        order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
        start = 0
        while start < len(order):
            stop = start
            shortest = lengths[order[start]]
            while (
                stop < len(order)
                and stop - start < self.max_batch_size
                and lengths[order[stop]] - shortest <= self.length_slack
            ):
                stop += 1
            yield order[start:stop]
            start = stop

    @torch.inference_mode()
    def _generate_batch(
        self, prompts: list[list[int]], uniforms_BN: torch.Tensor, params: SamplingParams
    ) -> list[Completion]:
        batch, lengths = len(prompts), torch.tensor([len(p) for p in prompts])
        shortest, longest = int(lengths.min()), int(lengths.max())
        tokens_BT = torch.zeros(batch, longest + params.max_new_tokens, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens_BT[row, : len(prompt)] = torch.tensor(prompt)
        logprobs_BN = torch.zeros(batch, params.max_new_tokens)
        stop_ids = torch.tensor(sorted(params.stop_token_ids), dtype=torch.long)
        count_B = torch.zeros(batch, dtype=torch.long)
        limit_B = (self.max_length - lengths).clamp(max=params.max_new_tokens)
        stopped_B = torch.zeros(batch, dtype=torch.bool)
        rows = torch.arange(batch)

        if self.route_capture is not None:
            self.route_capture.start()
        cache = DynamicCache(config=self.config)
        position, inputs = shortest, tokens_BT[:, :shortest]
        while True:
            logits_BV = self.model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[
                :, -1
            ]
            active_B = (position >= lengths) & ~stopped_B & (count_B < limit_B)
            if active_B.any():
                draw = uniforms_BN[rows, count_B.clamp(max=params.max_new_tokens - 1)]
                sampled_B = sample_tokens(logits_BV, draw, params)
                chosen_logprobs = token_logprobs(logits_BV, sampled_B)
                active = rows[active_B]
                tokens_BT[active, position] = sampled_B[active_B]
                logprobs_BN[active, count_B[active_B]] = chosen_logprobs[active_B]
                count_B[active_B] += 1
                stopped_B |= active_B & torch.isin(sampled_B, stop_ids)
                if params.stop_strings:
                    self._stop_on_strings(tokens_BT, lengths, count_B, active_B, stopped_B, params.stop_strings)
            if bool(((count_B >= limit_B) | stopped_B).all()):
                break
            inputs = tokens_BT[:, position : position + 1]
            position += 1
        routes_BTLK = None if self.route_capture is None else self.route_capture.take(batch)
        return [
            Completion(
                tokens_BT[i, lengths[i] : lengths[i] + count_B[i]].tolist(),
                logprobs_BN[i, : count_B[i]].tolist(),
                not bool(stopped_B[i]),
                None if routes_BTLK is None else routes_BTLK[i, : lengths[i] + count_B[i] - 1].clone(),
            )
            for i in range(batch)
        ]

    def _stop_on_strings(
        self,
        tokens_BT: torch.Tensor,
        lengths: torch.Tensor,
        count_B: torch.Tensor,
        active_B: torch.Tensor,
        stopped_B: torch.Tensor,
        stop_strings: tuple[str, ...],
    ) -> None:
        assert self.decode is not None
        for row in torch.nonzero(active_B).flatten().tolist():
            start = int(lengths[row])
            text = self.decode(tokens_BT[row, start : start + int(count_B[row])].tolist())
            if any(stop in text for stop in stop_strings):
                stopped_B[row] = True

    @torch.inference_mode()
    def score(self, sequences_BS: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of given tokens in one forward pass without a cache, for parity tests.

        Args:
            sequences_BS: int64 token ids, no padding.

        Returns:
            float32 [B, S]; position 0 is 0.
        """
        logits_BSV = self.model(input_ids=sequences_BS, use_cache=False).logits[:, :-1].float()
        logprobs = torch.log_softmax(logits_BSV, -1).gather(-1, sequences_BS[:, 1:, None]).squeeze(-1)
        return torch.nn.functional.pad(logprobs, (1, 0))
