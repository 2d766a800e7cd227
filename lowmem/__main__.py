"""`python -m lowmem`, and what `torchrun -m` and the DeepSpeed launcher start."""

from lowmem.cli import main

if __name__ == "__main__":
    main()
