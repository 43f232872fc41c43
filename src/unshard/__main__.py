"""`python -m unshard`."""

from unshard.cli.main import main

if __name__ == "__main__":
    main()
