"""vLLM as the engine of a study: what is sent to it and read of it. The engine itself runs on a GPU."""

from types import SimpleNamespace

import pytest
import ray
import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.generation import vllm_engine, vllm_worker
from nemo_rl_dsv4.generation.completion import Completion
from nemo_rl_dsv4.generation.sampling import SamplingParams
from nemo_rl_dsv4.generation.vllm_settings import VllmSpec
from nemo_rl_dsv4.mismatch import engines
from nemo_rl_dsv4.refit.transport.file import read_folder


class Generation:
    """Stands for `VllmGeneration`: one actor whose calls answer at once."""

    bucket_bytes = 1 << 20

    def __init__(self, folder) -> None:
        self.folder, self.loaded, self.spec = folder, None, None
        answer = lambda function: SimpleNamespace(remote=function)  # noqa: E731
        self.actors = [
            SimpleNamespace(
                generate=answer(lambda prompts, params, seed, ids: [Completion([i], [-0.5], False) for i in ids]),
                hidden_states=answer(lambda sequences: [torch.tensor(sequences)]),
            )
        ]

    def build(self, spec):
        self.spec = spec
        return {"vllm": "0.26.0"}

    def bucket_folder(self, version):
        return self.folder / f"version-{version}"

    def update_weights(self, folder):
        self.loaded = [manifest.version for manifest, _ in read_folder(folder, timeout=5.0)]

    def score(self, sequences):
        return [[-float(token) for token in ids[1:]] for ids in sequences]


@pytest.fixture
def rollout(tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "get", lambda answers: answers)
    generation = Generation(tmp_path)
    stream = iter([("norm.weight", torch.ones(4))])
    return engines.VllmRollout(generation, VllmSpec("model", "vllm-hopper"), stream), generation  # type: ignore[arg-type]


def test_the_engine_gets_the_weights_and_records_routes(rollout) -> None:
    engine, generation = rollout
    assert generation.loaded == [1] and generation.spec.return_routed_experts
    assert engine.name == "vLLM 0.26.0" and engine.rows is None


def test_scores_lie_where_the_tokens_lie(rollout) -> None:
    engine, _ = rollout
    ids = torch.tensor([[7, 8, 9, 0], [1, 2, 0, 0]])
    scores = engine.score(ids, torch.tensor([3, 2]))
    assert scores.tolist() == [[0.0, -8.0, -9.0, 0.0], [0.0, -2.0, 0.0, 0.0]]
    assert [c.tokens for c in engine.generate([[1], [2]], SamplingParams(1), seed=0, request_ids=[4, 5])] == [[4], [5]]
    assert engine.hidden_states(ids)[0].tolist() == ids.tolist()


class Layer(torch.nn.Module):
    def forward(self, x):
        return x, x[:, None] * torch.ones(1, 2, 1), 0.5, 2.0


def worker_with(layers, monkeypatch):
    worker = object.__new__(vllm_worker.NumericsWorkerExtension)
    model = SimpleNamespace(model=SimpleNamespace(layers=layers))
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    mixing = SimpleNamespace(mhc_post_tilelang=lambda x, residual, post, res: post * x[:, None] + res * residual)
    monkeypatch.setattr(vllm_worker.importlib, "import_module", lambda name: mixing)
    return worker


def test_layers_are_captured_as_the_next_one_reads_them(monkeypatch) -> None:
    layers = [Layer(), Layer()]
    worker = worker_with(layers, monkeypatch)
    worker.dsv4_capture_start()
    for part in (torch.ones(3, 4), 2 * torch.ones(1, 4)):  # a prompt in two chunks
        for layer in layers:
            layer(part)
    kept = worker.dsv4_capture_stop()
    assert [tuple(layer.shape) for layer in kept] == [(4, 2, 4)] * 2
    assert kept[0][:, 0, 0].tolist() == [2.5, 2.5, 2.5, 5.0]
    layers[0](torch.ones(1, 4))
    worker.dsv4_capture_start()
    assert worker.dsv4_capture_stop() == []


def test_a_layer_of_another_kind_is_refused(monkeypatch) -> None:
    worker = worker_with([torch.nn.Identity()], monkeypatch)
    worker.dsv4_capture_start()
    with pytest.raises(UserError, match="layer 0 of this vLLM returns Tensor"):
        worker.model_runner.get_model().model.layers[0](torch.ones(1, 4))


def test_hidden_states_need_an_eager_engine() -> None:
    engine = object.__new__(vllm_engine.VllmEngine)
    engine.spec = VllmSpec("model", "vllm-hopper", enforce_eager=False)
    with pytest.raises(UserError, match="enforce_eager"):
        engine.hidden_states([[1, 2]])
    assert not ray.is_initialized()
