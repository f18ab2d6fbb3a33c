"""How far a flow's end points are off, by solver and number of evaluations of the network.

    python benchmarks/solvers.py RUN... [--rows 64] [--steps 8,12,16,24,32,64] [--reference 512]

RUN is a run or a release with a flow; `shipped` is the model that comes with the package. Adams's rules, with which the
package follows a flow, stand beside Heun's, which take two evaluations a step. The error is the distance to
where Adams's rules lead in `--reference` evaluations, as a share of its length; the first line is the reference against
half as many. Draws follow the network away from its weaker copy, if there is one; z_0 starts from such draws.
"""

import argparse
from itertools import pairwise

import torch
from torch import Tensor, nn

from rmdm.hub import find_device, load_model
from rmdm.meanflow.flow import Flow
from rmdm.meanflow.transport import integrate


def heun(net: nn.Module, z_BGD: Tensor, start: float, stop: float, steps: int) -> Tensor:
    """Heun's rule, two evaluations for each of `steps` / 2 steps."""
    for t, r in pairwise(torch.linspace(start, stop, steps // 2 + 1, dtype=torch.float64).tolist()):
        z_BGD = integrate(net, z_BGD, t, r, 2)
    return z_BGD


def show(name: str, flow: Flow, rows: int, steps: list[int], reference: int) -> None:
    """A table for each direction."""
    noise = flow.noise(rows, 0).float()
    ends = {True: integrate(flow.leads, noise, 0.0, 1.0, reference)}
    z_0 = ends[True] if flow.leads is flow.net else integrate(flow.net, noise, 0.0, 1.0, reference)
    ends[False] = integrate(flow.net, z_0, 1.0, 0.0, reference)
    for draws in (True, False):
        net, begin, start, stop = (flow.leads, noise, 0.0, 1.0) if draws else (flow.net, z_0, 1.0, 0.0)

        def error(z_BGD: Tensor, end: Tensor = ends[draws]) -> str:
            return f"{float((z_BGD - end).norm() / end.norm()):.3%}"

        print(f"{name}, {'draws of e' if draws else 'e to z_0'}, {rows} rows")
        half = error(integrate(net, begin, start, stop, reference // 2))
        print(f"{reference // 2} against {reference} evaluations: {half}")
        print("evaluations  " + "".join(f"{count:>9}" for count in steps))
        for title, solver in (("Adams", integrate), ("Heun", heun)):
            found = (error(solver(net, begin, start, stop, count)) for count in steps)
            print(f"{title:13}" + "".join(f"{each:>9}" for each in found), flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", default="8,12,16,24,32,64")
    parser.add_argument("--reference", type=int, default=512)
    args = parser.parse_args()
    for run in args.runs:
        model = load_model(run, find_device("auto"))
        flow = model.latents.source.flow
        if flow is None:
            print(f"{run} draws its latents without a flow")
            continue
        show(model.config.name, flow, args.rows, [int(count) for count in args.steps.split(",")], args.reference)


if __name__ == "__main__":
    main()
