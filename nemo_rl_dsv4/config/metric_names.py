"""Names of the metrics that the GRPO loop reports, without their prefix; a test compares them with a run's."""

TRAIN_METRICS = (
    "reward",
    "raw_reward",
    "loss",
    "grad_norm",
    "lr",
    "kl_penalty",
    "gen_kl_error",
    "policy_kl_error",
    "js_divergence_error",
    "token_mult_prob_error",
    "sampling_importance_ratio",
    "is_oob_ratio",
    "approx_entropy",
    "probs_ratio",
    "probs_ratio_min",
    "probs_ratio_max",
    "probs_ratio_clamped",
    "probs_ratio_clamped_min",
    "probs_ratio_clamped_max",
    "num_valid_samples",
    "num_rewards_clamped",
    "global_valid_seqs",
    "global_valid_toks",
    "advantages/mean",
    "advantages/max",
    "advantages/min",
    "mean_prompt_length",
    "mean_gen_tokens_per_sample",
    "max_gen_tokens_per_sample",
    "mean_total_tokens_per_sample",
    "total_num_tokens",
    "truncation_rate",
    "natural_termination_rate",
    "filtered_reward",
    "dynamic_sampling_num_gen_batches",
    "dynamic_sampling_num_discarded_valid_samples",
    "max_seq_mult_prob_error",
    "mean_seq_mult_prob_error",
    "min_seq_mult_prob_error",
    "max_seq_mult_prob_error_after_mask",
    "mean_seq_mult_prob_error_after_mask",
    "min_seq_mult_prob_error_after_mask",
    "num_masked_seqs_by_logprob_error",
    "reward_stderr",
    "router_overlap",
    "router_no_overlap_share",
    "router_missing_share",
    "router_hash_mismatches",
)
"""`train/NAME`. Some come with a setting only, such as `filtered_reward` with dynamic sampling."""


def validation_metrics(responses_per_problem: int) -> tuple[str, ...]:
    """`validation/NAME`; `pass_k` needs several responses a problem."""
    names = ("accuracy", "accuracy_stderr", "num_samples", "avg_length", "truncation_rate")
    return (*names, "pass_k") if responses_per_problem > 1 else names
