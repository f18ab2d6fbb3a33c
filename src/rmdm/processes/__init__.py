"""Objectives, one a file. Each turns clean rows into a `Batch`; `Objective` turns a batch into a loss."""

from rmdm.processes.ar import AR
from rmdm.processes.mdlm import MDLM
from rmdm.processes.objective import Batch, Draw, Objective, Process

PROCESSES: dict[str, Process] = {"mdlm": MDLM(), "ar": AR()}

__all__ = ["AR", "MDLM", "PROCESSES", "Batch", "Draw", "Objective", "Process"]
