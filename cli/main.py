"""``oot-quant``: the group of commands. Importing it imports neither torch nor vLLM."""

from __future__ import annotations

import click

from oot_quant import __version__
from oot_quant_cli.doctor import doctor
from oot_quant_cli.list import list_backends

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 78}


@click.group(context_settings=CONTEXT)
@click.version_option(__version__, prog_name="oot-quant")
def cli() -> None:
    """Quantization backends for vLLM, as plugins."""


cli.add_command(list_backends)
cli.add_command(doctor)
