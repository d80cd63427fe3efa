"""The `plan` command: what its flags ask for, and what it prints and writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console

from spmd_train.config import Config, load
from spmd_train.disk import write_whole
from spmd_train.errors import RequestError, RunError, listed
from spmd_train.mesh import MeshShape
from spmd_train.plan import present
from spmd_train.plan.both import for_all, nothing_fits
from spmd_train.plan.cluster import load_cluster
from spmd_train.plan.draw import pictures
from spmd_train.plan.memo import memo
from spmd_train.plan.page import page
from spmd_train.plan.reasons import command
from spmd_train.plan.search import Fixed, search
from spmd_train.plan.search import Plan as Found
from spmd_train.plan.verify import verified
from spmd_train.requests import Plan


def plan(request: Plan) -> None:
    """Search each cluster and present what was found.

    Raises:
        RequestError: the request was wrong. RunError: nothing fits, or a file cannot be written.
    """
    config, fixed = _planned(request)
    if request.calibrate:
        _calibrate(request)
    clusters = [load_cluster(path) for path in request.cluster]
    console = Console(width=None if sys.stdout.isatty() else 160, soft_wrap=True, highlight=False)
    plans = [search(config, cluster, fixed) for cluster in clusters]
    if len(plans) > 1:
        _present_all(request, plans, console)
    else:
        _present_one(request, plans[0], console)
        if not plans[0].candidates:
            raise RunError(nothing_fits(plans[0], fixed))


def _present_all(request: Plan, plans: list[Found], console: Console) -> None:
    shared = for_all(plans)
    if request.json:
        print(json.dumps(present.shared_as_json(shared, plans, request.top), indent=2))
    else:
        present.show_shared(shared, plans, request.top, console)


def _present_one(request: Plan, found: Found, console: Console) -> None:
    asked = (request.top, request.config or "tiny", request.set)
    if not request.json:
        present.show(found, *asked, console)
        if request.pictures:
            console.print(pictures(found, request.top, min(console.width, 120)))
    _write_files(request, found)
    compiled = []
    for candidate, result in verified(found, request.verify) if request.verify else ():
        compiled.append(result)
        if not request.json:
            present.show_verified(candidate, result, console)
    if request.json:
        print(json.dumps(present.as_json(found, compiled, *asked), indent=2))


def _write_files(request: Plan, found: Found) -> None:
    """The memo and the page, where they are asked for."""
    texts: dict[str, str] = {}
    if request.html:
        texts[request.html] = page(found, request.top)
    if request.memo and found.candidates:
        first = found.candidates[0]
        train = command(found, first, request.config or "tiny", request.set)
        texts[request.memo] = memo(found, first, train)
    for path, text in texts.items():
        try:
            write_whole(Path(path), text.encode())
        except OSError as error:
            raise RunError(f"cannot write {path} ({error.strerror}).") from error
        print(f"written: {path}", file=sys.stderr)


def _calibrate(request: Plan) -> None:
    """Measure the devices here and keep what they do in the cluster file."""
    if len(request.cluster) != 1:
        raise RequestError("--calibrate needs one --cluster: the file of the cluster it runs on.")
    import jax

    from spmd_train.distributed import join_processes
    from spmd_train.plan.calibrate import calibrate_file

    join_processes(60.0)
    measured = calibrate_file(Path(request.cluster[0]), jax.devices())
    print(f"measured into {request.cluster[0]}: {measured}", file=sys.stderr)


def _planned(request: Plan) -> tuple[Config, Fixed]:
    """The configuration to plan for, and what of the search is fixed."""
    sets = list(request.set)
    for flag, value in (("top", request.top), ("microbatch-size", request.microbatch_size)):
        if value is not None and value < 1:
            raise RequestError(f"--{flag} is {value}; it must be at least 1.")
    if not request.cluster:
        raise RequestError("plan needs --cluster: a cluster file, or the name of a bundled one.")
    if request.verify < 0:
        raise RequestError(f"--verify is {request.verify}; it must be at least 0.")
    of_one = {
        "--memo": request.memo,
        "--html": request.html,
        "--verify": request.verify,
        "--pictures": request.pictures,
        "--mesh": request.mesh,
    }
    given = [flag for flag, value in of_one.items() if value]
    if len(request.cluster) > 1 and given:
        raise RequestError(
            f"{listed(given)}: for one cluster, and {len(request.cluster)} are given; plan each "
            "of them by itself."
        )
    if request.global_batch is not None:
        sets += [f"batch.global_size={request.global_batch}"]
    fixed = Fixed(
        mesh=MeshShape.parse(request.mesh) if request.mesh else None,
        zero=request.zero,
        microbatch_size=request.microbatch_size,
        schedule=request.schedule,
        remat=request.remat,
        compute=request.compute,
    )
    return load(request.config, sets), fixed
