"""vLLM rollout engines as Ray actors, in vLLM's own environment.

The actors run with another Python than the trainer (`python`), because vLLM and AutoModel pin different libraries.
Weights travel in memory of a GPU or of a host, by broadcast between hosts, or as buckets in a folder.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.exceptions import RayActorError

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.generation.engine_group import EngineGroup
from nemo_rl_dsv4.generation.engine_places import EnginePlace
from nemo_rl_dsv4.generation.python_of_engines import python_problem
from nemo_rl_dsv4.generation.vllm_settings import MAKE_VLLM, VLLM_PYTHON
from nemo_rl_dsv4.refit.delivery import Seat, Transport
from nemo_rl_dsv4.utils.ray_calls import get

if TYPE_CHECKING:
    from nemo_rl_dsv4.generation.completion import Completion
    from nemo_rl_dsv4.generation.sampling import SamplingParams
    from nemo_rl_dsv4.generation.vllm_settings import VllmSpec

SHARED_MEMORY = Path("/dev/shm")

log = logging.getLogger(__name__)


@ray.remote
class VllmActor:
    """One engine's process; vLLM is imported by `build`."""

    def build(self, spec: VllmSpec) -> dict[str, Any]:
        """Start the engine and return what it says of itself."""
        from nemo_rl_dsv4.generation.vllm_engine import VllmEngine

        self.engine = VllmEngine(spec)
        return self.engine.describe()

    def update_weights(self, folder: str) -> dict[str, Any]:
        """Refit from the buckets of a folder; see `VllmEngine.update_weights_from_folder`."""
        return self.engine.update_weights_from_folder(folder)

    def receive_weights(self, transport: str, addresses: Mapping[str, Any], version: int) -> dict[str, Any]:
        """See `VllmEngine.update_weights_from_senders`."""
        return self.engine.update_weights_from_senders(transport, addresses, version)

    def seats(self) -> list[Seat]:
        """Each worker's end of a refit: Ray's id of this node, and its GPU's name there."""
        node = ray.get_runtime_context().get_node_id()
        return [Seat(node, gpu) for gpu in self.engine.gpu_names()]

    def generate(
        self, prompts: list[list[int]], params: SamplingParams, seed: int, request_ids: list[int]
    ) -> list[Completion]:
        """Continue prompts; see `VllmEngine.generate`."""
        return self.engine.generate(prompts, params, seed=seed, request_ids=request_ids)

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """See `VllmEngine.score`."""
        return self.engine.score(sequences)

    def hidden_states(self, sequences: list[list[int]]) -> list[torch.Tensor]:
        """See `VllmEngine.hidden_states`."""
        return self.engine.hidden_states(sequences)

    def sleep(self) -> None:
        """See `VllmEngine.sleep`."""
        self.engine.sleep()

    def wake_up(self, *tags: str) -> None:
        """See `VllmEngine.wake_up`."""
        self.engine.wake_up(*tags)


def engine_python(chosen: str | None) -> str:
    """The Python that engines run with.

    Args:
        chosen: `policy.dsv4.vllm_python`; None takes `.venv-vllm` where it exists, else this interpreter.

    Raises:
        UserError: there is none with vLLM and Ray.
    """
    import importlib.util
    import sys

    if chosen is not None or Path(VLLM_PYTHON).is_file():
        path = VLLM_PYTHON if chosen is None else chosen
        problem = python_problem(path)
        if problem is not None:
            where = "the engines' Python" if chosen is None else "policy.dsv4.vllm_python"
            raise UserError(f"{where} is {path!r}, {problem}")
        return str(Path(path).absolute())
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            f"policy.generation.backend is vllm, but there is neither {VLLM_PYTHON} nor vllm in this environment; "
            f"make one with `{MAKE_VLLM}`, or name an interpreter with policy.dsv4.vllm_python"
        )
    return sys.executable


