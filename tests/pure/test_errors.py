"""Messages and exit codes of the error classes, and how a command ends."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from deepinfer import errors
from deepinfer.cli.failure import Command, Group

CODES = {
    errors.SpecError: 2,
    errors.PlanError: 3,
    errors.ToolchainError: 4,
    errors.ArtifactError: 5,
    errors.RequestError: 6,
    errors.InternalError: 70,
}


def run_failing(failure: BaseException, *, in_group: bool = False) -> Result:
    """A command that raises `failure`, run as a user would."""

    def body() -> None:
        raise failure

    command: click.Command = Command("probe", callback=body)
    if in_group:
        command = Group("deepinfer", commands={"probe": command})
    return CliRunner().invoke(command, ["probe"] if in_group else [])


def test_a_message_names_place_found_allowed_and_next_step() -> None:
    error = errors.SpecError(
        "top_k keeps more than there are",
        where="spec.py:41",
        found=512,
        allowed=[1, 384],
        next_step="lower index_topk.",
    )
    assert (
        str(error)
        == "spec.py:41: top_k keeps more than there are; found 512; allowed 1, 384; lower index_topk"
    )


def test_blanks_are_visible_in_the_message() -> None:
    assert str(errors.SpecError("unknown target", found="", allowed=[])).endswith("found ''; allowed nothing")
    assert str(errors.SpecError("unknown target", found="cpu ")).endswith("found 'cpu '")


@given(what=st.text(min_size=1), found=st.text() | st.lists(st.integers()), step=st.text(min_size=1))
def test_a_message_is_one_line(what: str, found: object, step: str) -> None:
    message = str(errors.PlanError(what, where="a\nb", found=found, allowed={"x\ny", "z"}, next_step=step))
    assert len(message.splitlines()) == 1


def test_a_bug_is_no_user_error() -> None:
    assert not issubclass(errors.InternalError, errors.DeepInferError)


def test_a_request_error_carries_a_client_status() -> None:
    assert errors.RequestError("the prompt is empty").http_status == 400
    assert errors.RequestError("no such model", http_status=404).http_status == 404
    with pytest.raises(errors.InternalError):
        errors.RequestError("our fault", http_status=500)


@pytest.mark.parametrize("in_group", [False, True])
@pytest.mark.parametrize(("kind", "code"), CODES.items())
def test_a_command_ends_with_one_line_and_the_code_of_the_error(
    kind: type[Exception], code: int, in_group: bool
) -> None:
    result = run_failing(kind("the sentence"), in_group=in_group)
    assert result.exit_code == code
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stderr.startswith("error: ")
    assert "the sentence" in result.stderr


def test_a_bug_leaves_its_traceback_in_the_named_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = run_failing(ZeroDivisionError("by nothing"))
    assert result.exit_code == 70
    (written,) = tmp_path.glob("deepinfer-traceback-*.txt")
    assert str(written) in result.stderr
    assert "ZeroDivisionError: by nothing" in written.read_text()
    assert "Traceback (most recent call last)" in written.read_text()


def test_a_full_disk_is_a_plan_error_that_names_the_file() -> None:
    result = run_failing(OSError(errno.ENOSPC, "No space left on device", "engines/a/lib.so"))
    assert result.exit_code == 3
    assert "engines/a/lib.so: no space is left" in result.stderr


def test_a_forbidden_path_is_an_artifact_error() -> None:
    result = run_failing(PermissionError(errno.EACCES, "Permission denied", "/etc/engine"))
    assert result.exit_code == 5
    assert "/etc/engine" in result.stderr


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_copy_without_room_names_its_destination(number: int) -> None:
    result = run_failing(OSError(number, os.strerror(number), "cache/kernels.so", None, "engines/a/kernels.so"))
    assert result.exit_code == 3
    assert result.stderr.startswith("error: engines/a/kernels.so: ")
    assert os.strerror(number) in result.stderr


@pytest.mark.parametrize(
    "number",
    [errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.EROFS],
)
def test_an_impossible_path_is_an_artifact_error_that_names_it(number: int) -> None:
    result = run_failing(OSError(number, os.strerror(number), "q1.log/x"))
    assert result.exit_code == 5
    assert result.stderr.startswith("error: q1.log/x: the path ")
    assert os.strerror(number) in result.stderr


def test_a_missing_file_of_the_installation_is_a_bug(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    inside = Path(errors.__file__).parent / "cli" / "gone.txt"
    assert run_failing(FileNotFoundError(errno.ENOENT, "No such file or directory", str(inside))).exit_code == 70
    assert run_failing(FileNotFoundError(errno.ENOENT, "No such file or directory")).exit_code == 70


def test_an_interrupt_ends_like_the_shell_expects() -> None:
    result = run_failing(KeyboardInterrupt())
    assert result.exit_code == 130
    assert "Traceback" not in result.output


def test_every_exit_code_has_an_entry_in_the_error_page(repository: Path) -> None:
    page = (repository / "docs" / "errors.md").read_text()
    for kind, code in CODES.items():
        assert f"## {kind.__name__}: exit code {code}" in page
