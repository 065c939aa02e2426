"""Kernels under clang, where each memory is an address space of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deepinfer.backends.ascend950.twin.check import clang, complaints

pytestmark = pytest.mark.skipif(not clang(), reason="there is no clang here (package ziglang, or clang++ on the path)")
HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["add_rows.asc", "product.asc", "runner/kernels.asc"])
def test_a_kernel_without_mistakes_has_no_wrong_type(name: str) -> None:
    assert complaints((HERE / name).read_text()) == ""


@pytest.mark.parametrize(("old", "new", "said"), [
    ("gm2ub_align(UB(float, 0), a + row * n,", "gm2ub_align(a, UB(float, 0),", "no matching function"),
    ("ub2gm_align(c + row * n, UB(float, 1024)", "ub2gm_align(c + row * n, c", "no matching function"),
    ("asc_loadalign(x, a + i);", "x = a[i];", "no viable|no match"),
    ("asc_vf_call<add>(UB(float, 0),", "asc_vf_call<add>(a,", "cannot initialize a parameter of type"),
    ("asc_add(x, x, y, m);", "asc_add(x, x, y);", "no matching function"),
])
def test_a_pointer_into_the_wrong_memory_is_a_type_error(old: str, new: str, said: str) -> None:
    text = (HERE / "add_rows.asc").read_text()
    assert old in text
    assert re.search(said, complaints(text.replace(old, new, 1)))
