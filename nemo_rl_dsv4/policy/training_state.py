"""Training state of all ranks on disk: torch's distributed checkpoint of model, optimizer and schedule.

Names are AutoModel's, and the metadata describes whole tensors however they are sharded: a checkpoint can be read at
any number of ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from nemo_rl_dsv4.errors import UserError


def save_training_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None, folder: str
) -> None:
    """Write the state into `folder`. Collective."""
    from torch.distributed.checkpoint.state_dict_saver import save

    save(_training_state(model, optimizer, scheduler), checkpoint_id=folder)


def load_training_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None, folder: str
) -> None:
    """Restore what `save_training_state` wrote, at the same or another parallel size. Collective.

    Rounded weights that the model keeps are the caller's to invalidate.

    Raises:
        UserError: the folder is missing, damaged, or of another model.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict import set_state_dict
    from torch.distributed.checkpoint.state_dict_loader import load

    if not (Path(folder) / ".metadata").is_file():
        raise UserError(f"{folder} holds no training checkpoint (no .metadata file)")
    state = _training_state(model, optimizer, scheduler)
    try:
        unused = _without_absent_moments(state["optimizer"]["state"], folder)
        load(state, checkpoint_id=folder)
    except (CheckpointException, RuntimeError, KeyError, EOFError, OSError) as error:
        reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
        raise UserError(f"{folder} cannot be restored into this model: {reason}") from error
    state["optimizer"]["state"].update(unused)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for name, parameter in model.named_parameters():
        if name.replace("_checkpoint_wrapped_module.", "") in unused:
            optimizer.state.pop(parameter, None)
    if scheduler is not None:
        scheduler.load_state_dict(state["scheduler"])


def _training_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None
) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    if scheduler is not None:
        state["scheduler"] = scheduler.state_dict()
    return state


def _without_absent_moments(moments: dict[str, Any], folder: str) -> dict[str, Any]:
    """Take out, and return, the optimizer entries of parameters that had none when the checkpoint was written.

    A parameter that no batch has used yet, such as the ratio-128 compressor while all sequences are short, has no
    moments; torch makes empty ones for every parameter before it loads, and would miss them in the checkpoint.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    written = {key.removeprefix("optimizer.state.").rpartition(".")[0] for key in saved if key.startswith("optimizer.")}
    return {name: moments.pop(name) for name in list(moments) if name not in written}
