# Sourced by the other scripts: makes .venv once per state of the pinned versions, and puts it first on PATH.
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Debian's packages, where they may be installed.
install_packages() {
    local as=(env DEBIAN_FRONTEND=noninteractive)
    [ "$(id -u)" = 0 ] || as=(sudo -n "${as[@]}")
    command -v apt-get && "${as[@]}" true && "${as[@]}" apt-get update -qq &&
        "${as[@]}" apt-get install -y -qq --no-install-recommends "$@"
} > /dev/null 2>&1

# A browser for the tests of the server's page: Debian's Chromium where it may be installed, else playwright's own.
install_browser() {
    local own="${PLAYWRIGHT_BROWSERS_PATH:-$HOME/.cache/ms-playwright}"
    command -v chromium chromium-browser google-chrome > /dev/null && return
    compgen -G "$own/chromium-*/INSTALLATION_COMPLETE" > /dev/null && return
    install_packages chromium || true
    command -v chromium > /dev/null && return
    .venv/bin/python -m playwright install chromium > /dev/null 2>&1 ||
        echo "no browser could be installed; the page's tests need one: install Chromium as chromium on the PATH" >&2
}

# What programs of a model run in (scripts/scoring/sandbox.py); without it nothing runs them.
install_sandbox() {
    command -v bwrap > /dev/null || [ "$(uname)" != Linux ] && return
    install_packages bubblewrap || true
    command -v bwrap > /dev/null || echo "bubblewrap could not be installed; HumanEval's programs need it" >&2
}

stamp=.venv/installed
if ! [ -f "$stamp" ] || ! cmp -s <(cat pyproject.toml constraints.txt scripts/triton.txt) "$stamp"; then
    echo "installing into .venv ..." >&2
    "${PYTHON:-python3}" -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv/triton -r scripts/triton.txt
    install_browser
    install_sandbox
    cat pyproject.toml constraints.txt scripts/triton.txt > "$stamp"
fi
export PATH="$PWD/.venv/bin:$PATH"
