"""Arguments of scripts that record what they measure."""

import argparse


def make_parser(description: str) -> argparse.ArgumentParser:
    """Returns a parser with the option for ``report.write_run``."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--revision", help="revision of the code to record; default: git's")
    return parser
