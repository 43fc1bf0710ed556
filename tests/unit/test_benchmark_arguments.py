"""Benchmarks refuse what they cannot run or would ignore: one line, exit status 2, and nothing is computed."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_rl_dsv4.cli.guard import guarded
from nemo_rl_dsv4.errors import UserError
from nemo_rl_dsv4.model.known_models import FLASH

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

Refused = Callable[..., str]


def refuse(rank: int, *args: Any) -> None:
    """A rank that refuses its settings."""
    raise UserError("dispatcher of this rank: not here")


def benchmark(name: str) -> Any:
    """The module of a benchmark, by its file: a package of tests is called `numerics` as well."""
    known = f"benchmark_{name}"
    if known not in sys.modules:
        path = Path(__file__).resolve().parents[2] / "benchmarks" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(known, path)
        assert spec is not None and spec.loader is not None
        sys.modules[known] = importlib.util.module_from_spec(spec)  # data classes look their module up
        spec.loader.exec_module(sys.modules[known])
    return sys.modules[known]


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refused:
    """The line that a benchmark ends with for some words, on a machine with `gpus` and `libraries`."""
    look_up = importlib.util.find_spec

    def call(name: str, *words: str, gpus: int = 0, libraries: tuple[str, ...] = ()) -> str:
        def find_spec(library: str, *rest: Any) -> Any:
            return look_up("json" if library in libraries else "no_such_module", *rest)

        module = benchmark(name)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [f"{name}.py", *words])
            patch.setattr(torch.cuda, "device_count", lambda: gpus)
            patch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
            patch.setattr(importlib.util, "find_spec", find_spec)
            try:
                status = guarded(module.main)
            except SystemExit as end:
                status = end.code
        told = capsys.readouterr()
        assert status == 2 and not told.out and "Traceback" not in told.err, (status, told)
        return told.err.splitlines()[-1]

    return call


def made(folder: Path, *names: str) -> Path:
    """A folder with files of these names."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


SIX_LAYERS = {**FLASH, "num_hidden_layers": 6, "num_nextn_predict_layers": 0}
CHECKPOINTS = [f"{version}/{name}" for version in ("v0", "v2") for name in ("config.json", "model.safetensors")]
BUCKETS = [f"buckets{version}/bucket-00000.json" for version in (1, 2, 3)]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("refit", "DIR", "--tensor-parallel", "2"), "--tensor-parallel 2 takes weights from training ranks only; add"),
        (("refit", "DIR", "--tensor-parallel", "0"), "--tensor-parallel: '0'; wanted a whole number, 1 or more"),
        (("refit", "DIR", "--tensor-parallel", "two"), "--tensor-parallel: 'two'; wanted a whole number, 1 or more"),
        (("refit", "DIR", "--ranks", "-1"), "--ranks: '-1'; wanted a whole number, 0 or more"),
        (("refit", "DIR", "--ranks", "2"), "--ranks and --transport go together"),
        (("refit", "DIR", "--transport", "ipc"), "--ranks and --transport go together"),
        (("refit", "DIR", "--sleep", "--ranks", "2", "--transport", "ipc"), "--sleep does not go with --ranks"),
        (("refit", "DIR", "--sleep", "--direct"), "--direct goes with neither --sleep nor --ranks"),
        (("fresh", "DIR", "--direct"), "--direct with `fresh`; it goes with `refit`"),
        (("compare", "DIR", "--sleep"), "--sleep with `compare`; it goes with `refit`"),
        (("fresh", "DIR", "--ranks", "2"), "--ranks with `fresh`; it goes with `refit`"),
        (("make", "DIR", "--transport", "ipc"), "--transport with `make`; it goes with `refit` and `compare`"),
        (("make", "DIR", "--tensor-parallel", "2"), "--tensor-parallel with `make`; it goes with `refit` and `fresh`"),
    ],
)
def test_refit_options_that_do_not_go_together(refused: Refused, words: tuple[str, ...], wanted: str) -> None:
    """`refit --tensor-parallel 2` without ranks started an engine on one GPU; flags of other phases were ignored."""
    assert wanted in refused("vllm_refit", *words)


