"""Write a refit straight into the memory that an engine's kernels read, where that has been shown to be the same.

An engine's loaders turn checkpoint tensors into kernel tensors. For FP8 weights with float32 block scales that changes
no value, tensor by tensor, paid with a walk by name through all layers and with new kernel tensors for each. Whether it
is so is not assumed but observed. After each of two refits through the loaders

- every tensor that was sent lies where the layout says: plain ones byte for byte, quantized ones in the dtypes that
  were sent and with the same codes times scales (vLLM quantizes blocks anew, which doubles codes and halves the scale
  of a block whose largest code is 224 or less; a product of either is the other's, to the bit). A tensor that does not
  may lie there in another form, or be wrong: whoever observes is told to compare it;
- whatever of a parameter was not sent (a tile's padding) holds what it held the time before;
- while the loaders ran, no tensor beside the parameters changed but those that `refresh_derived` computes.

From the third refit on tensors are copied to these places. That nothing follows from a weight has been seen only for
weights that changed while the loaders ran: a refit in which another one changes for the first time goes through them
once more. What speaks against direct writes is said once, and the loaders go on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Protocol

import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.refit.checksum import bytes_checksum
from nemo_rl_dsv4.refit.references import live_tensors, reachable_tensors
from nemo_rl_dsv4.refit.staging import StagedWeights
from nemo_rl_dsv4.refit.vllm_layout import Memory, dequantize_blocks

_KV_CACHE = re.compile(r"(^|\.)kv_cache(\[[^.]*)?$")
_EXPERT = re.compile(r"\.experts\.\d+\.")

_SCALES = (torch.float32, torch.float8_e8m0fnu)
"""Dtypes of scales into which a copy writes their values."""

OBSERVED = 2
"""Refits through the loaders before the first direct one."""


class _OtherForm(UserError):
    """A tensor that is not found in the engine as it was sent."""

    def __init__(self, name: str, form: str) -> None:
        super().__init__(f"{name} lies in the engine {form}")
        self.name = name


class DirectEngine(Protocol):
    """What direct writes need of an engine."""

    model: torch.nn.Module

    def memory(self, name: str) -> Memory | None:
        """See `VllmLayout.memory`."""
        ...

    def derived(self) -> list[torch.Tensor]:
        """Tensors that `refresh_derived` computes from parameters."""
        ...


class DirectWrites:
    """Observes refits of one engine through its loaders, then makes them itself.

    Call `before_load` and, if the refit had no findings, `after_load`, until `ready`.

    Args:
        engine: the engine.
    """

    def __init__(self, engine: DirectEngine) -> None:
        self._engine = engine
        self._observed = 0
        self._places: dict[str, Memory] = {}
        self._sent: dict[str, int] = {}
        self._before: dict[str, int] = {}
        self._seen: set[str] = set()
        self._others: dict[str, int] = {}
        self._unsent: dict[str, int] = {}
        self.reason: str | None = None
        """Why refits keep going through the loaders; None while nothing speaks against direct ones."""
        self._notes: list[str] = []

    @property
    def ready(self) -> bool:
        """Whether enough was observed for refits to go direct."""
        return self.reason is None and self._observed >= OBSERVED

    def may_write(self, staged: StagedWeights) -> bool:
        """Whether `write` may be called: all weights that change have changed before while the loaders ran."""
        return self.ready and bool(self._sent) and _changed(self._sent, staged.checksums) <= self._seen

    def stop(self, reason: str) -> None:
        """Leave refits to the engine's loaders for good."""
        self.reason = reason
        self._places, self._others, self._unsent = {}, {}, {}
        self._notes.append(f"weights keep going through the engine's loaders (policy.dsv4.refit.direct): {reason}")

    def take_notes(self) -> tuple[str, ...]:
        """What has been decided since the last call."""
        notes, self._notes = tuple(self._notes), []
        return notes

    def before_load(self) -> None:
        """Note what lies beside the parameters; until `after_load` nobody knows what the engine holds."""
        if self.reason is None:
            self._before, self._sent = self._sent, {}
            self._others = _checksums(self._beside())

    def after_load(self, staged: StagedWeights) -> list[str]:
        """Compare what was sent with what the kernels now read, and what lies beside the parameters with before.

        Returns:
            Names of tensors that do not lie there as they were sent, to be compared by value.
        """
        if self.reason is not None:
            return []
        others = _checksums(self._beside())
        changed = sorted(
            name for name in others.keys() | self._others.keys() if others.get(name) != self._others.get(name)
        )
        if changed:
            self.stop(f"{changed[0]} ({len(changed)} in all) changes with the weights and is no parameter")
            return []
        try:
            self._places = dict(self._find(staged))
            unsent = self._remaining()
        except UserError as error:
            self.stop(str(error))
            return [error.name] if isinstance(error, _OtherForm) else []
        except Exception as error:  # the refit itself was good
            self.stop(f"where weights lie could not be found ({type(error).__name__}: {error})")
            return []
        moved = sorted(name for name in unsent if self._observed and unsent[name] != self._unsent.get(name))
        if moved:
            self.stop(f"{moved[0]} changes where nothing was sent")
            return []
        if self._before:
            self._seen |= _changed(self._before, staged.checksums)
        self._sent = dict(staged.checksums)
        self._unsent, self._observed = unsent, self._observed + 1
        if self._observed == OBSERVED:
            self._notes.append(f"{len(self._places)} weights go straight into the engine's memory from now on")
        return []

    @torch.inference_mode()
    def write(self, staged: StagedWeights) -> set[str]:
        """Copy a staged set to its places.

        Returns:
            The parameters that were written; those of which nothing is ever sent count.

        Raises:
            UserError: a tensor without a place.
        """
        assert self.ready, "direct writes were not shown to be right"
        self._sent = {}
        for name, data in staged.weights():
            place = self._places.get(name)
            if place is None:
                if self._engine.memory(name) is not None:
                    raise UserError(f"refit: {name!r} has no known place in the engine")
                continue  # an expert of another worker
            place.weight.copy_(data[place.part], non_blocking=True)
            if place.scale is not None:
                _, scale = staged.pair(name)
                assert scale is not None
                place.scale.copy_(_numbers(scale)[place.scale_part], non_blocking=True)
        self._sent = dict(staged.checksums)
        return {name for name, _ in self._engine.model.named_parameters()}

    def _find(self, staged: StagedWeights) -> Iterator[tuple[str, Memory]]:
        for name, data in staged.weights():
            place = self._engine.memory(name)
            if place is None:
                continue
            _, scale = staged.pair(name)
            if (scale is None) != (place.scale is None):
                raise UserError(f"{name} is quantized on one side only")
            if place.scale is not None and (place.weight.dtype != data.dtype or place.scale.dtype not in _SCALES):
                raise _OtherForm(name, f"as {place.weight.dtype} with scales in {place.scale.dtype}")
            sent = data[place.part]
            if scale is None or place.scale is None:
                same = _equal(sent, place.weight)
            else:
                here = place.weight.device
                wanted = dequantize_blocks(sent.to(here), _numbers(scale)[place.scale_part].to(here))
                same = torch.equal(wanted, dequantize_blocks(place.weight, place.scale))
            if not same:
                raise _OtherForm(name, "in another form than it was sent in")
            yield name, place

    def _remaining(self) -> dict[str, int]:
        """Checksums of parameters of which a part was not sent, with what was sent set to zero."""
        parameters = _each_once(live_tensors(self._engine.model))
        inside: dict[str, list[torch.Tensor]] = {name: [] for name in parameters}
        places: dict[int, list[tuple[int, int, str]]] = {}
        for name, tensor in parameters.items():
            storage, start, end = _extent(tensor)
            places.setdefault(storage, []).append((start, end, name))
        views = [v for place in self._places.values() for v in (place.weight, place.scale) if v is not None]
        for view in {(_extent(v), v.shape, v.stride()): v for v in views if v.numel()}.values():
            storage, first, last = _extent(view)
            homes = [name for start, end, name in places.get(storage, []) if start <= first and last <= end]
            if not homes:
                raise UserError(f"a weight of shape {list(view.shape)} lies in no parameter")
            for home in homes:
                if view.element_size() != parameters[home].element_size():
                    raise UserError(f"a weight of {view.dtype} lies in {home}, which is {parameters[home].dtype}")
                inside[home].append(view)
        found = {}
        for name, tensor in parameters.items():
            if sum(view.numel() for view in inside[name]) != tensor.numel():
                rest = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
                rest.copy_(tensor.data)
                for view in inside[name]:
                    offset = view.storage_offset() - tensor.storage_offset()
                    rest.as_strided(view.shape, view.stride(), offset).zero_()
                found[name] = bytes_checksum(rest)
        return found

    def _beside(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors that modules hold in plain attributes: no views of parameters, nothing derived, no caches."""
        model = self._engine.model
        known = {tensor.untyped_storage().data_ptr() for tensor in live_tensors(model).values()}
        known |= {tensor.untyped_storage().data_ptr() for tensor in self._engine.derived()}
        for name, tensor in reachable_tensors(model):
            if not _KV_CACHE.search(name) and tensor.numel() and tensor.untyped_storage().data_ptr() not in known:
                yield name, tensor


def _extent(tensor: torch.Tensor) -> tuple[int, int, int]:
    """A tensor's storage, and its first byte and the one behind its last there."""
    size = tensor.element_size()
    steps = sum((int(length) - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * size
    return tensor.untyped_storage().data_ptr(), start, start + (steps + 1) * size if tensor.numel() else start


def _each_once(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without the second names of memory: a router that an expert layer holds as well is in it twice."""
    kept = set({_extent(tensor): name for name, tensor in reversed(tensors.items()) if tensor.numel()}.values())
    return {name: tensor for name, tensor in tensors.items() if name in kept}


def _changed(before: dict[str, int], now: dict[str, int]) -> set[str]:
    """Names whose bytes differ; experts of a layer, which lie in one stack, count as one."""
    return {_EXPERT.sub(".experts.*.", name) for name, checksum in now.items() if before.get(name) != checksum}


def _checksums(tensors: Iterator[tuple[str, torch.Tensor]]) -> dict[str, int]:
    return {name: bytes_checksum(tensor) for name, tensor in tensors}


def _numbers(scale: torch.Tensor) -> torch.Tensor:
    """Scales as float32; float8_e8m0fnu holds powers of two."""
    return scale if scale.dtype == torch.float32 else scale.to(torch.float32)


def _equal(sent: torch.Tensor, held: torch.Tensor) -> bool:
    """Whether `held` is what a copy of `sent` into it gives, byte for byte."""
    if sent.shape != held.shape:
        return False
    copied = torch.empty_like(held, memory_format=torch.contiguous_format).copy_(sent)
    return torch.equal(copied.view(torch.uint8), held.contiguous().view(torch.uint8))
