"""Objectives, one a file. Each turns clean rows into a `Batch`; `Objective` turns a batch into a loss."""

from rmdm.processes.ar import AR
from rmdm.processes.mdlm import MDLM
from rmdm.processes.objective import Batch, Draw, Objective, Process
from rmdm.processes.rmdm import RMDM

PROCESSES: dict[str, Process] = {"mdlm": MDLM(), "rmdm": RMDM(), "ar": AR()}

__all__ = ["AR", "MDLM", "PROCESSES", "RMDM", "Batch", "Draw", "Objective", "Process"]
