"""From the words of a command line to items, pulled one by one."""

from vlmserve.commands.caption.inputs.opening import InputFormat, Inputs, open_inputs
from vlmserve.commands.caption.inputs.source import Columns

__all__ = ["Columns", "InputFormat", "Inputs", "open_inputs"]
