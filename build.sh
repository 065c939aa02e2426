#!/usr/bin/env bash
# Sets the project up, runs its example, runs its tests. Safe to repeat: work already done is not done again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

usage() {
    cat <<'TEXT'
usage: ./build.sh [setup] | run [ARGUMENTS] | test [PYTEST ARGUMENTS]

  setup   check the machine and install into the active virtual environment, else into .venv
  run     setup, then compile an engine for this machine and generate text with it
          (examples/offline_inference.py; arguments are passed on)
  test    setup with torch and the test tools, then run the tests (arguments are passed to pytest)

DEEPINFER_ACCELERATOR=nvidia|ascend|cpu names the accelerator; unset, the best one found is used.
DEEPINFER_HF_MODEL_DIR names a local checkpoint for `run`. PYTHON names the Python that makes .venv.
TEXT
}

say() { printf '%s\n' "$*" >&2; }
fail() {
    say "error: $1"
    exit 4
}

recent_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local name
    for name in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python}; do
        if recent_enough "$name"; then
            printf '%s\n' "$name"
            return
        fi
    done
    fail "no Python 3.11 or newer: found $(python3 --version 2>&1 || true); install one, or name it with PYTHON=/path/to/python3"
}

# True when the environment of Python $1 holds a package `deepinfer` that is not this project's.
holds_another_deepinfer() {
    "$1" -I - <<'PYTHON'
import importlib.util, pathlib, sys
spec = importlib.util.find_spec("deepinfer")
places = [] if spec is None else list(spec.submodule_search_locations or [])
ours = any((pathlib.Path(place) / "distribution.txt").is_file() for place in places)
sys.exit(0 if spec is not None and not ours else 1)
PYTHON
}

# Sets $environment to the folder of the virtual environment to install into.
choose_environment() {
    local active=${VIRTUAL_ENV:-} python
    if [[ -n $active && -x $active/bin/python ]]; then
        if ! recent_enough "$active/bin/python"; then
            say "note: the active environment $active has a Python older than 3.11; using .venv instead"
        elif holds_another_deepinfer "$active/bin/python"; then
            say "note: the active environment $active holds another project's package \`deepinfer\`; using .venv instead"
        else
            environment=$active
            return
        fi
    fi
    environment=$PWD/.venv
    if [[ ! -x $environment/bin/python ]] || ! "$environment/bin/python" -m pip --version >/dev/null 2>&1; then
        python=$(find_python)
        say "making $environment with $("$python" --version)"
        "$python" -m venv "$environment" ||
            fail "$python cannot make a virtual environment: install its venv module (package python3-venv on Debian and Ubuntu)"
    fi
    recent_enough "$environment/bin/python" ||
        fail ".venv has a Python older than 3.11: move it away and run ./build.sh again"
}

# Sets $target, or ends with the sentence and the exit code that `deepinfer.accelerator` gives.
choose_target() {
    local line
    line=$("$environment/bin/python" -m deepinfer.accelerator)
    say "$line"
    line=${line#target=}
    target=${line%% *}
    "$environment/bin/python" -m deepinfer.machine "$target"
}

# True when the environment imports `deepinfer` from this folder.
imports_from_here() {
    "$environment/bin/python" -I -c '
import pathlib, sys, deepinfer
sys.exit(pathlib.Path(deepinfer.__file__).resolve().parents[1] != pathlib.Path(sys.argv[1]).resolve())
' "$PWD" 2>/dev/null
}

# Installs this folder with the extras in $1 (comma separated, may be empty) unless that was done before.
install() {
    local extras=$1 stamp=$environment/.deepinfer-aot-installed state
    state="[$extras] $(cat pyproject.toml constraints.txt | cksum)"
    if grep -Fxqs "$state" "$stamp" && imports_from_here; then
        return
    fi
    say "installing into $environment${extras:+ with $extras}"
    "$environment/bin/python" -m pip install --disable-pip-version-check \
        --constraint constraints.txt --editable ".${extras:+[$extras]}" >&2 ||
        fail "pip could not install the packages of pyproject.toml: see its message above, mend it, and run ./build.sh again"
    printf '%s\n' "$state" >>"$stamp"
}

extra_of_target() {
    case $target in
        sm*) echo cuda ;;
        ascend*) echo ascend ;;
    esac
}

next_steps() {
    local shown=${environment#"$PWD"/}
    cat <<TEXT
ready in $shown. Next:
  ./build.sh run                        compile an engine for this machine and generate text with it
  ./build.sh test                       run the tests
  $shown/bin/deepinfer compile --help   compile an engine of your own
TEXT
}

mode=${1:-setup}
shift || true
case $mode in
    setup | run | test) ;;
    -h | --help | help)
        usage
        exit 0
        ;;
    *)
        usage >&2
        say "error: unknown command '$mode'; allowed setup, run, test"
        exit 2
        ;;
esac

choose_environment
choose_target
extras=$(extra_of_target)
case $mode in
    setup)
        install "$extras"
        next_steps
        ;;
    run)
        install "$extras"
        exec "$environment/bin/python" examples/offline_inference.py "$@"
        ;;
    test)
        install "${extras:+$extras,}test"
        # The entry script, not `python -m pytest`: that would put this folder's generic names on the import path.
        exec "$environment/bin/pytest" "$@"
        ;;
esac
