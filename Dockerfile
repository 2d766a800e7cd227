# lowmem with the exact versions of constraints/today.txt. On a machine with the NVIDIA container toolkit:
#   docker build --tag lowmem .
#   docker run --gpus all --ipc host --volume "$PWD:/work" --volume ~/.cache/huggingface:/root/.cache/huggingface lowmem sft --config chats.yaml
FROM python:3.12-slim
# Triton and torch.compile need a C++ compiler
RUN apt-get update && apt-get install --yes --no-install-recommends build-essential && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml README.md LICENSE MANIFEST.in CHANGELOG.md /src/
COPY constraints /src/constraints
COPY lowmem /src/lowmem
RUN pip install --no-cache-dir --constraint /src/constraints/today.txt /src peft bitsandbytes
WORKDIR /work
ENTRYPOINT ["lowmem"]
