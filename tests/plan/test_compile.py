"""`compile`: what it answers without a backend, and, where one is installed, what it finds."""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import spmd_train
from spmd_train.cli import main
from spmd_train.config import load
from spmd_train.errors import RequestError, RunError
from spmd_train.mesh import MeshShape
from spmd_train.plan import compile as compiling
from spmd_train.plan.compile import Compiler, backend, compile_step, environment
from spmd_train.plan.compile_worker import needed_bytes
from spmd_train.plan.targets import requested_site

GIB = 2**30
JAX = metadata.version("jax")


def installed(monkeypatch, **versions):
    """Pretend that these distributions are installed, and no other backend."""
    monkeypatch.setattr(compiling, "_version", lambda name: versions.get(name.replace("-", "_")))


@pytest.mark.parametrize(
    ("target", "extra"), [("h100-80gb", "compile-gpu"), ("v5p", "compile-tpu")]
)
def test_an_absent_wheel_is_named_with_its_pip_command(monkeypatch, capsys, target, extra):
    installed(monkeypatch)
    assert main(["compile", "--mesh", "2x2x2", "--target", target]) == 2
    said = capsys.readouterr()
    assert f"pip install 'spmd-train[{extra}]'" in said.err
    assert not said.out


def test_a_plugin_of_another_jax_is_refused_with_the_pip_command(monkeypatch):
    installed(monkeypatch, jax_cuda13_plugin="0.1.0", jax_cuda13_pjrt="0.1.0")
    command = f"pip install jax-cuda13-plugin=={JAX} jax-cuda13-pjrt=={JAX}"
    with pytest.raises(RequestError, match=command):
        backend("gpu")
    installed(monkeypatch, jax_cuda12_plugin=JAX)
    with pytest.raises(RequestError, match=r"jax-cuda12-pjrt \(absent\) does not belong"):
        backend("gpu")


def test_another_libtpu_than_jax_names_is_used_and_noted(monkeypatch):
    installed(monkeypatch, libtpu="0.0.1")
    name, note = backend("tpu")
    assert name == "libtpu 0.0.1"
    assert f"JAX {JAX} names libtpu 0.0." in note


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "h100"], "did you mean 'h100-80gb'"),
        (["--target", "h100-80gb", "--hosts", "3"], "--hosts 3 does not divide the 8 devices"),
        ([], "needs --target"),
        (["--target", "v5p", "--set", "model.layerz=2"], "model.layers"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_starts(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(subprocess, "Popen", None)
    assert main(["compile", "--mesh", "2x2x2", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_mesh_that_the_model_does_not_divide_is_refused(monkeypatch):
    installed(monkeypatch, libtpu="0.0.1")
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(RequestError, match="model=8 does not divide 4 heads"):
        compile_step(load(None), MeshShape(1, 8, 1), requested_site(8, "v5p", None, None))


def test_cudnn_is_refused_by_name(monkeypatch):
    installed(monkeypatch, jax_cuda13_plugin=JAX, jax_cuda13_pjrt=JAX)
    config = load(None, ["model.attention=cudnn"])
    with pytest.raises(RequestError, match=r"model\.attention=cudnn cannot be compiled"):
        compile_step(config, MeshShape(8), requested_site(8, "h100-80gb", None, None))


def test_a_compiler_that_dies_is_a_failed_run_with_its_last_words(monkeypatch):
    installed(monkeypatch, libtpu="0.0.1")
    dying = "import sys; print('Check failed: it', file=sys.stderr); sys.exit(7)"
    real = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **more: real([command[0], "-c", dying], **more)
    )
    with (
        Compiler("tpu") as compiler,
        pytest.raises(RunError, match=r"(?s)ended with status .*Check failed: it"),
    ):
        compiler.compile(load(None), MeshShape(8), requested_site(8, "v5p", None, None))


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
            "space hbm. Used 103.50G of 95.74G hbm. Exceeded hbm capacity by 7.76G.",
            103.5 * GIB,
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (22.25G) exceeds available HBM (15.75G).",
            22.25 * GIB + 1000,
        ),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem.", None),
        ("INTERNAL: something else", None),
    ],
)
def test_what_a_tpus_compiler_says_it_needs_is_read(message, needed):
    assert needed_bytes(message, arguments=1000) == needed


