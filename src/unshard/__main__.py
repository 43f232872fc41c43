"""`python -m unshard`, and the command `unshard`."""

from unshard import signals


def main() -> None:
    """Run the command line; exit with 0, a code of `unshard.errors`, or 128 + signal number."""
    signals.end_at_once()
    from unshard.cli.running import run

    def command_line() -> None:
        from unshard.cli.main import main

        main()

    run(command_line)


if __name__ == "__main__":
    main()
