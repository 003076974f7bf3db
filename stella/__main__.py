"""`python -m stella`: the command line where its script is not installed."""

from stella.cli import main

if __name__ == "__main__":
    main()
