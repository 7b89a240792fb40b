# Sourced when .venv is made for the tests: what some of them need besides Python's packages. As root, Debian's packages are
# installed; whoever is not root installs them by hand, or sees these tests skipped with the reason.

debian() {
    [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null || return
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"; } > .venv/apt.log 2>&1
}

.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .venv/triton -r scripts/triton.txt ||
    echo "without nvidia-pytriton (Linux, glibc 2.35) the tests of Triton's server are skipped" >&2
if ! command -v chromium chromium-browser google-chrome > /dev/null; then
    debian chromium || .venv/bin/python -m playwright install chromium > .venv/playwright.log 2>&1 ||
        echo "without a browser the tests of the server's page are skipped: install chromium" >&2
fi
if [ "$(uname)" = Linux ] && ! command -v bwrap > /dev/null; then
    debian bubblewrap || echo "without bubblewrap the tests of HumanEval's sandbox are skipped: install bubblewrap" >&2
fi
