"""``python -m trailmark``: the commands, for launchers that start modules."""

from trailmark.cli import main

if __name__ == "__main__":
    main()
