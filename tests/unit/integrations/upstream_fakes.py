"""Interfaces of a trainer of the kind that NeMo-RL is, written for these tests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import UserDict


class Batch(UserDict):
    """A batch that is no dict."""


class PolicyInterface(ABC):
    @abstractmethod
    def get_logprobs(self, data, timer=None): ...

    @abstractmethod
    def train(self, data, loss_fn, eval_mode=False, *, gbs=None, mbs=None, timer=None): ...

    @abstractmethod
    def prepare_for_training(self, *args, **kwargs): ...

    @abstractmethod
    def shutdown(self): ...

    def offload_to_cpu(self):
        return "the interface's own"


class GenerationInterface(ABC):
    @abstractmethod
    def generate(self, data, greedy): ...

    @abstractmethod
    def prepare_for_generation(self, *args, **kwargs): ...

    @property
    def requires_kv_scale_sync(self):
        return False

    def get_logger_metrics(self):
        return {}


class Synchronizer(ABC):
    @abstractmethod
    def sync_weights(self, *, timer=None, kv_scales=None): ...

    @property
    @abstractmethod
    def is_stale(self): ...
