"""`python -m spmd_train`."""

from spmd_train.cli import entry

if __name__ == "__main__":
    entry()
