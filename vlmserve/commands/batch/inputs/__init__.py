"""Inputs: the words of a command line become items, pulled one by one."""

from vlmserve.commands.batch.inputs.files import Columns
from vlmserve.commands.batch.inputs.opening import InputFormat, Inputs, local_files, open_inputs

__all__ = ["Columns", "InputFormat", "Inputs", "local_files", "open_inputs"]
