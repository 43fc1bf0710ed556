"""Buckets that an export fills in place hold the stream, byte for byte, whatever their size."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.checkpoint_format import AUTOMODEL
from nemo_rl_dsv4.model.official_names import fused_group
from nemo_rl_dsv4.model.quantized_weights import stored_codes
from nemo_rl_dsv4.model.weight_rounding import WeightRounding
from nemo_rl_dsv4.numerics import QuantSpec, get_profile
from nemo_rl_dsv4.refit import SourceScales, StreamTally, export_weights, pack_buckets
from nemo_rl_dsv4.refit.buckets import Bucket, fill_buckets, write_buckets
from nemo_rl_dsv4.refit.encode import Encoder
from nemo_rl_dsv4.refit.manifest import Manifest, read_bucket
from nemo_rl_dsv4.refit.report import BucketTally

State = dict[str, torch.Tensor]
EXPERT = 3 * 256 * 128
"""Codes of one expert of `wide_state`."""


@pytest.fixture(scope="module")
def wide_state(training_once: State) -> State:
    """A model's tensors and a layer of seven experts whose stacks hold whole blocks."""
    generator = torch.Generator().manual_seed(3)
    experts = {
        "model.layers.9.mlp.experts.gate_and_up_projs": torch.randn(7, 256, 256, generator=generator),
        "model.layers.9.mlp.experts.down_projs": torch.randn(7, 128, 256, generator=generator),
    }
    return {**training_once, **experts}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


@pytest.mark.parametrize("profile", ["vllm-hopper", "deepseek-reference", "bf16"])
@pytest.mark.parametrize("capacity", [EXPERT - 4000, EXPERT + 500, 3 * EXPERT + 1000, 1 << 22])
def test_buckets_hold_the_stream(wide_state: State, capacity: int, profile: str) -> None:
    """A bucket smaller than an expert, of one, of three with room to spare, and one for everything."""
    if profile == "bf16":
        capacity *= 4
    want = list(export_weights(wide_state, profile))
    memory = torch.full((capacity,), 7, dtype=torch.uint8)
    names, numbers, together, last = [], [], [], False
    for bucket in fill_buckets(export_weights(wide_state, profile), lambda _: memory):
        assert not last
        last = bucket.last
        numbers.append(bucket.index)
        assert max(p.offset + p.bytes for p in bucket.placed) <= capacity
        assert disjoint(bucket)
        together.append({fused_group(placement.name) for placement in bucket.placed})
        for name, tensor in bucket.items():
            wanted_name, wanted = want[len(names)]
            names.append(name)
            assert (name, tensor.dtype, tensor.shape) == (wanted_name, wanted.dtype, wanted.shape)
            assert torch.equal(raw(tensor), raw(wanted)), name
    assert last
    assert sum(map(len, together)) == len(set().union(*together))
    assert numbers == list(range(len(numbers)))
    assert names == [name for name, _ in want]


