"""`python -m stella`: the command line without its installed script."""

from stella.cli import main

if __name__ == "__main__":
    main()
