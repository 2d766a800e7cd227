# Sourced by the scripts in this folder: creates .venv in the repository, installs lowmem with DeepSpeed and the exact versions
# of constraints.txt there, and activates it. A second call installs nothing. `EXTRAS` names more optional dependencies. With
# `FLOOR=1` it is .venv-floor, with the oldest versions that are supported (constraints-floor.txt).
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    { echo "lowmem needs Python 3.10 or newer, $python is $("$python" --version); set PYTHON=..." >&2; exit 2; }
venv=".venv${FLOOR:+-floor}"
extras="deepspeed${EXTRAS:+,$EXTRAS}"
stamp="$venv/installed-$extras"
if [ ! -f "$stamp" ] || [ -n "$(find constraints.txt constraints-floor.txt pyproject.toml -newer "$stamp")" ]; then
    echo "installing into $venv (a few minutes the first time) ..."
    "$python" -m venv "$venv"
    # of each package the first line counts
    awk -F '==' '!seen[$1]++' ${FLOOR:+constraints-floor.txt} constraints.txt > "$venv/constraints.txt"
    install=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$venv/constraints.txt")
    "${install[@]}" torch    # first: DeepSpeed imports it while it is built
    "${install[@]}" --editable ".[$extras]"
    touch "$stamp"
fi
source "$venv/bin/activate"
