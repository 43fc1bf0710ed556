"""NeMo-RL's loss function in the place of ours, on the ranks of the policy."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.grpo.metrics import mismatch_metrics, to_floats
from nemo_rl_dsv4.grpo.reductions import combined_mask

OUR_METRICS = ("rollout_corr/kl", "training/rollout_probs_diff_mean", "training/rollout_probs_diff_max")
"""Mismatch metrics that NeMo-RL's loss does not report."""


class UpstreamLoss:
    """A loss of NeMo-RL that takes log-probabilities, called as the policy's ranks call a loss.

    Shapes: b rows of a micro-batch, S tokens.

    Args:
        loss_fn: NeMo-RL's loss object.
        batch_type: NeMo-RL's `BatchedDataDict`.

    Raises:
        UserError: the loss wants logits or another model's outputs.
    """

    def __init__(self, loss_fn: Any, batch_type: Any) -> None:
        kind = getattr(getattr(loss_fn, "input_type", None), "value", None)
        if kind != "logprob":
            raise UserError(
                f"loss {type(loss_fn).__name__} takes {kind!r} as input; the policy computes log-probabilities only: "
                "use a loss such as ClippedPGLossFn"
            )
        self.loss_fn, self.batch_type = loss_fn, batch_type

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: Mapping[str, Tensor],
        *,
        global_valid_seqs: float,
        global_valid_tokens: float,
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss of a micro-batch and its metrics.

        Args:
            next_token_logprobs: [b, S - 1], with gradient.
            data: the rows, under NeMo-RL's names.
            global_valid_seqs: sum of sample_mask over the global batch.
            global_valid_tokens: trained tokens of the global batch.
        """
        # The masks are made for exact zeros: NeMo-RL multiplies by integer masks, the policy's tensors are float.
        loss, metrics = self.loss_fn(
            next_token_logprobs=next_token_logprobs,
            data=self.batch_type(dict(data)),
            global_valid_seqs=torch.tensor(global_valid_seqs),
            global_valid_toks=torch.tensor(global_valid_tokens),
        )
        numbers = {name: float(value) for name, value in metrics.items()}
        return loss, numbers | self._mismatch(next_token_logprobs, data, global_valid_tokens)

    def _mismatch(
        self, next_token_logprobs: Tensor, data: Mapping[str, Tensor], global_valid_tokens: float
    ) -> dict[str, float]:
        on_policy = getattr(self.loss_fn, "force_on_policy_ratio", False)
        trained = next_token_logprobs.detach() if on_policy else data["prev_logprobs"][:, 1:]
        mask = combined_mask(data["token_mask"][:, 1:].to(torch.float32), data["sample_mask"].to(torch.float32))
        found = mismatch_metrics(trained, data["generation_logprobs"][:, 1:], mask, global_valid_tokens)
        return to_floats({name: found[name] for name in OUR_METRICS})

    def __reduce__(self) -> tuple[Any, ...]:
        # A rank first makes NeMo-RL importable, which unpickling the loss alone would not do.
        return _restore, (pickle.dumps((self.loss_fn, self.batch_type)),)


def _restore(blob: bytes) -> UpstreamLoss:
    from nemo_rl_dsv4.integrations.nemo_rl.patches import import_nemo_rl

    import_nemo_rl()
    return UpstreamLoss(*pickle.loads(blob))