@pytest.mark.parametrize(
    ("words", "names", "wanted"),
    [
        (("refit",), [], "has no v0/config.json; run `python benchmarks/vllm_refit.py make"),
        (("refit",), CHECKPOINTS, "has no buckets1/bucket-00000.json; run `python benchmarks/vllm_refit.py make"),
        (("refit",), CHECKPOINTS + BUCKETS[:2], "has no buckets3/bucket-00000.json"),
        (("refit",), CHECKPOINTS + BUCKETS, "`refit` needs vLLM"),
        (("refit", "--direct"), CHECKPOINTS + BUCKETS[:2], "`refit` needs vLLM"),
        (("refit", "--ranks", "2", "--transport", "ipc"), CHECKPOINTS, "`refit` needs vLLM"),
        (("fresh",), CHECKPOINTS[:2], "has no v2/config.json; run `python benchmarks/vllm_refit.py make"),
        (("fresh", "--tensor-parallel", "2"), CHECKPOINTS, "`fresh` needs vLLM"),
        (("compare",), [], "has no fresh.pt; run `python benchmarks/vllm_refit.py fresh"),
        (("compare",), ["fresh.pt", "refit-ipc.pt"], "has no refit.pt; run `python benchmarks/vllm_refit.py refit"),
        (("compare", "--transport", "ipc", "folder"), ["fresh.pt", "refit-ipc.pt"], "has no refit-folder.pt; run"),
    ],
)
def test_a_refit_phase_names_what_it_lacks(
    refused: Refused, tmp_path: Path, words: tuple[str, ...], names: list[str], wanted: str
) -> None:
    """Each phase ended in a traceback without the files of the one before it, or without vLLM."""
    folder = made(tmp_path / "DIR", *names)
    assert wanted in refused("vllm_refit", words[0], str(folder), *words[1:])


def test_a_refit_needs_a_gpu_for_each_rank_and_worker(refused: Refused, tmp_path: Path) -> None:
    folder = str(made(tmp_path, *CHECKPOINTS, *BUCKETS))
    words = ("refit", folder, "--ranks", "4", "--transport", "ipc", "--tensor-parallel", "2")
    assert "wants 4 GPUs; torch sees 2" in refused("vllm_refit", *words, gpus=2, libraries=("vllm",))
    assert "wants 1 GPUs; torch sees 0" in refused("vllm_refit", "refit", folder, libraries=("vllm",))


@pytest.mark.parametrize("name", ["DIR", "DIR/below", "taken"])
def test_make_refuses_a_folder_that_cannot_be(refused: Refused, tmp_path: Path, name: str) -> None:
    """Before any weight is drawn."""
    made(tmp_path, "DIR", "taken/buckets2")
    assert "`make` cannot write there" in refused("vllm_refit", "make", str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("replicated2", (2, 1, 1, 2)),
        ("dp2", (2, 1, 1, 1)),
        ("dp2ep2", (2, 1, 2, 1)),
        ("cp2ep2", (2, 2, 2, 1)),
        ("ep4cp2dp2", (4, 2, 4, 1)),
        ("cp4ep4", (4, 4, 4, 1)),
    ],
)
def test_layout_names(name: str, sizes: tuple[int, ...]) -> None:
    import parity

    found = parity.parse_sizes(name)
    assert (found.world, found.cp, found.ep, found.replicate) == sizes


@pytest.mark.parametrize(
    "name", ["one", "", "dp", "dp0", "dp-2", "dp2tp2", "dp2 ep2", "xdp2", "dp2dp2", "DP2", "replicated", "replicated0"]
)
def test_other_layout_names_are_refused(name: str) -> None:
    """What was no axis was left out, so that `dp2tp2` ran as dp2 and `one` as a layout."""
    import parity

    with pytest.raises(UserError, match=r"wanted replicatedN, or numbers of dp, cp and ep ranks"):
        parity.parse_sizes(name)


