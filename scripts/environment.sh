# Sourced by the other scripts: makes .venv once per state of the pinned versions, and puts it first on PATH.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
stamp=.venv/installed
if ! [ -f "$stamp" ] || ! cmp -s <(cat pyproject.toml constraints.txt scripts/triton.txt) "$stamp"; then
    echo "installing into .venv ..." >&2
    "${PYTHON:-python3}" -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv/triton -r scripts/triton.txt
    cat pyproject.toml constraints.txt scripts/triton.txt > "$stamp"
fi
export PATH="$PWD/.venv/bin:$PATH"
