# Sourced by the scripts in this folder: creates .venv in the repository, installs lowmem with DeepSpeed and the exact versions
# of constraints.txt there, and activates it. A second call installs nothing. `EXTRAS` names more optional dependencies.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "lowmem needs Python 3.11 or newer, $python is $("$python" --version); set PYTHON=..." >&2; exit 2; }
extras="deepspeed${EXTRAS:+,$EXTRAS}"
stamp=".venv/installed-$extras"
if [ ! -f "$stamp" ] || [ constraints.txt -nt "$stamp" ] || [ pyproject.toml -nt "$stamp" ]; then
    echo "installing into .venv (a few minutes the first time) ..."
    "$python" -m venv .venv
    # torch first: DeepSpeed imports it while it is built
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
        --editable ".[$extras]"
    touch "$stamp"
fi
source .venv/bin/activate
