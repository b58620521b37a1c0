"""Inspection of the feed-forward blocks of a run: units as key-value memories, experts by their tokens.

import moe_ffn
from moe_ffn.report.inspect import figures, inspect_run, text_of_run

run = moe_ffn.load_run("runs/x")
inspection = inspect_run(run, text_of_run(run, num_tokens=65_536))
inspection.units[0].share("token"), inspection.routers["layer_00"].agreement["token"].share
figures.agreements(inspection)
"""

from moe_ffn.report.inspect.inspection import Inspection as Inspection
from moe_ffn.report.inspect.inspection import inspect_model as inspect_model
from moe_ffn.report.inspect.inspection import inspect_run as inspect_run
from moe_ffn.report.inspect.text import TokenizedText as TokenizedText
from moe_ffn.report.inspect.text import text_of_file as text_of_file
from moe_ffn.report.inspect.text import text_of_run as text_of_run
from moe_ffn.report.inspect.text import text_of_tokens as text_of_tokens
