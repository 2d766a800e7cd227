# Sourced by the scripts in this folder. Creates and activates .venv in the repository, with lowmem, DeepSpeed and the exact versions
# of constraints.txt. Does not reinstall if nothing has changed. `EXTRAS` adds optional dependencies. `FLOOR=1` uses .venv-floor
# instead, with the oldest supported versions (constraints-floor.txt).
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
    # the first line of each package takes precedence
    awk -F '==' '!seen[$1]++' ${FLOOR:+constraints-floor.txt} constraints.txt > "$venv/constraints.txt"
    install=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$venv/constraints.txt")
    "${install[@]}" torch    # first, because DeepSpeed's build imports it
    "${install[@]}" --editable ".[$extras]"
    touch "$stamp"
fi
source "$venv/bin/activate"
