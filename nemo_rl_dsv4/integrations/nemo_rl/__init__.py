"""The same policy, rollout engines and recipes under NeMo-RL's own `grpo_train`.

`run` composes NeMo-RL's logger, checkpointer, dataloader, collate function, loss and environment registry with this
package's policy and engines. Nothing else in the package knows NeMo-RL.
"""
