# Sourced by the scripts beside it: makes .venv beside the repository's files, installs lowmem with the exact versions of
# constraints.txt, and activates it. A second call finds everything there. `EXTRAS` names optional dependencies.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "lowmem needs Python 3.11 or newer, $python is $("$python" --version); set PYTHON=..." >&2; exit 2; }
stamp=".venv/installed-${EXTRAS:-plain}"
if [ ! -f "$stamp" ] || [ constraints.txt -nt "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
    echo "installing into .venv (a few minutes the first time) ..."
    "$python" -m venv .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
        --editable ".${EXTRAS:+[$EXTRAS]}"
    touch "$stamp"
fi
source .venv/bin/activate
