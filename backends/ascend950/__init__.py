"""Huawei Ascend 950: AscendC sources, a CPU twin that checks them, and binaries where CANN is installed."""

TARGETS = ("ascend950",)
BUILT = True
UNPROVEN = TARGETS  # no engine for it has run on a device
RUNNER = "ascend"
STAND_IN = "DEEPINFER_ASCEND_TWIN"  # set, engines run on the CPU twin
