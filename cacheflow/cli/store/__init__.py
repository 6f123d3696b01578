"""``cacheflow store``: look into an nvme folder, check it, tidy it, and carry objects elsewhere.

Everything goes through the backend, so it can be used while engines have the folder open, and the
bytes stay counted. Opening never makes a store. ``serve`` is another thing: a memory pool.
"""

from __future__ import annotations

import typer

from cacheflow.cli.store import carrying, checking, looking, removing, serving

__all__ = ["app"]

app = typer.Typer(
    help="Look into a store on disk, check it, tidy it, carry objects elsewhere; serve a pool.",
    no_args_is_help=True,
)
app.command("ls")(looking.ls)
app.command("stat")(looking.stat)
app.command("verify")(checking.verify)
app.command("rm")(removing.rm)
app.command("gc")(removing.gc)
app.command("invalidate")(removing.invalidate)
app.command("export")(carrying.export)
app.command("import")(carrying.import_)
app.command("serve")(serving.serve)
