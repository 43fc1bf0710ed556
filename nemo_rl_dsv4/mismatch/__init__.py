"""How far the trainer's token probabilities are from the rollout's, and which rounding the distance comes from."""
