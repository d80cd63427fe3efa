"""`python -m spmd_train`."""

from spmd_train.cli import main

if __name__ == "__main__":
    main()