class VllmGeneration(EngineGroup):
    """A rollout on vLLM engines of one or several hosts.

    Args:
        params: the recipe's sampling parameters.
        pad_id: id that fills `output_ids` behind a response.
        places: host and GPUs of each engine. They may be GPUs that train as well.
        python: interpreter of the engines; see `engine_python`.
        environment: further environment variables of their processes.
        on_progress: called with the number of responses each time some are finished.
        timeout: most seconds without any engine finishing a task.
        bucket_bytes: size of a bucket of weights.
        transport: how the policy sends them, `policy.dsv4.refit.transport`.
        sleeps: put the engines to sleep whenever they do not generate; their settings need `sleep_mode`.
        folder: holds the buckets of `transport: folder`; every engine's host sees it. None takes memory of this host.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        pad_id: int,
        places: Sequence[EnginePlace],
        python: str,
        environment: Mapping[str, str],
        on_progress: Callable[[int], None] | None = None,
        timeout: float | None = 3600.0,
        bucket_bytes: int = 1 << 30,
        transport: Transport = "auto",
        sleeps: bool = False,
        folder: Path | None = None,
    ) -> None:
        self.bucket_bytes, self.transport, self.sleeps, self.asleep = bucket_bytes, transport, sleeps, False
        self._loaded: Any = None
        memory = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
        self._folder = tempfile.mkdtemp(prefix="dsv4-refit-", dir=folder or memory)

        def start(number: int) -> Any:
            return VllmActor.options(**places[number].actor_options(python, environment)).remote()

        super().__init__(start, len(places), params, pad_id=pad_id, on_progress=on_progress, timeout=timeout)

    def bucket_folder(self, version: int) -> Path:
        """Where the policy puts the buckets of a version; older ones stay until it is loaded."""
        return Path(self._folder) / f"version-{version}"

    def update_weights(self, weights: Any) -> dict[str, float]:
        """Load the buckets of a folder (`bucket_folder`) into every engine, and drop those of older versions.

        Or what a policy sends as long as it holds these weights (`policy.sent_weights.SentWeights`). Engines that
        sleep are woken for it, and sleep on where the load fails: they have no weights then.
        """
        folder = None if hasattr(weights, "deliver") else Path(weights)
        if self.asleep:
            for actor, error in self._wake("weights"):
                self._replace(actor, error)  # a new engine is awake
        try:
            report = super().update_weights(weights if folder is None else str(folder))
            self._loaded = weights
        except BaseException:
            if self.asleep:
                self._sleep_after_failure()
            raise
        if self.asleep:
            for actor, error in self._wake("kv_cache"):
                self._revive(actor, error)  # the others have these weights
            self.asleep = False
        for old in Path(self._folder).iterdir():
            if old != folder:
                shutil.rmtree(old, ignore_errors=True)
        return report

    def prepare_for_generation(self) -> None:
        """Wake engines that sleep; sleep took their weights, so they get those of the last refit again."""
        if self.asleep:
            self.update_weights(self._loaded)

    def finish_generation(self) -> None:
        """Give the GPU's memory to the policy, weights included, once there are buckets to load them from again."""
        if self.sleeps and self._loaded is not None and not self.asleep:
            self._sleep()
            self.asleep = True

    def _sleep(self) -> None:
        for _, result in self._on_all("sleep"):
            if isinstance(result, RayActorError):
                log.warning("a rollout engine died before it was put to sleep (%s)", result)

    def _sleep_after_failure(self) -> None:
        try:
            self._sleep()
        except Exception as error:  # what failed before says more
            log.warning("the rollout engines could not be put back to sleep (%s)", error)

    def _wake(self, tag: str) -> list[tuple[Any, RayActorError]]:
        """Wake all engines; those that are dead, with their errors."""
        answers = self._on_all("wake_up", tag)
        return [(actor, result) for actor, result in answers if isinstance(result, RayActorError)]

    def _on_all(self, method: str, *args: Any) -> list[tuple[Any, Any]]:
        """Call a method of every engine; each with its result, or with the error of one that is dead."""
        calls = [(actor, getattr(actor, method).remote(*args)) for actor in self.actors]
        results = []
        for actor, call in calls:
            try:
                results.append((actor, get([call])[0]))
            except RayActorError as error:
                results.append((actor, error))
        return results

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """Log-probabilities of every token but the first, by one prefill of each sequence on the first engine."""
        return get([self.actors[0].score.remote(sequences)])[0]

    def shutdown(self) -> None:
        """End the processes and free the buckets."""
        super().shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)
