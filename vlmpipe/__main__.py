"""`python -m vlmpipe` is the command `vlmpipe`, also where the folder of scripts is not on the path."""

from vlmpipe.cli.entry import console

if __name__ == "__main__":
    console()