@pytest.mark.parametrize(
    ("benchmark", "words"), [("parity", ("--sizes",)), ("two_gpus", ("--device", "cpu", "--layouts"))]
)
@pytest.mark.parametrize(
    ("layouts", "wanted"),
    [
        ("one", "layout 'one': wanted replicatedN"),
        ("dp2 cp2 dp2", "layout 'dp2' comes twice"),
        ("ep2", "layout 'ep2': 2 expert-parallel ranks for 1 processes"),
        ("dp3", "layout 'dp3': 3 data-parallel ranks for 8 rows"),
        ("replicated16", "layout 'replicated16': 16 data-parallel ranks for 8 rows"),
        ("cp3ep3", "layout 'cp3ep3': 3 expert-parallel ranks for 8 experts"),
    ],
)
def test_layouts_that_cannot_run(
    refused: Refused, benchmark: str, words: tuple[str, ...], layouts: str, wanted: str
) -> None:
    assert wanted in refused(benchmark, *words, *layouts.split())


def test_parity_refuses_a_layout_of_one_process(refused: Refused) -> None:
    """It printed no row for it."""
    assert "layout 'dp1' is one process" in refused("parity", "--sizes", "dp2", "dp1")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--rows 0", "--rows: '0'; wanted a whole number, 1 or more"),
        ("--length 0", "--length: '0'; wanted a whole number, 1 or more"),
        ("--micro-batch 0", "--micro-batch: '0'; wanted a whole number, 1 or more"),
        ("--repeats -1", "--repeats: '-1'; wanted a whole number, 1 or more"),
        ("--rows 3", "layout 'dp2ep2': 2 data-parallel ranks for 3 rows"),
        ("--length 20", "--length 20: the first 20 tokens of a row are not trained on"),
        ("--attn tilelang", "--attn tilelang runs on GPUs; wanted sdpa"),
        ("--dispatcher deepep", "--dispatcher deepep runs on GPUs; wanted torch"),
    ],
)
def test_two_gpus_on_a_cpu(refused: Refused, words: str, wanted: str) -> None:
    """`--rows 0` and `--length 0` took the defaults; the others ended in a traceback of a process."""
    assert wanted in refused("two_gpus", "--device", "cpu", *words.split())


def test_two_gpus_needs_a_gpu_for_each_process_and_tilelang(refused: Refused) -> None:
    """Four processes on two GPUs ended in a traceback."""
    assert "0 GPUs here; wanted 2, or --device cpu" in refused("two_gpus")
    assert "2 GPUs here; wanted 4, or --device cpu" in refused("two_gpus", "--layouts", "dp2", "cp4", gpus=2)
    assert "--attn tilelang needs the tilelang package" in refused("two_gpus", gpus=2)


def test_what_a_process_of_two_gpus_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was the process's traceback; that of a defect still is."""
    import two_gpus

    setting: Any = None
    monkeypatch.setattr(two_gpus, "run_rank", refuse)
    with pytest.raises(UserError, match=r"^dispatcher of this rank: not here$"):
        list(two_gpus.run(["parity"], [], setting))
    defect = torch.multiprocessing.ProcessRaisedException("Traceback:\n  line\nRuntimeError: a defect\n", 0, 1)
    assert two_gpus.refusal(defect) is defect


