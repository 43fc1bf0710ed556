"""Files for clusters: Dockerfiles have the pins, manifests and scripts fit the recipes; none of them is run here."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from nemo_rl_dsv4.config import load_config

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
SHELL = sorted([*ROOT.glob("scripts/**/*.sbatch"), *ROOT.glob("scripts/**/*.env"), *ROOT.glob("tests/**/*.sh")])
RECIPE = str(ROOT / "examples/configs/recipes/llm/grpo-dsv4-mini-1n1g-automodel-qat.yaml")
_spec = importlib.util.spec_from_file_location("lock_script", ROOT / "scripts" / "lock.py")
assert _spec is not None and _spec.loader is not None
lock = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(lock)
LOCKED = {
    pin["name"]: pin["version"]
    for line in (ROOT / "requirements.lock").read_text().splitlines()
    if (pin := lock.REQUIREMENT.fullmatch(line))
}


def arguments(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^ARG (\w+)=(.*)$", path.read_text(), flags=re.MULTILINE))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_versions_of_a_dockerfile_are_the_pins(path):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (vllm,) = project["project"]["optional-dependencies"]["vllm"]
    stated = arguments(path)
    assert stated["TORCH_VERSION"] == LOCKED["torch"] and stated["RAY_VERSION"] == LOCKED["ray"]
    assert stated["AUTOMODEL_VERSION"] == LOCKED["nemo-automodel"]
    assert f"vllm=={stated['VLLM_VERSION']}" == vllm
    text = path.read_text()
    assert "python3.12" in text and "Status: not verified" in text
    assert "--require-hashes" in text and "nemo-rl-dsv4" in text
    for source in re.findall(r"^COPY (.+) \S+$", text, flags=re.MULTILINE):
        assert all((ROOT / word).exists() for word in source.split()), source


def test_cuda_of_the_image_is_that_of_torchs_libraries():
    image = arguments(ROOT / "docker/Dockerfile.cuda")["CUDA_VERSION"]
    assert image.split(".")[:2] == LOCKED["nvidia-cuda-runtime"].split(".")[:2]
    assert arguments(ROOT / "docker/Dockerfile.rocm")["ROCM_VERSION"].startswith("7.")


def test_the_lock_without_cuda_is_a_lock():
    text = lock.without_cuda((ROOT / "requirements.lock").read_text())
    assert lock.problems(text) == []
    kept = {pin["name"] for line in text.splitlines() if (pin := lock.REQUIREMENT.fullmatch(line))}
    dropped = set(LOCKED) - kept
    assert {"torch", "triton", "nvidia-nccl-cu13"} <= dropped and {"ray", "nemo-automodel", "transformers"} <= kept
    assert all(name in ("torch", "triton") or name.startswith(("nvidia-", "cuda-")) for name in dropped)


def test_the_kubernetes_manifest_fits_the_reference_recipe():
    claim, cluster = yaml.safe_load_all((ROOT / "scripts/kubernetes/raycluster.yaml").read_text())
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    spec = cluster["spec"]
    assert spec["rayVersion"] == LOCKED["ray"]
    recipe = load_config(
        ROOT / "examples/configs/recipes/llm/grpo-deepseek-v4-flash-0731-16n8g-automodel-cp8ep128.yaml"
    )
    (workers,) = spec["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == recipe.cluster.num_nodes - 1
    for group in (spec["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        gpus = recipe.cluster.gpus_per_node
        assert group["rayStartParams"]["num-gpus"] == str(gpus)
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert requests["nvidia.com/gpu"] == limits["nvidia.com/gpu"] == gpus
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert set(mounts) == set(volumes) and mounts["shm"] == "/dev/shm"
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
        assert volumes["shared"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        environment = {item["name"]: item.get("value") for item in container["env"]}
        assert environment["HF_HOME"].startswith(mounts["shared"] + "/")
        assert set(environment_file("nvidia")) <= set(environment)
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def environment_file(vendor: str) -> dict[str, str]:
    lines = (ROOT / f"scripts/environment/{vendor}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def test_every_variable_of_the_environment_files_is_explained():
    page = (ROOT / "docs/cluster.md").read_text()
    for vendor in ("nvidia", "amd"):
        text = (ROOT / f"scripts/environment/{vendor}.env").read_text()
        for name in re.findall(r"^(?:# )?([A-Za-z_]\w+)=", text, flags=re.MULTILINE):
            assert f"`{name}`" in page, f"{name} of {vendor}.env"


def test_shell_files_are_well_formed():
    done = subprocess.run(
        ["bash", "-c", 'for file in "$@"; do bash -n "$file" || exit 1; done', "bash", *map(str, SHELL)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(SHELL) > 20
    if shutil.which("shellcheck"):
        words = ["shellcheck", "-x", "-e", "SC1091,SC2034", str(ROOT / "scripts/slurm/ray_cluster.sbatch")]
        checked = subprocess.run(words, capture_output=True, text=True)
        assert checked.returncode == 0, checked.stdout


@pytest.fixture
def slurm(tmp_path):
    """Stand-ins for Slurm, Ray and the commands of a job; `calls` lists what was started."""
    calls = tmp_path / "calls"
    programs = {
        "scontrol": "printf 'node1\\nnode2\\nnode3\\n'",
        "srun": "while [[ $1 == -* ]]; do [[ $1 == -w ]] && { on=$2; shift; }; shift; done\n"
        f'echo "$on $*" >> {calls}\n'
        f"case $1 in hostname) echo 10.0.0.1;; ray) exec /bin/sleep 30;; python) grep -c 'ray start' {calls};; "
        "nemo-rl-dsv4) exit ${DOCTOR:-0};; esac",
        "sleep": "exec /bin/sleep 0.1",
    }
    for name, body in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)

    def run(**variables: str) -> tuple[int, list[str]]:
        calls.write_text("")
        base = {"HF_HOME": "/shared", "RECIPE": RECIPE, "SLURM_JOB_NODELIST": "node[1-3]", "SLURM_GPUS_ON_NODE": "8"}
        done = subprocess.run(
            ["bash", str(ROOT / "scripts/slurm/ray_cluster.sbatch"), "grpo.max_num_steps=1"],
            env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_SUBMIT_DIR": str(ROOT), **base, **variables},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.returncode, sorted(calls.read_text().splitlines())

    return run


def test_the_slurm_script_starts_a_head_workers_doctor_and_run(slurm):
    status, calls = slurm()
    assert status == 0
    joined = "\n".join(calls)
    assert "node1 ray start --block --head --node-ip-address=10.0.0.1 --port=6379 --num-gpus=8" in joined
    for node in ("node2", "node3"):
        assert f"{node} ray start --block --address=10.0.0.1:6379 --num-gpus=8" in joined
    assert f"node1 nemo-rl-dsv4 doctor --address 10.0.0.1:6379 --config {RECIPE} logger.wandb_enabled=false" in joined
    assert f"run_grpo.py --config {RECIPE} logger.wandb_enabled=false grpo.max_num_steps=1" in joined
    assert "logger.wandb_enabled=true" in "\n".join(slurm(WANDB="1")[1])


def test_the_slurm_script_stops_where_the_doctor_finds_a_problem(slurm):
    status, calls = slurm(DOCTOR="1")
    assert status == 1 and "run_grpo" not in "\n".join(calls)
    status, calls = slurm(DOCTOR="1", SKIP_DOCTOR="1")
    assert status == 0 and "run_grpo" in "\n".join(calls)


@pytest.mark.parametrize(
    ("variables", "status"),
    [({"VENDOR": "intel"}, 2), ({"RECIPE": "nowhere.yaml"}, 2), ({"SLURM_SUBMIT_DIR": "/"}, 2)],
)
def test_the_slurm_script_refuses_what_is_not_there_before_it_starts_anything(slurm, variables, status):
    assert slurm(**variables) == (status, [])


def test_a_doctor_that_refuses_its_input_is_not_skipped(slurm):
    """SKIP_DOCTOR is for findings; a wrong key would end the run as well."""
    status, calls = slurm(DOCTOR="2", SKIP_DOCTOR="1")
    assert status == 2 and "run_grpo" not in "\n".join(calls)
