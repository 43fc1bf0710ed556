"""The refit on a GPU: the bytes of the CPU, the checksums of the CPU, and CUDA IPC to another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nemo_rl_dsv4.refit import SourceScales, export_weights
from nemo_rl_dsv4.refit.buckets import write_buckets
from nemo_rl_dsv4.refit.manifest import read_bucket, write_bucket
from nemo_rl_dsv4.refit.transport.shared import SharedSender

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
State = dict[str, torch.Tensor]


def on_gpu(state: State) -> State:
    return {key: value.cuda() for key, value in state.items()}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize("profile", ["vllm-hopper", "deepseek-reference", "bf16"])
def test_export_and_checksums_are_those_of_the_cpu(training_once: State, profile: str) -> None:
    cpu = list(export_weights(training_once, profile))
    gpu = list(export_weights(on_gpu(training_once), profile))
    for (name, a), (other, b) in zip(cpu, gpu, strict=True):
        assert name == other
        assert torch.equal(raw(a), raw(b)), name
    capacity = sum(tensor.numel() * tensor.element_size() + 16 for _, tensor in cpu)
    manifests = []
    for items, device in ((cpu, "cpu"), (gpu, "cuda")):
        buffer = torch.empty(capacity, dtype=torch.uint8, device=device)
        manifests.append(write_bucket(items, buffer, version=1, index=0, last=True))
        assert len(list(read_bucket(manifests[-1], buffer))) == len(items)
    assert manifests[0] == manifests[1]


@pytest.mark.parametrize("coarser", [None, 4.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_buckets_filled_on_the_gpu_are_those_of_the_cpu(
    training_once: State, dtype: torch.dtype, coarser: float | None
) -> None:
    """Stacks with whole blocks, quantized straight into the buckets; the manifests hold checksums of all bytes.

    With source scales that are coarser than those of the weights' own rule, as a checkpoint's may be.
    """
    generator = torch.Generator().manual_seed(0)
    experts = {
        "model.layers.9.mlp.experts.gate_and_up_projs": torch.randn(7, 512, 768, generator=generator).to(dtype),
        "model.layers.9.mlp.experts.down_projs": torch.randn(7, 384, 512, generator=generator).to(dtype),
    }
    scales = SourceScales()
    if coarser is not None:
        experts = {key: value.sign() * 0.5 for key, value in experts.items()}
        experts["model.layers.9.mlp.experts.down_projs"][3, 5, 200] = 0.71875
        stream = export_weights(experts, "vllm-hopper")
        scales = SourceScales((f"{n[:-5]}weight", t * coarser) for n, t in stream if n.endswith("scale"))
    state = {**training_once, **experts}
    manifests = []
    for where, device in ((state, "cpu"), (on_gpu(state), "cuda")):
        memory = torch.zeros(4 * 3 * 512 * 384, dtype=torch.uint8, device=device)
        filled = write_buckets(
            export_weights(where, "vllm-hopper", source_scales=scales), lambda _, memory=memory: memory, version=1
        )
        manifests.append([manifest for manifest, _ in filled])
    assert len(manifests[0]) > 2
    assert manifests[0] == manifests[1]


def test_another_process_maps_the_buckets_of_this_gpu(training_once: State, official_once: State) -> None:
    program = (
        "import json, sys\n"
        "from nemo_rl_dsv4.refit.transport.protocol import receive_staged\n"
        "from nemo_rl_dsv4.refit.transport.shared import Address, SharedReceiver\n"
        "given = json.loads(sys.argv[1])\n"
        "expected = {name: tuple(shape) for name, shape in given['expected'].items()}\n"
        "for _ in range(2):\n"
        "    staged = receive_staged(SharedReceiver(Address(*given['address']), timeout=60), expected, 'cuda')\n"
        "    print(staged.version, staged.checksum)\n"
    )
    sender = SharedSender(capacity_bytes=400_000, timeout=60, device=torch.device("cuda"))
    expected = {name: list(value.shape) for name, value in official_once.items()}
    given = json.dumps({"expected": expected, "address": [sender.address.socket, sender.address.key]})
    root = Path(__file__).parents[2]
    engine = subprocess.Popen(
        [sys.executable, "-c", program, given],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])},
    )
    try:
        wanted = []
        for version in (1, 2):
            report = sender.send(export_weights(on_gpu(training_once), "vllm-hopper"), version=version)
            wanted += [str(version), report.checksum]
        assert engine.communicate(timeout=60)[0].split() == wanted
    finally:
        engine.kill()
        sender.close()
