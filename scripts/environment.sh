# Sourced by the other scripts, with the name of an extra in `extra`: makes .venv once per state of the pinned versions, with
# that extra, and puts it first on PATH. PYTHON names the interpreter, 3.11 to 3.13. uv installs, in a third of pip's time.
cd "$(dirname "${BASH_SOURCE[0]}")/.."

pinned() { sed -n '/^requires-python/,/^\[project.scripts\]/p' pyproject.toml && cat constraints.txt scripts/triton.txt; }

install_into_venv() {
    local python="${PYTHON:-python3}"
    if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))'; then
        echo "Python 3.11, 3.12 or 3.13 is needed, and $python is $("$python" --version); name another one as PYTHON" >&2
        exit 2
    fi
    "$python" -m venv --clear .venv
    # PyPI's PyTorch brings CUDA along, 3 GB that a machine without a GPU has no use for: uv takes the build for what is
    # here from PyTorch's own index, or from a folder of wheels that pip is told of (find-links).
    local links torch=(--torch-backend "${UV_TORCH_BACKEND:-auto}")
    links=$(.venv/bin/python -m pip config list | sed -n "s/.*find-links='\(.*\)'/\1/p" | tail -n 1)
    [ -z "$links" ] || torch=(--find-links "$links")
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt uv
    local install=(.venv/bin/uv pip install --quiet --system-certs --python .venv/bin/python -c constraints.txt)
    "${install[@]}" "${torch[@]}" torch  # alone: uv would take triton from there as well, where there may be none
    "${install[@]}" -e ".[$extra]"
}

another_python() { [ -n "${PYTHON:-}" ] && [ "$("$PYTHON" --version)" != "$(.venv/bin/python --version 2> /dev/null)" ]; }

if another_python || { ! cmp -s <(pinned) .venv/installed-dev && ! cmp -s <(pinned) ".venv/installed-$extra"; }; then
    echo "installing into .venv: $says" >&2
    install_into_venv
    if [ "$extra" = dev ]; then
        source scripts/test_tools.sh
    fi
    pinned > ".venv/installed-$extra"
fi
export PATH="$PWD/.venv/bin:$PATH"
unset PYTHONDONTWRITEBYTECODE  # else each process would compile what it imports
