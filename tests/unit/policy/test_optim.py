"""Optimizer and schedule from a recipe."""

from __future__ import annotations

import pytest
import torch

from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.policy.optim import build_optimizer, build_scheduler, rehearse
from nemo_rl_dsv4.policy.parallel import ParallelSizes

ADAMW = "torch.optim.AdamW"


def make(lr=1.0, **kwargs):
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2), requires_grad=False)]
    return build_optimizer(parameters, ADAMW, {"lr": lr, "betas": [0.9, 0.95], "foreach": None, **kwargs})


def rates(optimizer, scheduler, steps):
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def test_frozen_parameters_stay_out():
    optimizer = make()
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [p.requires_grad for p in optimizer.param_groups[0]["params"]] == [True]
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)


def test_warm_up_then_constant():
    optimizer = make()
    scheduler = build_scheduler(
        optimizer,
        [
            {
                "name": "torch.optim.lr_scheduler.LinearLR",
                "kwargs": {"start_factor": 0.2, "end_factor": 1.0, "total_iters": 4},
            },
            {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 10}},
            {"milestones": [4]},
        ],
    )
    assert rates(optimizer, scheduler, 6) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_no_schedule_keeps_the_rate():
    assert build_scheduler(make(), None) is None
    assert build_scheduler(make(), []) is None


def test_errors_name_the_key():
    with pytest.raises(UserError, match="policy.optimizer.name is 'torch.optim.Adamx'"):
        build_optimizer([], "torch.optim.Adamx", {})
    with pytest.raises(UserError, match="policy.optimizer.kwargs do not fit"):
        make(momentum=0.9)
    with pytest.raises(UserError, match="2 parts and 0 milestones; wanted 1"):
        build_scheduler(make(), [{"name": "torch.optim.lr_scheduler.ConstantLR"}] * 2)


@pytest.mark.parametrize(
    ("sizes", "message"), [((3, 2, 1), "context_parallel_size 2"), ((4, 1, 3), "expert_parallel_size 3")]
)
def test_parallel_sizes_must_divide(sizes, message):
    with pytest.raises(UserError, match=message):
        ParallelSizes(*sizes)


def test_data_parallel_size_is_what_context_parallelism_leaves():
    assert ParallelSizes(8, cp=4, ep=8).dp == 2


def test_an_optimizer_of_another_package_takes_its_own_arguments(tmp_path, monkeypatch):
    (tmp_path / "elsewhere.py").write_text(
        "import torch\n"
        "class Sign(torch.optim.SGD):\n"
        "    def __init__(self, params, lr, *, bounds): super().__init__(params, lr); self.bounds = bounds\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    optimizer = build_optimizer([torch.nn.Parameter(torch.ones(2))], "elsewhere.Sign", {"lr": 0.5, "bounds": [0, 1]})
    assert optimizer.param_groups[0]["lr"] == 0.5 and optimizer.bounds == (0, 1)
    with pytest.raises(UserError, match="policy.optimizer.kwargs do not fit elsewhere.Sign: .*'betas'"):
        build_optimizer([torch.nn.Parameter(torch.ones(2))], "elsewhere.Sign", {"lr": 0.5, "betas": [0.9]})


def test_a_class_of_another_kind_is_refused():
    with pytest.raises(UserError, match="policy.optimizer.name is 'torch.nn.Linear', which is no torch.optim"):
        build_optimizer([], "torch.nn.Linear", {})
    with pytest.raises(UserError, match="policy.scheduler.name is 'torch.optim.AdamW', which is no torch.optim"):
        build_scheduler(make(), [{"name": "torch.optim.AdamW"}])


SCHEDULES = "torch.optim.lr_scheduler"


@pytest.mark.parametrize(
    ("name", "kwargs", "parts", "message"),
    [
        ("....", {"lr": 1.0}, None, "name is '....', which cannot be imported"),
        ("os.system", {"lr": 1.0}, None, "'os.system', which is no torch.optim"),
        ("torch.optim.LBFGS", {"lr": 1.0}, None, "cannot take a step over dense gradients without a closure"),
        ("torch.optim.SparseAdam", {"lr": 1.0}, None, "cannot take a step over dense gradients"),
        (ADAMW, {"lr": 1.0, "foreach": True, "fused": True}, None, "kwargs do not fit"),
        (ADAMW, {"lr": 1.0}, [{"name": f"{SCHEDULES}.StepLR", "kwargs": {"step_size": 0}}], "cannot take a step"),
        (ADAMW, {"lr": 1.0}, [{"name": f"{SCHEDULES}.StepLR", "kwargs": {"stepsize": 1}}], "kwargs do not fit"),
        (ADAMW, {"lr": 1.0}, [{"name": f"{SCHEDULES}.ReduceLROnPlateau"}], "cannot take a step"),
        (ADAMW, {"lr": 1.0}, [{"name": "collections.Counter"}], "'collections.Counter', which is no torch.optim"),
    ],
)
def test_what_the_trainer_cannot_drive_is_found_before_a_run(name, kwargs, parts, message):
    with pytest.raises(UserError, match=message):
        rehearse(name, kwargs, parts)


def test_a_rehearsal_lets_usual_choices_pass():
    warm_up = {"name": f"{SCHEDULES}.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 2}}
    stairs = {"name": f"{SCHEDULES}.StepLR", "kwargs": {"step_size": 3}}
    rehearse(ADAMW, {"lr": 1.0, "betas": [0.9, 0.95], "foreach": None}, [warm_up, stairs, {"milestones": [2]}])
    rehearse("torch.optim.SGD", {"lr": 1.0, "momentum": 0.9}, None)
