"""Huawei Ascend 950: AscendC sources, a CPU twin that checks them, and binaries where CANN is installed."""

TARGETS = ("ascend950",)
BUILT = False
RUNNER = "ascend"
STAND_IN = "DEEPINFER_ASCEND_TWIN"  # set, engines run on the CPU twin
