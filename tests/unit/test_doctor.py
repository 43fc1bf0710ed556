"""`nemo-rl-dsv4 doctor`: what vendors' tools print, what is wrong, and a real Ray."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path

import pytest

from nemo_rl_dsv4.cli.main import main
from nemo_rl_dsv4.doctor import node as node_module
from nemo_rl_dsv4.doctor.gpus import AMD_GPUS, AMD_LINKS, NVIDIA_GPUS, NVIDIA_LINKS, ToolError, read_gpus, run_command
from nemo_rl_dsv4.doctor.node import Node, describe_node, import_state, rollout_state
from nemo_rl_dsv4.doctor.rules import Wanted, clock_finding, cluster_findings, node_findings, token_finding

RECIPES = Path(__file__).parents[2] / "examples/configs/recipes/llm"
QUERY = "0, NVIDIA H100 80GB HBM3, 580.65.06, 81559\n1, NVIDIA H100 80GB HBM3, 580.65.06, 81559\n"
TOPOLOGY = """\
\x1b[4m\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
GPU0\t X \tNV18\tPIX\t0-55\t0\t\tN/A
GPU1\tNV18\t X \tNODE\t0-55\t0\t\tN/A
NIC0\tPIX\tNODE\t X \t\t\t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""
CARD = {"Card Series": "AMD Instinct MI355X", "GFX Version": "gfx950", "VRAM Total Memory (B)": str(288 * 10**9)}
CARDS = json.dumps({"card0": CARD, "card1": CARD, "system": {"Driver version": "6.14.14"}})
TYPES = {"(Topology) Link type between DRM devices 0 and 1": "XGMI"}


def tools(answers):
    """A runner that knows these commands and no others."""

    def run(words):
        if words not in answers:
            raise ToolError(f"{words[0]} is not installed")
        if isinstance(answers[words], Exception):
            raise answers[words]
        return answers[words]

    return run


NVIDIA = {NVIDIA_GPUS: QUERY, NVIDIA_LINKS: TOPOLOGY}
AMD = {
    AMD_GPUS: "WARNING: AMD GPU device(s) is/are in a low-power state.\n" + CARDS,
    AMD_LINKS: json.dumps({"system": TYPES}),
}


def test_nvidia_gpus_driver_and_links():
    found = read_gpus(tools(NVIDIA))
    assert (found.vendor, found.names, found.memory_mib) == ("nvidia", ["NVIDIA H100 80GB HBM3"] * 2, [81559] * 2)
    assert (found.driver, found.link, found.unlinked, found.problems) == ("580.65.06", "NVLink", [], [])
    over_pcie = read_gpus(tools({**NVIDIA, NVIDIA_LINKS: TOPOLOGY.replace("NV18", "SYS")}))
    assert over_pcie.unlinked == [(0, 1)]


def test_amd_gpus_driver_and_links():
    found = read_gpus(tools(AMD))
    assert (found.vendor, found.names, found.memory_mib) == ("amd", ["AMD Instinct MI355X"] * 2, [274658] * 2)
    assert (found.driver, found.link, found.unlinked, found.problems) == ("6.14.14", "xGMI", [], [])
    over_pcie = read_gpus(tools({**AMD, AMD_LINKS: json.dumps({"system": dict.fromkeys(TYPES, "PCIE")})}))
    assert over_pcie.unlinked == [(0, 1)]


@pytest.mark.parametrize(
    ("answers", "problem"),
    [
        ({NVIDIA_GPUS: "No devices were found\n"}, "prints 'No devices were found'"),
        ({NVIDIA_GPUS: ToolError("`nvidia-smi` ended with status 9: driver")}, "status 9: driver"),
        ({**NVIDIA, NVIDIA_LINKS: "GPU0\n"}, "shows GPUs [], wanted 0 to 1".replace("[],", "[];")),
        ({**AMD, AMD_LINKS: json.dumps({"system": {}})}, "says nothing of GPUs 0 and 1"),
        ({AMD_GPUS: "no JSON"}, "no JSON object"),
        ({AMD_GPUS: json.dumps({"card0": {}})}, "gives card0 no name or memory"),
    ],
)
def test_a_tool_that_says_something_else_is_a_problem_and_no_crash(answers, problem):
    assert problem in read_gpus(tools(answers)).problems[0]


def test_a_command_that_fails_says_why():
    assert run_command(["echo", "x"]) == "x\n"
    for words, message in ((["no-such-tool"], "is not installed"), (["ls", "/nowhere"], "status 2: ls: .*nowhere")):
        with pytest.raises(ToolError, match=message):
            run_command(words)


@pytest.fixture
def facts(tmp_path, monkeypatch):
    """A node with two H100, nothing wrong with it; libraries are not imported for it."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setattr(node_module, "collectives", lambda vendor: {"name": "NCCL", "version": "2.28.9"})
    found = describe_node(tools(NVIDIA))
    found["host"], found["dispatchers"] = "a", {"deep_ep": "1.2.1", "uccl": ""}
    found["rollout"] = "0.26.0"
    found["free_gib"] = dict.fromkeys(found["free_gib"], 500.0)
    return found


def shown(findings, status="problem"):
    return [f"{finding.check}: {finding.text}" for finding in findings if finding.status == status]


def test_a_node_without_faults(facts):
    findings = list(node_findings(facts, Wanted(), {"torch": facts["packages"]["torch"].partition("+")[0]}))
    assert shown(findings) == []
    assert shown(findings, "note") == ["dispatcher: uccl is not installed"]
    assert "links: NVLink between all 2 GPUs" in shown(findings, "ok")
    assert "GPUs: 2 x NVIDIA H100 80GB HBM3 (81559 MiB), driver 580.65.06" in shown(findings, "ok")
    assert facts["environment"]["NCCL_SOCKET_IFNAME"] == "eth0" and "HF_TOKEN" not in facts["environment"]


FAULTS = {
    "links": (("gpus", "unlinked"), [(0, 1)], "links: 1 pairs of GPUs without NVLink, the first 0 and 1"),
    "mixed": (("gpus", "names"), ["H100", "H200"], "GPUs: 2 x H100 (81559 MiB) and H200 (81559 MiB), driver 580.65.06"),
    "nccl": (("collectives",), None, "collectives: torch has neither NCCL nor RCCL"),
    "broken": (("dispatchers", "deep_ep"), "broken: undefined symbol", "does not import: undefined symbol"),
    "vllm": (("rollout",), "broken: No module named vllm", "vLLM's environment does not answer: No module named vllm"),
    "cache": (("cache", "error"), "Read-only file system", "nothing can be written to"),
    "disk": (("free_gib", "/tmp"), 3.0, "disk: 3 GiB free for /tmp"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_a_problem_with_a_fix(facts, fault):
    path, value, message = FAULTS[fault]
    target = facts
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    problems = [f for f in node_findings(facts, Wanted(), {}) if f.status == "problem"]
    assert [f for f in problems if message in f"{f.check}: {f.text}" and f.fix], problems
    assert len(problems) == 1


def test_what_a_recipe_wants(facts):
    facts["dispatchers"]["deep_ep"] = ""
    problems = shown(node_findings(facts, Wanted(16, 8, "deepep"), {}))
    assert problems[0].endswith("the recipe wants 8")
    assert problems[1] == "dispatcher: deep_ep is not installed; the recipe's dispatcher is deepep"
    assert shown(cluster_findings([facts], Wanted(16, 8))) == ["nodes: 1 nodes, the recipe wants 16"]
    notes = shown(node_findings(facts, Wanted(), {"torch": "9.9"}), "note")
    assert any(note.startswith("pins: torch ") and note.endswith("(pinned 9.9)") for note in notes)


def test_nodes_that_differ(facts):
    others = [deepcopy(facts) for _ in range(3)]
    for number, other in enumerate(others):
        other["host"] = f"b{number}"
    assert shown(cluster_findings([facts, *others], Wanted())) == []
    others[0]["packages"]["torch"] = "2.13.0"
    others[0]["gpus"]["driver"] = "570.1"
    others[1]["collectives"] = None
    others[2]["cache"]["path"] = "/scratch/hf"
    problems = shown(cluster_findings([facts, *others], Wanted()))
    assert problems == [
        "driver: 580.65.06 on a, b1, b2; 570.1 on b0",
        "collectives: NCCL 2.28.9 on a, b0, b2; none on b1",
        f"HF_HOME: {facts['cache']['path']} on a, b0, b1; /scratch/hf on b2",
        f"version of torch: {facts['packages']['torch']} on a, b1, b2; 2.13.0 on b0",
    ]


def test_clocks_and_the_token():
    assert clock_finding("a", 2.5, 0.1).status == "problem" and clock_finding("a", -2.5, 0.1).status == "problem"
    assert clock_finding("a", 0.4, 0.1).status == "ok"
    assert clock_finding("a", 1.5, 0.8).status == "ok"  # not known to be more than a second
    assert token_finding("b", "/hf", "x", "x", "a").status == "ok"
    for found in (None, "y"):
        assert "does not hold what a wrote" in token_finding("b", "/hf", found, "x", "a").text


def test_the_token_of_a_shared_and_of_a_separate_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    node = Node()
    assert node.write_token(".token", "text") is None and node.read_token(".token") == "text"
    node.remove_token(".token")
    assert node.read_token(".token", seconds=0.0) is None
    monkeypatch.setenv("HF_HOME", str(tmp_path / "missing"))
    assert node.write_token(".token", "text") == "No such file or directory"


def test_torchs_collectives_are_asked_for_on_gpu_nodes_alone():
    found = node_module.collectives("nvidia")
    assert found is None or found["version"].count(".") == 2
    assert node_module.collectives(None) is None


def test_import_state_of_what_is_there_missing_and_broken(tmp_path, monkeypatch):
    (tmp_path / "half_built.py").write_text("raise ImportError('libnvshmem.so: undefined symbol')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert import_state("json") == "2.0.9" and import_state("no_such_module") == ""
    assert import_state("half_built") == "broken: ImportError: libnvshmem.so: undefined symbol"


def test_vllm_in_an_environment_of_its_own(tmp_path):
    python = tmp_path / "python"
    for body, state in (("echo 0.26.0", "0.26.0"), ("echo 'no vllm' >&2; exit 1", "broken: no vllm")):
        python.write_text(f"#!/bin/bash\n{body}\n")
        python.chmod(0o755)
        assert rollout_state(str(python)) == state
    assert rollout_state(str(tmp_path / "missing")) == rollout_state("")


@pytest.fixture
def without_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("HF_HOME", str(tmp_path))


@pytest.mark.usefixtures("without_gpu")
def test_a_machine_without_gpus_says_so_and_is_fit_for_the_tiny_recipes(capsys):
    assert main(["doctor"]) == 0
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "no GPU" in out and out.endswith("fit: 1 node examined")
    tiny = str(RECIPES / "grpo-dsv4-tiny-1n0g-automodel-qat.yaml")
    assert main(["doctor", "--config", tiny, "--json", "runtime=embedded"]) == 0
    capsys.readouterr()
    large = str(RECIPES / "grpo-deepseek-v4-flash-0731-16n8g-automodel-cp8ep128.yaml")
    assert main(["doctor", "--config", large, "--json", "runtime=embedded"]) == 1
    document = json.loads(capsys.readouterr().out)
    problems = {finding["check"] for finding in document["findings"] if finding["status"] == "problem"}
    assert problems == {"GPUs", "dispatcher", "vLLM"} and not document["fit"]
    assert all(finding["fix"] for finding in document["findings"] if finding["status"] != "ok")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--timeout", "0"], "--timeout is 0; wanted a number of seconds above 0"),
        (["--timeout", "nan"], "--timeout is nan; wanted a number of seconds above 0"),
        (["--timeout", "inf"], "--timeout is inf; wanted a number of seconds above 0"),
        (["a=b"], "a=b overrides a recipe, but --config names none"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: no such recipe file"),
    ],
)
def test_bad_input(capsys, words, message):
    assert main(["doctor", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_cluster_that_does_not_answer_is_one_line(capsys, monkeypatch):
    """`auto` finds any Ray of this machine, so the refusal is a stand-in's."""
    import ray

    def refuse(**_):
        raise ConnectionError("Could not find any running Ray instance.\nA long explanation.")

    monkeypatch.setattr(ray, "init", refuse)
    assert main(["doctor", "--address", "auto"]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert "--address auto: no Ray cluster answers (Could not find any running Ray instance.); start one" in line


def test_every_node_of_a_ray_cluster(monkeypatch, tmp_path, capsys):
    """Two Ray nodes on this machine: facts of both, one clock, one cache."""
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    ray.shutdown()
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 80 * 2**20})
    try:
        cluster.add_node(num_cpus=1, object_store_memory=80 * 2**20)
        assert main(["doctor", "--address", cluster.address, "--json"]) in (0, 1)
        document = json.loads(capsys.readouterr().out)
    finally:
        cluster.shutdown()
    assert len(document["nodes"]) == 2
    checks = [(finding["check"], finding["status"]) for finding in document["findings"]]
    assert checks.count(("clock", "ok")) == 2 and ("shared cache", "ok") in checks
    assert ("equal on all nodes", "ok") in checks
    assert not list(tmp_path.glob(".nemo-rl-dsv4-doctor-*"))


def test_an_address_where_nothing_listens_is_one_line_at_once(capsys):
    """Ray tried for minutes."""
    assert main(["doctor", "--address", "127.0.0.1:1"]) == 2
    assert "--address 127.0.0.1:1: no Ray cluster answers" in capsys.readouterr().err
