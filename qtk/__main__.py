"""``python -m qtk``: the command line, where its script is not on the path."""

from qtk.cli.app import main

if __name__ == "__main__":
    main()