@pytest.mark.parametrize(
    ("words", "gpus", "libraries", "wanted"),
    [
        ("--tokens 0", 0, (), "--tokens: '0'; wanted a whole number, 1 or more"),
        ("--repeats 0", 0, (), "--repeats: '0'; wanted a whole number, 1 or more"),
        ("--device cuda", 0, (), "--device cuda: torch sees 0 GPUs here; wanted one, or --device cpu"),
        ("--vllm", 0, ("vllm",), "--vllm: torch sees 0 GPUs here; wanted a Hopper GPU"),
        ("--vllm", 1, (), "--vllm: no vllm in this environment; wanted vLLM 0.26.0"),
    ],
)
def test_attention_weights(refused: Refused, words: str, gpus: int, libraries: tuple[str, ...], wanted: str) -> None:
    assert wanted in refused("attention_weights", *words.split(), gpus=gpus, libraries=libraries)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("engine", "nowhere", "FILE"), "nowhere: no config.json; wanted the folder of a checkpoint"),
        (("engine", "DIR", "DIR/none/x.pt"), "wanted a file in a folder that exists; make the folder first"),
        (("engine", "DIR", "DIR"), "wanted a file in a folder that exists"),
        (("engine", "DIR", "DIR/x.pt", "--layers", "1", "6"), "--layers 6: the checkpoint has layers 0 to 5"),
        (("engine", "DIR", "DIR/x.pt"), "no vllm in this environment; wanted vLLM 0.26.0"),
        (("trainer", "DIR", "DIR/x.pt"), "x.pt: no such file; `engine` writes it"),
        (("trainer", "DIR", "DIR/config.json", "--split", "100"), "--split 100: wanted a multiple of 64"),
        (("trainer", "DIR", "DIR/config.json"), "torch sees 0 GPUs here; wanted a Hopper GPU"),
    ],
)
def test_operations_name_what_they_lack_before_an_engine_starts(
    refused: Refused, tmp_path: Path, words: tuple[str, ...], wanted: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SIX_LAYERS), encoding="utf-8")
    assert wanted in refused("vllm_operations", *(word.replace("DIR", str(tmp_path)) for word in words))


@pytest.mark.parametrize("phase", ["engine", "trainer"])
@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"{", "config.json: cannot be read as a model configuration"),
        (b"\xff\xfe", "config.json: cannot be read as a model configuration"),
        (b"[]", "config.json: holds a list; wanted a JSON object"),
        (b'{"num_hidden_layers": "x"}', "num_hidden_layers is 'x'; wanted a whole number, 1 to 1024"),
    ],
)
def test_operations_of_a_damaged_config(
    refused: Refused, tmp_path: Path, phase: str, content: bytes, wanted: str
) -> None:
    """Each was a traceback of json, str or a comparison."""
    (tmp_path / "config.json").write_bytes(content)
    found = refused("vllm_operations", phase, str(tmp_path), str(tmp_path / "x.pt"), "--layers", "1")
    assert wanted in found and str(tmp_path) in found


def test_operations_of_another_checkpoint_are_refused(tmp_path: Path) -> None:
    module, path = importlib.import_module("vllm_operations"), tmp_path / "x.pt"
    kept = dict.fromkeys(("ids", "prompts", "layers", "norm.in", "norm.out"), 1)
    for content, wanted in (
        (b"not torch", "is no file that `engine` wrote"),
        ({"weights": 1}, "it lacks some of"),
        ({**kept, "config": "another"}, "for a checkpoint with another config.json; run `engine` with this one"),
    ):
        path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
        with pytest.raises(UserError, match=wanted):
            module.read_captured(path, "{}", "cpu")
    torch.save({**kept, "config": "{}"}, path)
    assert module.read_captured(path, "{}", "cpu")["layers"] == 1


