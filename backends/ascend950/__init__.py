"""Huawei Ascend 950: AscendC sources, a CPU twin that checks them, and binaries where CANN is installed."""

TARGETS = ("ascend950",)
BUILT = False
RUNNER = "ascend"
