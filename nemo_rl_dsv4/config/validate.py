"""Everything about a recipe that can be checked before a process starts."""

from __future__ import annotations

from nemo_rl_dsv4.config.master import MasterConfig
from nemo_rl_dsv4.config.rules_of_agreement import check_agreement
from nemo_rl_dsv4.config.rules_of_attention import check_attention
from nemo_rl_dsv4.config.rules_of_dispatch import check_context_parallel, check_dispatch
from nemo_rl_dsv4.config.rules_of_layout import (
    check_batches,
    check_layout,
    check_lengths,
    check_model,
    check_packing,
    check_rollout_layout,
)
from nemo_rl_dsv4.config.rules_of_numerics import check_available, check_hardware, check_numerics, check_routes
from nemo_rl_dsv4.config.rules_of_rollout import check_rollout_engine, check_target
from nemo_rl_dsv4.config.rules_of_run import (
    check_algorithm,
    check_async,
    check_data,
    check_optimizer,
    check_outputs,
    check_scheduler,
    check_scoring,
    check_trackers,
)
from nemo_rl_dsv4.config.rules_of_values import check_metric_names, check_values
from nemo_rl_dsv4.config.runtime_choice import Runtime, choose_runtime


def validate(config: MasterConfig, *, runs_here: bool = True) -> Runtime:
    """Applies the rules between keys and returns the runtime that will drive the loop. Nothing is created on disk.

    Args:
        config: a loaded recipe.
        runs_here: this machine will run it; false leaves out which tracker packages are installed.

    Raises:
        UserError: the first rule that does not hold, with the keys, the values found and what would fit.
    """
    runtime = choose_runtime(config)
    for check in (
        check_values,
        check_metric_names,
        check_model,
        check_layout,
        check_batches,
        check_lengths,
        check_packing,
        check_numerics,
        check_routes,
        check_available,
        check_hardware,
        check_attention,
        check_dispatch,
        check_context_parallel,
        check_rollout_layout,
        check_target,
    ):
        check(config)
    check_rollout_engine(config, runtime)
    check_agreement(config)
    check_data(config, runtime)
    check_async(config, runtime)
    check_scoring(config, runtime)
    for check in (check_optimizer, check_scheduler, check_outputs, check_algorithm):
        check(config)
    if runs_here:
        check_trackers(config)
    return runtime