def disjoint(bucket: Bucket) -> bool:
    spans = sorted((p.offset, p.offset + p.bytes) for p in bucket.placed)
    return all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_experts_of_a_bucket_are_quantized_where_they_are_sent(
    wide_state: State, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two calls for three experts, each into the bucket itself, and nothing is copied there afterwards."""
    from nemo_rl_dsv4.refit.expert_stack import ExpertStack

    calls, write = [], ExpertStack.write

    def noted(self: ExpertStack, first: int, count: int, codes: torch.Tensor, *rest: torch.Tensor) -> None:
        calls.append((count, codes))
        write(self, first, count, codes, *rest)

    monkeypatch.setattr(ExpertStack, "write", noted)
    experts = {key: value for key, value in wide_state.items() if ".layers.9." in key}
    memory = torch.empty(3 * EXPERT + 1000, dtype=torch.uint8)
    count = len(list(fill_buckets(export_weights(experts, "vllm-hopper"), lambda _: memory)))
    assert count == 3
    assert [experts for experts, _ in calls] == [3, 3, 3, 3, 1, 1]
    assert all(codes.untyped_storage().data_ptr() == memory.data_ptr() for _, codes in calls)


def test_manifests_carry_what_a_receiver_compares(wide_state: State) -> None:
    tally, sent = StreamTally(), BucketTally()
    for _ in tally.watch(export_weights(wide_state, "vllm-hopper")):
        pass
    memory = torch.empty(2 * EXPERT + 1000, dtype=torch.uint8)
    for manifest, buffer in write_buckets(export_weights(wide_state, "vllm-hopper"), lambda _: memory, version=4):
        sent.add(manifest)
        again = Manifest.from_json(manifest.to_json())
        assert again == manifest
        assert len(list(read_bucket(again, buffer.clone()))) == len(manifest.entries)
        middle = manifest.entries[len(manifest.entries) // 2]
        damaged = buffer.clone()
        damaged[middle.offset] += 1
        with pytest.raises(UserError, match="damaged"):
            list(read_bucket(again, damaged))
    a, b = tally.report(), sent.report()
    assert (a.tensors, a.quantized, a.bytes, a.checksum) == (b.tensors, b.quantized, b.bytes, b.checksum)


def test_buckets_can_be_filled_elsewhere_and_copied_whole(wide_state: State) -> None:
    """As a GPU does for buckets in the host's memory: only filled and summed bytes reach a slot."""
    capacity = 2 * EXPERT + 1000
    slots = [torch.full((capacity,), 7, dtype=torch.uint8) for _ in range(2)]
    scratch = torch.empty(capacity, dtype=torch.uint8)
    export = export_weights(wide_state, "vllm-hopper")
    for manifest, buffer in write_buckets(export, lambda i: slots[i % 2], version=1, scratch=scratch):
        assert buffer is slots[manifest.index % 2]
        assert len(list(read_bucket(manifest, buffer))) == len(manifest.entries)
    memory = torch.empty(capacity, dtype=torch.uint8)
    direct = list(write_buckets(export_weights(wide_state, "vllm-hopper"), lambda _: memory, version=1))
    assert direct[-1][0] == manifest


def test_a_damaged_weight_is_named_before_the_last_bucket(wide_state: State) -> None:
    """Buckets are filled without waiting for the GPU; an engine must not commit what was never whole."""
    state = dict(wide_state)
    stack = state["model.layers.9.mlp.experts.gate_and_up_projs"].clone()
    stack[2, 17, 128 + 9] = torch.nan
    state["model.layers.9.mlp.experts.gate_and_up_projs"] = stack
    memory = torch.empty(2 * EXPERT + 1000, dtype=torch.uint8)
    filled = fill_buckets(export_weights(state, "vllm-hopper"), lambda _: memory)
    with pytest.raises(UserError, match=r"layers\.9\.ffn\.experts\.2\.w3\.weight\[9, 17\] is nan"):
        for bucket in filled:
            assert not bucket.last


def test_an_export_of_nothing_fills_no_bucket() -> None:
    assert list(fill_buckets([], lambda _: torch.empty(64, dtype=torch.uint8))) == []
    assert list(pack_buckets([], 64)) == []


def one_by_one(state: State, **options: Any) -> list[tuple[str, torch.Tensor]]:
    """The stream of the same weights with every expert encoded alone."""
    encoder = Encoder(get_profile("vllm-hopper"), **options)
    items = []
    for name, slot in AUTOMODEL.split(state):
        value = AUTOMODEL.view(state[slot.key], slot)
        items += encoder.items(name, encoder.encode(name, value), value)
    return items


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("with_codes", [False, True])
def test_source_scales_and_codes_of_training_are_kept_in_place(
    wide_state: State, with_codes: bool, trained: bool
) -> None:
    """The bytes of experts encoded one by one, whether or not training has codes of its own and changed a weight."""
    experts = {key: value for key, value in wide_state.items() if ".layers.9." in key}
    source = {}
    for name, tensor in export_weights(experts, "vllm-hopper"):  # values on the checkpoint's grid, coarser scales
        if name.endswith(".scale"):
            source[name.removesuffix("scale") + "weight"] = tensor * 4
    experts = {key: value.sign() * 0.5 for key, value in experts.items()}
    if trained:
        experts["model.layers.9.mlp.experts.down_projs"][3, 5, 200] = 0.71875
    del source["layers.9.ffn.experts.4.w3.weight"]
    source["layers.9.ffn.experts.5.w1.weight"] = torch.ones(3, 3)  # of other blocks
    options: dict[str, Any] = {"source_scales": SourceScales(source.items())}
    if with_codes:
        options["stored"] = {}
        for key, value in experts.items():
            rounding = WeightRounding(QuantSpec(), halves=2 if "gate" in key else 1)
            module = torch.nn.Module()
            module._weight_rounding = {key.rpartition(".")[2]: rounding}  # type: ignore[assignment]
            rounding.quantized(value)
            options["stored"] |= stored_codes(Named(key.rpartition(".")[0], module))  # type: ignore[arg-type]
    want = one_by_one(experts, **options)
    memory = torch.empty(3 * EXPERT + 1000, dtype=torch.uint8)
    for _ in range(2):
        found = []
        for bucket in fill_buckets(export_weights(experts, "vllm-hopper", **options), lambda _: memory):
            found += [(name, tensor.clone()) for name, tensor in bucket.items()]
        for (name, a), (other, b) in zip(found, want, strict=True):
            assert name == other
            assert torch.equal(raw(a), raw(b)), name
    kept = dict(want)["layers.9.ffn.experts.2.w2.scale"]
    assert torch.equal(kept, source["layers.9.ffn.experts.2.w2.weight"])


class Named:
    """As much of a model as `stored_codes` walks."""

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self.named_modules = lambda: [(name, module)]
