"""Policy ranks and engines on two nodes of a Ray cluster compute what one process does.

Both nodes are this machine: they share its address and its files, so everything below goes by Ray's node ids.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import ray
import torch
from ray.cluster_utils import Cluster
from stub_engine import Process, Workers
from test_policy_parity import ROWS, SETTINGS, rollouts, spec

from nemo_rl_dsv4.cli.run_grpo import main
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.generation.engine_places import own_places, shared_places
from nemo_rl_dsv4.grpo.loss import ClippedPGLoss
from nemo_rl_dsv4.model.official_names import expected_tensors
from nemo_rl_dsv4.policy.group import PolicyGroup
from nemo_rl_dsv4.policy.parallel import ParallelSizes
from nemo_rl_dsv4.policy.sent_weights import SentWeights
from nemo_rl_dsv4.policy.spec import build_worker
from nemo_rl_dsv4.utils.hosts import HostNeed, Place, rank_order, reserve

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cluster():
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "num_gpus": 2, "include_dashboard": False})
    try:
        made.add_node(num_cpus=4, num_gpus=2)
        yield made
    finally:
        made.shutdown()


def test_the_tiny_recipe_over_two_hosts(cluster, tmp_path, monkeypatch, capfd):
    """The command on the cluster of RAY_ADDRESS: warm start, rollout on both nodes, one step, a checkpoint."""
    recipe = ROOT / "examples/configs/recipes/llm/grpo-dsv4-tiny-1n0g-automodel-qat.yaml"
    small = (ROOT / "tests/functional/small.overrides").read_text(encoding="utf-8").split()
    overrides = (
        "cluster.num_nodes=2",
        "policy.dsv4.cpu_processes=2",
        "policy.dtensor_cfg.dp_replicate_size=1",
        "policy.dtensor_cfg.expert_parallel_size=2",
        "policy.generation.reference_cfg.num_workers=2",
        "grpo.max_num_steps=1",
        "grpo.val_at_start=false",
        "checkpointing.save_period=1",
        f"policy.dsv4.tiny.cache_dir={tmp_path}/cache",
        f"logger.log_dir={tmp_path}/logs",
        f"checkpointing.checkpoint_dir={tmp_path}/results",
    )
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    monkeypatch.chdir(tmp_path)
    status = main(["--config", str(recipe), *small, *overrides])
    assert status == 0, capfd.readouterr().err[-3000:]
    record = json.loads((tmp_path / "logs/exp_001/metrics.jsonl").read_text().splitlines()[0])
    assert record["step"] == 1 and record["train/gen_kl_error"] < 1e-4 and record["refit/quantized"] > 100
    saved = {path.name for path in (tmp_path / "results/exp_001/step_1/policy").iterdir()}
    assert {"rng_rank_0.json", "rng_rank_1.json", ".metadata"} <= saved
    assert not list(tmp_path.glob("*/.nemo-rl-dsv4-shared-*"))


@pytest.fixture(scope="module")
def connected(cluster):
    """This process is one of the cluster's; the command above, which connects itself, comes first."""
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def hosts(connected):
    return reserve(HostNeed(2, 0, 2)).hosts


@pytest.fixture(scope="module")
def policy(hosts, checkpoint):
    """Two ranks on two nodes, experts divided over them."""
    group = PolicyGroup(2, hosts=hosts, environment={"OF_THE_RECIPE": "yes"})
    group.build(spec(checkpoint, ParallelSizes(2, ep=2), qat=False, logprob_chunk_size=48), global_batch_size=ROWS)
    yield group
    group.shutdown()


def test_two_hosts_equal_one_process(hosts, policy, checkpoint):
    """Data and expert parallel over both nodes; each rank is alone on its node and knows it."""
    assert [place.node for place in policy.places] == [host.node for host in hosts]
    names = ("LOCAL_WORLD_SIZE", "OF_THE_RECIPE")
    found = [actor.__ray_call__.remote(lambda _: [os.environ[name] for name in names]) for actor in policy.actors]
    assert ray.get(found) == [["1", "yes"]] * 2
    data = dict(rollouts())
    one = build_worker(spec(checkpoint, ParallelSizes(1), qat=False))
    logprobs = one.get_logprobs(data)["logprobs"]
    torch.testing.assert_close(policy.get_logprobs(data)["logprobs"], logprobs, rtol=0, atol=1e-5)
    data["generation_logprobs"] = data["prev_logprobs"] = logprobs
    tokens = float((data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)).sum())
    loss = ClippedPGLoss(SETTINGS)
    for _ in range(2):  # the second sees the weights of the first's update
        expected = one.train(data, loss, global_valid_seqs=float(ROWS), global_valid_tokens=tokens)
        found = policy.train(data, loss)
        assert float(found["loss"]) == pytest.approx(expected["loss"], abs=1e-5)
        assert float(found["grad_norm"]) == pytest.approx(expected["grad_norm"], rel=1e-4)


def test_a_refit_reaches_workers_of_every_host(hosts, policy, config_once):
    """Host memory with a sender on each host; by broadcast as soon as one engine is on a host without a rank."""
    expected = expected_tensors(config_once)
    engines = [Workers.options(**host.options()).remote(expected) for host in hosts]
    reports = SentWeights(policy, "auto", 400_000).deliver(engines)
    assert {report["transport"] for report in reports} == {"shared_memory"}
    assert len({report["sender"] for report in reports}) == 2 and len({report["checksum"] for report in reports}) == 1

    ray.get(engines[1].move.remote("a third host"))
    by_broadcast = SentWeights(policy, "auto", 400_000).deliver(engines)
    assert {report["transport"] for report in by_broadcast} == {"broadcast"}
    assert {report["checksum"] for report in by_broadcast} == {reports[0]["checksum"]}
    with pytest.raises(UserError, match="shared_memory, but no training rank is on host a third host"):
        SentWeights(policy, "shared_memory", 400_000).deliver(engines)


def test_engines_see_the_gpus_of_their_ranks_or_their_own(hosts):
    """Ray only counts these GPUs: none is there. What matters is what each process is shown, and where."""
    reserved = reserve(HostNeed(2, 2, 0))
    (trains, rolls_out), node = reserved.hosts, reserved.hosts[0].node
    ranks = [Process.options(num_gpus=1, **trains.options()).remote() for _ in range(2)]
    places = [Place(node, tuple(gpus)) for _, gpus, _ in ray.get([rank.shown.remote() for rank in ranks])]
    assert sorted(place.gpus for place in places) == [("0",), ("1",)]
    places = [places[i] for i in rank_order(places, [node])]
    (shared,), (own,) = shared_places([trains], places, 2), own_places([rolls_out], 2, 2)
    engines = [Process.options(**place.actor_options(sys.executable, {"A": "1"})).remote() for place in (shared, own)]
    (where, _, variables), (other, _, others) = ray.get([engine.shown.remote() for engine in engines])
    assert (where, other) == (node, rolls_out.node)
    assert variables == {"CUDA_VISIBLE_DEVICES": "0,1", "A": "1"}
    assert sorted(others["CUDA_VISIBLE_DEVICES"].split(",")) == ["0", "1"] and others["A"] == "1"
    reserved.release()


def test_a_cluster_that_is_too_small_or_busy_says_what_is_missing(hosts):
    with pytest.raises(UserError, match=r"cluster.num_nodes = 3 nodes, each with 2 CPUs, but 2 of the 2 nodes"):
        reserve(HostNeed(3, 0, 2))
    with pytest.raises(UserError, match=r"has such nodes but did not get them free within 1 s .free in all: 4 GPUs, 4"):
        reserve(HostNeed(2, 0, 3), timeout=1.0)
