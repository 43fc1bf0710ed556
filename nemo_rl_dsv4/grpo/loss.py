"""The clipped policy gradient loss of GRPO and DAPO.

Shapes: B sequences, S tokens, T = S - 1 predicted positions: position i of a [B, T] tensor belongs to token i + 1.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_rl_dsv4.grpo.kl import kl_penalty
from nemo_rl_dsv4.grpo.metrics import entropy_estimate, masked_extreme, mismatch_metrics, to_floats
from nemo_rl_dsv4.grpo.reductions import (
    Normaliser,
    combined_mask,
    divide_by_count,
    fill_masked,
    masked_sum,
    mean_per_sequence,
    sequence_mean,
    token_mean,
)
from nemo_rl_dsv4.grpo.rollout_correction import (
    Correction,
    geometric_mean_ratio,
    icepop_weights,
    importance_weights,
    mask_sequences_by_geometric_mean,
    sequence_importance_weights,
    truncate_token_weights,
)
from nemo_rl_dsv4.grpo.settings import LossSettings


def clipped_policy_gradient(advantages: Tensor, ratio: Tensor, clipped_ratio: Tensor) -> Tensor:
    """max(-A r, -A clip(r)) per token: the pessimistic side (PPO, arXiv 1707.06347)."""
    return torch.maximum(-advantages * ratio, -advantages * clipped_ratio)


def dual_clip(token_loss: Tensor, advantages: Tensor, ratio_clip_c: float | None) -> Tensor:
    """min(loss, -A c) where A < 0, so that a huge ratio cannot push further (arXiv 1912.09729); None: unchanged."""
    if ratio_clip_c is None:
        return token_loss
    return torch.where(advantages < 0, torch.minimum(token_loss, -advantages * ratio_clip_c), token_loss)


class _Tokens(NamedTuple):
    """The inputs of one micro-batch, float32, aligned with the predictions, padding replaced by 0."""

    curr_BT: Tensor
    prev_BT: Tensor
    rollout_BT: Tensor
    advantages_BT: Tensor
    token_mask_BT: Tensor
    sample_mask_B: Tensor
    mask_BT: Tensor


class ClippedPGLoss:
    """Loss of a micro-batch; the parts of all micro-batches and ranks sum to the loss of the global batch."""

    def __init__(self, settings: LossSettings) -> None:
        self.settings = settings

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: Mapping[str, Tensor],
        *,
        global_valid_seqs: Normaliser,
        global_valid_tokens: Normaliser,
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss of a micro-batch and its metrics.

        Args:
            next_token_logprobs: log-probability of token i + 1 at position i under the weights being trained,
                [B, S - 1] of any float dtype, with gradient. Computed on in float32.
            data: `advantages`, `prev_logprobs` (not read with force_on_policy_ratio), `generation_logprobs`,
                `token_mask` [B, S], `sample_mask` [B]; with a KL penalty `reference_policy_logprobs` [B, S].
            global_valid_seqs: sum of sample_mask over the global batch.
            global_valid_tokens: sum of token_mask[:, 1:] * sample_mask over the global batch.

        Returns:
            The scalar loss, to be summed over micro-batches and ranks (a data-parallel wrapper that averages gradients
            needs it times the number of ranks), and metrics name -> float under NeMo-RL's names; sum these too, except
            `*_min` and `*_max` (see :func:`nemo_rl_dsv4.grpo.metrics.combine_micro_batches`).

        Raises:
            ValueError: a tensor is missing or has the wrong shape.
        """
        tokens = self._read(next_token_logprobs, data)
        ratio, clipped_ratio = self.policy_ratios(tokens.curr_BT, tokens.prev_BT, tokens.token_mask_BT)
        token_loss = clipped_policy_gradient(tokens.advantages_BT, ratio, clipped_ratio)
        token_loss = dual_clip(token_loss, tokens.advantages_BT, self.settings.ratio_clip_c)
        correction = self.rollout_correction(tokens.prev_BT, tokens.rollout_BT, tokens.token_mask_BT, tokens.mask_BT)
        if self.settings.use_importance_sampling_correction:
            token_loss = correction.weights * token_loss
        actor_loss = self._mean(token_loss, tokens, global_valid_seqs, global_valid_tokens)
        kl = self._kl_term(tokens, data, global_valid_seqs, global_valid_tokens)
        loss = actor_loss + self.settings.reference_policy_kl_penalty * kl

        with torch.no_grad():
            metrics = {
                "loss": loss,
                "kl_penalty": kl,
                "num_valid_samples": tokens.sample_mask_B.sum(),
                **self._ratio_metrics(ratio, clipped_ratio, tokens.mask_BT, global_valid_tokens),
                **self._correction_metrics(correction, tokens, global_valid_seqs, global_valid_tokens),
                **mismatch_metrics(tokens.prev_BT, tokens.rollout_BT, tokens.mask_BT, global_valid_tokens),
                "approx_entropy": token_mean(
                    entropy_estimate(tokens.curr_BT, tokens.rollout_BT), tokens.mask_BT, global_valid_tokens
                ),
            }
        return loss, to_floats(metrics)

    def policy_ratios(self, curr_BT: Tensor, prev_BT: Tensor, token_mask_BT: Tensor) -> tuple[Tensor, Tensor]:
        """p_curr / p_prev and its clipped value, float32 [B, T].

        With sequence_level_importance_ratios one ratio a sequence: exp of the mean log ratio (GSPO, arXiv 2507.18071).
        With force_on_policy_ratio both are 1 with the gradient of log p.
        """
        if self.settings.force_on_policy_ratio:
            ratio = (curr_BT - curr_BT.detach()).exp()
            return ratio, ratio
        log_ratio = curr_BT - prev_BT
        if self.settings.sequence_level_importance_ratios:
            log_ratio = mean_per_sequence(log_ratio, token_mask_BT).unsqueeze(-1).expand_as(log_ratio)
        ratio = log_ratio.exp()
        return ratio, ratio.clamp(1 - self.settings.ratio_clip_min, 1 + self.settings.ratio_clip_max)

    def rollout_correction(
        self, prev_BT: Tensor, rollout_BT: Tensor, token_mask_BT: Tensor, mask_BT: Tensor
    ) -> Correction:
        """Importance weights of training over rollout as the settings ask: see :mod:`rollout_correction`."""
        s = self.settings
        if s.sequence_level_importance_ratios:
            weights = sequence_importance_weights(prev_BT, rollout_BT, mask_BT)
        else:
            weights = importance_weights(prev_BT, rollout_BT)
        if s.truncated_importance_sampling_type is None:
            return Correction(weights, None)
        high = s.truncated_importance_sampling_ratio
        assert high is not None  # LossSettings refuses a type without a ratio
        low = s.truncated_importance_sampling_ratio_min or 0.0
        if s.truncated_importance_sampling_type == "tis":
            return truncate_token_weights(weights, low, high)
        if s.truncated_importance_sampling_type == "icepop":
            return icepop_weights(weights, low, high)
        geometric_mean_B = geometric_mean_ratio(prev_BT, rollout_BT, token_mask_BT)
        return mask_sequences_by_geometric_mean(weights, geometric_mean_B, low, high)

    def _read(self, next_token_logprobs: Tensor, data: Mapping[str, Tensor]) -> _Tokens:
        token_mask_BT = _column(data, "token_mask", next_token_logprobs).to(torch.float32)
        sample_mask_B = data["sample_mask"].to(torch.float32)
        mask_BT = combined_mask(token_mask_BT, sample_mask_B)

        def aligned(values_BT: Tensor) -> Tensor:
            return fill_masked(values_BT.to(torch.float32), mask_BT)

        curr_BT = aligned(next_token_logprobs)
        if self.settings.force_on_policy_ratio:
            prev_BT = curr_BT.detach()
        else:
            prev_BT = aligned(_column(data, "prev_logprobs", next_token_logprobs)).detach()
        return _Tokens(
            curr_BT=curr_BT,
            prev_BT=prev_BT,
            rollout_BT=aligned(_column(data, "generation_logprobs", next_token_logprobs)).detach(),
            advantages_BT=aligned(_column(data, "advantages", next_token_logprobs)).detach(),
            token_mask_BT=token_mask_BT,
            sample_mask_B=sample_mask_B,
            mask_BT=mask_BT,
        )

    def _kl_term(
        self,
        tokens: _Tokens,
        data: Mapping[str, Tensor],
        global_valid_seqs: Normaliser,
        global_valid_tokens: Normaliser,
    ) -> Tensor:
        """Local part of the mean KL to the reference policy, before the penalty factor: a scalar."""
        s = self.settings
        if s.reference_policy_kl_penalty == 0:
            return tokens.curr_BT.new_zeros(())
        reference = _column(data, "reference_policy_logprobs", tokens.curr_BT).to(torch.float32)
        sampler = tokens.rollout_BT if s.use_on_policy_kl_approximation else tokens.curr_BT.detach()
        per_token = kl_penalty(
            tokens.curr_BT,
            fill_masked(reference, tokens.mask_BT),
            kl_type=s.reference_policy_kl_type,
            sampling_weight=(tokens.curr_BT - sampler).exp(),
            input_clamp=s.kl_input_clamp_value,
            output_clamp=s.kl_output_clamp_value,
        )
        return self._mean(per_token, tokens, global_valid_seqs, global_valid_tokens)

    def _mean(
        self, values_BT: Tensor, tokens: _Tokens, global_valid_seqs: Normaliser, global_valid_tokens: Normaliser
    ) -> Tensor:
        if self.settings.token_level_loss:
            return token_mean(values_BT, tokens.mask_BT, global_valid_tokens)
        return sequence_mean(values_BT, tokens.token_mask_BT, tokens.sample_mask_B, global_valid_seqs)

    @staticmethod
    def _ratio_metrics(
        ratio: Tensor, clipped_ratio: Tensor, mask_BT: Tensor, global_valid_tokens: Normaliser
    ) -> dict[str, Tensor]:
        metrics: dict[str, Tensor] = {}
        for name, values in (("probs_ratio", ratio), ("probs_ratio_clamped", clipped_ratio)):
            metrics[name] = token_mean(values, mask_BT, global_valid_tokens)
            metrics[f"{name}_min"] = masked_extreme(values, mask_BT, largest=False)
            metrics[f"{name}_max"] = masked_extreme(values, mask_BT, largest=True)
        return metrics

    @staticmethod
    def _correction_metrics(
        correction: Correction, tokens: _Tokens, global_valid_seqs: Normaliser, global_valid_tokens: Normaliser
    ) -> dict[str, Tensor]:
        """Mean weight, and the share of tokens (or sequences) outside the bounds."""
        weights = correction.weights
        if weights.shape != tokens.mask_BT.shape:
            mean_weight = divide_by_count(masked_sum(weights.squeeze(-1), tokens.sample_mask_B), global_valid_seqs)
        else:
            mean_weight = token_mean(weights, tokens.mask_BT, global_valid_tokens)
        metrics = {"sampling_importance_ratio": mean_weight}
        outside = correction.out_of_bounds
        if outside is not None and outside.dim() == 1:
            share = masked_sum(outside.to(torch.float32), tokens.sample_mask_B)
            metrics["is_oob_ratio"] = divide_by_count(share, global_valid_seqs)
        elif outside is not None:
            outside_BT = outside.expand_as(tokens.mask_BT).to(torch.float32)
            metrics["is_oob_ratio"] = token_mean(outside_BT, tokens.mask_BT, global_valid_tokens)
        return metrics


def _column(data: Mapping[str, Tensor], name: str, like_BT: Tensor) -> Tensor:
    """data[name] without its first position, checked against the shape of the predictions."""
    if name not in data:
        raise ValueError(f"loss: the batch has no '{name}'; it has {sorted(data)}")
    values_BS = data[name]
    wanted = (like_BT.shape[0], like_BT.shape[1] + 1)
    if tuple(values_BS.shape) != wanted:
        raise ValueError(
            f"loss: '{name}' has shape {tuple(values_BS.shape)}; {wanted} is wanted, one more than the logprobs"
        )
    return values_BS[:, 1:]
