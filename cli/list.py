"""``oot-quant list``: every backend that is installed, also those that cannot be used."""

from __future__ import annotations

import json
from importlib import metadata
from typing import Any

import click

from oot_quant.doctor.privacy import without_home
from oot_quant.hookspecs import all_hooks
from oot_quant.manager import ENTRY_POINT_GROUP, BackendRecord, backends
from oot_quant_cli.render import Page, ascii_wanted

SCHEMA = 1


@click.command("list", short_help="List the installed backends.")
@click.option("--hook", metavar="NAME", help="Only backends that implement this hook.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object and nothing else.")
@click.option("--ascii", "plain", is_flag=True, help="Use no symbols beyond ASCII.")
def list_backends(hook: str | None, as_json: bool, plain: bool) -> None:
    """List the installed backends, also those that cannot be used, with the reason.

    Imports neither torch, vLLM nor a quantization library. Always exits with 0: use
    "oot-quant doctor" to be told by the exit code.
    """
    if hook is not None and hook not in all_hooks():
        known = ", ".join(all_hooks())
        raise click.BadParameter(f"no such hook; known: {known}", param_hint="'--hook'")
    records = [record for record in backends().records if hook is None or hook in record.hooks]
    if as_json:
        entries = [as_data(record) for record in records]
        click.echo(json.dumps({"schema": SCHEMA, "backends": entries}, indent=2))
        return
    page = Page(plain=plain or ascii_wanted())
    for record in records:
        write(page, record)
    if not records:
        where = f"implements {hook}" if hook else f"is installed (entry points {ENTRY_POINT_GROUP})"
        page.line(f"No backend {where}.")
    page.show()


def as_data(record: BackendRecord) -> dict[str, Any]:
    """One backend as JSON types."""
    info = record.info
    library = info.library if info else None
    data = {
        "name": record.name,
        "distribution": record.distribution,
        "version": record.version,
        "origin": record.origin,
        "status": record.status,
        "error": record.error or None,
        "summary": info.summary if info else None,
        "methods": list(record.methods),
        "formats": list(info.formats) if info else [],
        "platforms": list(info.platforms) if info else [],
        "library": {
            "distribution": library.distribution,
            "minimum": library.minimum,
            "found": _version(library.distribution),
        }
        if library
        else None,
        "hooks": list(record.hooks),
    }
    cleaned: dict[str, Any] = without_home(data)
    return cleaned


def write(page: Page, record: BackendRecord) -> None:
    """One backend in a few lines."""
    data = as_data(record)
    name = f"{record.name} ({record.distribution} {record.version}, {record.origin})"
    page.finding("ok" if record.ok else "fail", name, indent=0)
    if data["error"]:
        page.text(f"cannot be used: {data['error']}", indent=2)
        page.command("oot-quant doctor --only plugins", indent=4)
        return
    page.text(data["summary"], indent=2)
    for label in ("methods", "formats", "platforms"):
        page.text(f"{label}: {', '.join(data[label])}", indent=2)
    library = data["library"]
    if library:
        found = f"{library['found']} is installed" if library["found"] else "not installed"
        needed = f"{library['distribution']} {library['minimum']} or newer"
        page.text(f"library: {needed}, {found}", indent=2)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
