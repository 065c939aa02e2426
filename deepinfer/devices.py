"""What accelerator this machine has, asked of its driver by `dlopen`: no framework, no command-line tool.

Nothing here raises: a machine without a driver is an ordinary machine. A driver that is present but
refuses to answer is kept as a note, so that a choice made because of it can say why.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from dataclasses import dataclass

from deepinfer.errors import DeepInferError

_COMPUTE_CAPABILITY_MAJOR = 75
_COMPUTE_CAPABILITY_MINOR = 76


@dataclass(frozen=True)
class NvidiaDevice:
    """The first device the CUDA driver shows (`CUDA_VISIBLE_DEVICES` applies).

    Fields: `capability` (major, minor) or None when there is no device; `note` why there is none.
    """

    capability: tuple[int, int] | None
    note: str


@dataclass(frozen=True)
class AscendDevice:
    """The first device ACL shows.

    Fields: `soc` its name (`Ascend950...`) or None when there is no device; `note` why there is none.
    """

    soc: str | None
    note: str


@functools.cache
def nvidia_device() -> NvidiaDevice:
    """The compute capability of device 0, from `libcuda.so.1`."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return NvidiaDevice(None, "no NVIDIA driver (libcuda.so.1) is installed")
    status = driver.cuInit(0)
    if status != 0:
        return NvidiaDevice(None, f"the NVIDIA driver answered cuInit with error {status}")
    count, device, major, minor = (ctypes.c_int() for _ in range(4))
    if driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or count.value == 0:
        return NvidiaDevice(None, "the NVIDIA driver shows no device")
    statuses = (
        driver.cuDeviceGet(ctypes.byref(device), 0),
        driver.cuDeviceGetAttribute(ctypes.byref(major), _COMPUTE_CAPABILITY_MAJOR, device),
        driver.cuDeviceGetAttribute(ctypes.byref(minor), _COMPUTE_CAPABILITY_MINOR, device),
    )
    if any(statuses):
        return NvidiaDevice(None, f"the NVIDIA driver does not describe device 0 (error {max(statuses)})")
    return NvidiaDevice((major.value, minor.value), "")


@functools.cache
def ascend_device() -> AscendDevice:
    """The SoC name of the first Ascend device, from CANN's `libascendcl.so`, or from the CPU twin's where
    `DEEPINFER_ASCEND_TWIN` asks for it."""
    twin = os.environ.get("DEEPINFER_ASCEND_TWIN", "") not in ("", "0")
    if twin:
        try:
            importlib.import_module("deepinfer.backends.ascend950.twin.device").use_twin()
        except DeepInferError as error:
            return AscendDevice(None, f"the CPU twin cannot be built: {error}")
    try:
        acl = ctypes.CDLL("libascendcl.so")
    except OSError:
        return AscendDevice(None, "no Ascend runtime (libascendcl.so) is installed")
    acl.aclrtGetSocName.restype = ctypes.c_char_p
    acl.aclInit(None)  # a second call is refused and harmless
    count = ctypes.c_uint32()
    status = acl.aclrtGetDeviceCount(ctypes.byref(count))
    if status != 0 or count.value == 0:
        return AscendDevice(None, f"the Ascend runtime shows no device (status {status})")
    name = acl.aclrtGetSocName()
    if not name:
        return AscendDevice(None, "the Ascend runtime does not name its device")
    if name.endswith(b"-twin") and not twin:
        return AscendDevice(None, "the Ascend runtime loaded here is the CPU twin's")
    return AscendDevice(name.decode("ascii", "replace"), "")