@pytest.mark.parametrize(
    ("name", "words", "wanted"),
    [
        ("hyper_connections", "--tokens 0", "--tokens: '0'; wanted a whole number, 1 or more"),
        ("hyper_connections", "--width -5", "--width: '-5'; wanted a whole number, 1 or more"),
        ("hyper_connections", "--vllm", "--vllm: no vllm in this environment; wanted vLLM 0.26.0"),
        ("hyper_connections", "", "torch sees 0 GPUs here; wanted one"),
        (
            "attention_weights",
            "--tokens 3000000000",
            "--tokens: '3000000000'; wanted a whole number, at most 2147483647",
        ),
        ("alignment", "DIR --rows 0", "--rows: '0'; wanted a whole number, 1 or more"),
        ("alignment", "DIR --noise nan", "--noise: 'nan'; wanted a number, 0 or more"),
        ("alignment", "nowhere", "nowhere/config.json: cannot be read as a model configuration"),
        ("checkpoints", "--gigabytes 0", "--gigabytes: '0'; wanted a number above 0"),
        ("checkpoints", "--threads 0", "--threads: '0'; wanted a whole number, 1 or more"),
        ("checkpoints", "--folder nowhere", "--folder nowhere: no such folder; make it first"),
        ("dispatch", "--world 0", "--world: '0'; wanted a whole number, 1 or more"),
        ("dispatch", "--limit inf", "--limit: 'inf'; wanted a number above 0"),
        ("dispatch", "--device cpu --top-k 9", "--top-k 9: wanted at most the 8 experts (--experts)"),
        ("fuzz_checkpoints", "--count 0", "--count: '0'; wanted a whole number, 1 or more"),
        ("logprobs", "--vocab 0", "--vocab: '0'; wanted a whole number, 1 or more"),
        ("logprobs", "--chunks -1", "--chunks: '-1'; wanted a whole number, 0 or more"),
        ("numerics", "--gigabytes -1", "--gigabytes: '-1'; wanted a number above 0"),
        ("numerics", "--device cuda", "--device cuda: torch sees 0 GPUs here; wanted one, or --device cpu"),
        ("numerics", "--json nowhere/x.json", "--json nowhere/x.json: wanted a file in a folder that exists"),
        ("policy", "--layers 0", "--layers: '0'; wanted a whole number, 1 or more"),
        ("policy", "--device cuda", "--device cuda: torch sees 0 GPUs here; wanted one, or --device cpu"),
        ("policy", "--device cpu --profile-name x", "unknown rollout profile 'x'"),
        ("policy", "--device cpu --experts 1", "num_experts_per_tok 2 exceeds n_routed_experts 1"),
        ("refit", "--bucket-gb 0", "--bucket-gb: '0'; wanted a number above 0"),
        ("refit", "--hidden 100", "--hidden 100: wanted a multiple of 128"),
        ("router_replay", "DIR --rows 0", "--rows: '0'; wanted a whole number, 1 or more"),
        ("vllm_batches", "DIR --spacing 0", "--spacing: '0'; wanted a whole number, 1 or more"),
        ("vllm_batches", "DIR --set a=[", "--set 'a=[': '[' is no YAML value"),
        ("vllm_batches", "nowhere", "nowhere/config.json: cannot be read as a model configuration"),
    ],
)
def test_sizes_that_cannot_be(refused: Refused, name: str, words: str, wanted: str) -> None:
    """They ended in tracebacks of torch or statistics, or measured nothing."""
    assert wanted in refused(name, *words.split())


def test_a_width_that_the_engines_kernels_leave_unwritten(refused: Refused) -> None:
    """vLLM's mixing of few tokens skips what does not fill its blocks."""
    found = refused("hyper_connections", "--vllm", "--width", "1024", libraries=("vllm",), gpus=1)
    assert "--width is 1024; vLLM's hyper-connection kernel needs a multiple of 2048" in found


def test_memory_that_a_host_lacks_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`attention_weights.py --tokens 100000000` ended in a traceback of DefaultCPUAllocator. No host has 2^48 bytes."""
    module = importlib.import_module("attention_weights")
    monkeypatch.setattr(sys, "argv", ["attention_weights.py", "--device", "cpu", "--tokens", "2147483647"])
    assert guarded(module.main, lower="lower --tokens") == 1
    told = capsys.readouterr()
    assert told.err == "error: the host cannot allocate 262144.0 GiB for one tensor; lower --tokens\n" and not told.out
