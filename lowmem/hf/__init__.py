"""The parts of the package that work inside Hugging Face libraries."""

from lowmem.hf.versions import check_version

# before anything private of them is imported
for _package in ("torch", "transformers", "trl", "accelerate"):
    check_version(_package)
