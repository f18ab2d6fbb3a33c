"""Objectives, one a file. Each turns clean rows into a `Batch`; `Objective` turns a batch into a loss."""

from rmdm.processes.ar import AR
from rmdm.processes.mdlm import MDLM
from rmdm.processes.objective import Batch, Draw, Objective, Process
from rmdm.processes.rmdm import RMDM
from rmdm.processes.sedd import SEDD

PROCESSES: dict[str, Process] = {"mdlm": MDLM(), "rmdm": RMDM(), "sedd": SEDD(), "ar": AR()}

__all__ = ["AR", "MDLM", "PROCESSES", "RMDM", "SEDD", "Batch", "Draw", "Objective", "Process"]
