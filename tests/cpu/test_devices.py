"""Drivers are asked through their C interface; a stand-in library answers in place of each."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CUDA = """
extern "C" int cuInit(unsigned) { return INIT; }
extern "C" int cuDeviceGetCount(int *count) { *count = COUNT; return 0; }
extern "C" int cuDeviceGet(int *device, int ordinal) { *device = 40 + ordinal; return 0; }
extern "C" int cuDeviceGetAttribute(int *value, int attribute, int device) {
    if (device != 40) return 101;
    *value = attribute == 75 ? MAJOR : attribute == 76 ? MINOR : -1;
    return 0;
}
"""

ACL = """
#include <cstdint>
extern "C" int aclInit(const char *) { return 0; }
extern "C" int aclrtGetDeviceCount(uint32_t *count) { *count = COUNT; return 0; }
extern "C" const char *aclrtGetSocName() { return SOC; }
"""

ASK = "import deepinfer.devices as d; print(d.nvidia_device()); print(d.ascend_device())"

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the stand-in libraries need g++")


@pytest.fixture
def ask(tmp_path: Path, run_python):
    """Build `library` from `source` with macros, and ask with only that library in reach."""

    def build_and_ask(library: str, source: str, **macros: object) -> str:
        definitions = [f"-D{name}={value}" for name, value in macros.items()]
        command = ["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", str(tmp_path / library), *definitions]
        subprocess.run(command, input=source, text=True, check=True)
        done = run_python("-c", ASK, env={"LD_LIBRARY_PATH": str(tmp_path)})
        assert done.returncode == 0, done.stderr
        return done.stdout

    return build_and_ask


def test_the_cuda_driver_tells_the_compute_capability(ask) -> None:
    said = ask("libcuda.so.1", CUDA, INIT=0, COUNT=2, MAJOR=9, MINOR=0)
    assert "NvidiaDevice(capability=(9, 0), note='')" in said


@pytest.mark.parametrize(
    ("init", "count", "note"),
    [(100, 0, "answered cuInit with error 100"), (803, 1, "error 803"), (0, 0, "shows no device")],
)
def test_a_driver_without_a_usable_device_is_a_note(ask, init, count, note) -> None:
    said = ask("libcuda.so.1", CUDA, INIT=init, COUNT=count, MAJOR=9, MINOR=0)
    assert "capability=None" in said
    assert note in said


def test_acl_tells_the_name_of_the_chip(ask) -> None:
    said = ask("libascendcl.so", ACL, COUNT=1, SOC='"Ascend950PR_9589"')
    assert "AscendDevice(soc='Ascend950PR_9589', note='')" in said


def test_acl_without_a_device_is_a_note(ask) -> None:
    said = ask("libascendcl.so", ACL, COUNT=0, SOC='"Ascend950PR_9589"')
    assert "soc=None" in said
    assert "shows no device" in said
