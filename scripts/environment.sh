# Sourced by the scripts in this folder. Creates and activates .venv in the repository, with lowmem, DeepSpeed and the exact versions
# of constraints/today.txt. Does not reinstall if nothing has changed. Environment variables:
#   EXTRAS  more optional dependencies
#   STACK   uses .venv-STACK, with the versions of constraints/STACK.txt, and of constraints/today.txt for other packages
#   TORCH   replaces the stack's version of torch, in .venv-STACK-torchTORCH
#   PYTHON  the Python interpreter (python3)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-python3}"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    { echo "lowmem needs Python 3.10 or newer, $python is $("$python" --version); set PYTHON=..." >&2; exit 2; }
stack="${STACK:-today}"
constraints="constraints/$stack.txt"
[ -f "$constraints" ] || { echo "stack $stack was not found in constraints/. Stacks: $(basename -s .txt constraints/*)" >&2; exit 2; }
venv=".venv-$stack${TORCH:+-torch$TORCH}"
[ "$venv" != .venv-today ] || venv=.venv
extras="deepspeed${EXTRAS:+,$EXTRAS}"
stamp="$venv/installed-$extras"
if [ ! -f "$stamp" ] || [ -n "$(find "$constraints" constraints/today.txt pyproject.toml -newer "$stamp")" ]; then
    echo "installing into $venv (a few minutes the first time) ..."
    "$python" -m venv "$venv"
    [ "$stack" = newest ] || constraints="$constraints constraints/today.txt"
    # the first line of each package takes precedence
    { echo "${TORCH:+torch==$TORCH}"; cat $constraints; } | awk -F '==' '!seen[$1]++' > "$venv/constraints.txt"
    install=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$venv/constraints.txt")
    "${install[@]}" torch    # first, because DeepSpeed's build imports it
    "${install[@]}" --editable ".[$extras]"
    touch "$stamp"
fi
source "$venv/bin/activate"
