# Sourced by the other scripts: makes .venv once per state of the pinned versions, and puts it first on PATH.
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# A browser for the tests of the server's page: Debian's Chromium where it may be installed, else playwright's own.
install_browser() {
    local as=(env DEBIAN_FRONTEND=noninteractive) own="${PLAYWRIGHT_BROWSERS_PATH:-$HOME/.cache/ms-playwright}"
    command -v chromium chromium-browser google-chrome > /dev/null && return
    compgen -G "$own/chromium-*/INSTALLATION_COMPLETE" > /dev/null && return
    [ "$(id -u)" = 0 ] || as=(sudo -n "${as[@]}")
    if command -v apt-get > /dev/null && "${as[@]}" true 2> /dev/null; then
        "${as[@]}" apt-get update -qq && "${as[@]}" apt-get install -y -qq --no-install-recommends chromium || true
    fi > /dev/null 2>&1
    command -v chromium > /dev/null && return
    .venv/bin/python -m playwright install chromium > /dev/null 2>&1 ||
        echo "no browser could be installed; the page's tests need one: install Chromium as chromium on the PATH" >&2
}

stamp=.venv/installed
if ! [ -f "$stamp" ] || ! cmp -s <(cat pyproject.toml constraints.txt scripts/triton.txt) "$stamp"; then
    echo "installing into .venv ..." >&2
    "${PYTHON:-python3}" -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv/triton -r scripts/triton.txt
    install_browser
    cat pyproject.toml constraints.txt scripts/triton.txt > "$stamp"
fi
export PATH="$PWD/.venv/bin:$PATH"
