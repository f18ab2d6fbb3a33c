"""`rmdm report`: flags, and the function behind them."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rmdm.arguments import check_out


def flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `rmdm report`."""
    parser.add_argument("runs", nargs="+", help="run directories or released models' folders")
    parser.add_argument(
        "--out", metavar="DIR", help="where to write (default: report/ beside the runs, or in a single one)"
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where a few texts are drawn")


def run(args: argparse.Namespace, show: Callable[[str], None]) -> dict[str, Any]:
    """Write the page and the tables, and say what they lack."""
    from rmdm.report.page import write_report
    from rmdm.report.read import default_folder

    check_out(args.out)
    runs = [Path(run) for run in args.runs]
    report = write_report(runs, Path(args.out) if args.out else default_folder(runs), device=args.device)
    if report.missing:
        show(f"not measured yet ({len(report.missing)}); the report ends with the commands:")
        for what, _ in report.missing:
            show(f"  {what}")
    show(f"tables: {report.markdown}\nreport: {report.html}")
    lacking = [{"what": what, "command": command} for what, command in report.missing]
    return {"report": str(report.html), "tables": str(report.markdown), "missing": lacking}
