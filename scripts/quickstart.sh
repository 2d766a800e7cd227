#!/usr/bin/env bash
# From an empty checkout to a trained model: installs lowmem into .venv, extracts training data from this machine's Python standard
# library, creates a small Llama, trains it, and prompts it for docstrings of functions that it has not seen.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
python scripts/make_docstrings.py --out data/docstrings.jsonl
python scripts/make_model.py --data data/docstrings.jsonl --out models/quickstart
# By default glibc returns large activations to the system and requests them again, which takes a fifth of the time on two cores.
export MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=4294967296
run=runs/quickstart option=
for word in "$@"; do
    case "$option $word" in *" --output_dir="*) run="${word#*=}" ;; "--output_dir "*) run="$word" ;; esac
    option="$word"
done
lowmem sft --config configs/quickstart.yaml --resume_from_checkpoint auto "$@"
for signature in 'def is_valid(name)' 'def write(self, data)' 'def set_timeout(self, seconds)'; do
    echo "$signature"
    echo "    $(lowmem generate "$run" "Document this function of files:
$signature")"
done
