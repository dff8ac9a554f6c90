"""Inputs: the words of a command line become items, pulled one by one."""

from vlmserve.commands.batch.inputs.opening import InputFormat, Inputs, open_inputs
from vlmserve.commands.batch.inputs.source import Columns

__all__ = ["Columns", "InputFormat", "Inputs", "open_inputs"]