def test_a_plugin_without_cuda_leaves_training_silent(tmp_path):
    """Installed to compile with, on a machine without a GPU: JAX would print a traceback."""
    if glob.glob("/dev/nvidia*") or glob.glob("/dev/accel*"):
        pytest.skip("an accelerator is here")
    plugin = tmp_path / "jax_plugins" / "xla_cuda13"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(
        "import jax\n"
        "def initialize():\n"
        "    if jax.config.jax_platforms != 'cpu':\n"
        "        raise RuntimeError('Unable to load cuDNN. Is it installed?')\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(Path(spmd_train.__file__).parents[1])])
    show = "import jax; print(jax.devices()[0].platform)"
    prepare = "from spmd_train.mesh import prepare_devices; prepare_devices(None, None)"
    loud, quiet = (
        subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
        for code in (show, f"{prepare}; {show}")
    )
    assert "cuDNN" in loud.stderr
    assert (quiet.stdout, quiet.stderr) == ("cpu\n", "")


# ----------------------------------------------------------------------------- with the real wheels


def can_compile(platform):
    try:
        backend(platform)
    except RequestError:
        return pytest.mark.skip(reason=f"the wheel to compile for a {platform} is not installed")
    return ()


GPU, TPU = (pytest.param(p, marks=can_compile(p)) for p in ("gpu", "tpu"))
TARGETS = {"gpu": "a100-40gb", "tpu": "v5p"}


@pytest.mark.parametrize("platform", [GPU, TPU])
def test_the_step_is_compiled_for_devices_that_are_not_here(platform, capsys):
    command = ["compile", "--mesh", "2x2x2", "--target", TARGETS[platform], "--json"]
    assert main(command) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["devices"] == 8
    assert answer["fits"] is True
    assert answer["attention"] == {"gpu": "xla", "tpu": "splash"}[platform]
    assert answer["precision"] == "bf16"  # of the target, not of the CPU here
    memory = answer["memory_bytes"]
    parts = (memory[key] for key in ("arguments", "outputs", "temporaries"))
    assert memory["peak"] == sum(parts) - memory["aliased"] > 0
    found = {(c["op"], *c["axes"]): c for c in answer["collectives"]}
    assert all(c["exact"] for c in answer["collectives"])
    # tiny, ZeRO 1: 771,200 parameters in float32 over model x stage, the norms' vectors apart
    scattered = found["reduce-scatter", "data"]
    assert not scattered["in_loop"]
    assert scattered["bytes_per_step"] <= 771_200 * 4 / 4 * 1.01
    # M + 2 (S - 1) ticks of two sends of a bf16 activation: 4 rows of 128 / 2 positions, width 128
    assert found["collective-permute", "stage"]["count"] == 2 * 6
    assert found["collective-permute", "stage"]["bytes_per_step"] == 12 * 4 * 64 * 128 * 2


@pytest.mark.parametrize("platform", [TPU])
def test_a_step_that_does_not_fit_is_an_answer(platform, capsys):
    sets = ["--set", "pipeline.remat=stage"]
    command = ["compile", "--config", "llama-7b", "--mesh", "2x2x2", "--target", "v5e", *sets]
    assert main([*command, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["fits"] is False
    assert answer["memory_bytes"]["needed"] > answer["memory_bytes"]["limit"]
    assert answer["memory_bytes"]["temporaries"] is None


def test_the_worker_starts_no_backend_but_the_cpus():
    for platform in ("gpu", "tpu"):
        assert environment(platform)["JAX_PLATFORMS"] == "cpu"
