# Sourced by the scripts in this folder. Sets the number of processes to start on this machine, by default one per GPU.
processes="${PROCESSES:-$({ nvidia-smi --list-gpus 2>/dev/null || true; } | wc -l)}"
if [ "$processes" -eq 0 ]; then
    echo "no GPU was found; PROCESSES=2 starts two processes on the CPU" >&2
    exit 2
fi
