"""Runs on a Ray cluster, whose machines share the folder of the runs and have longlens installed."""

import os
import socket
from collections.abc import Iterator
from typing import Any

from longlens.data.store import home
from longlens.errors import BadInput, Interrupted
from longlens.registry import added_modules
from longlens.training.logs import StopSignals
from longlens.training.many import Outcome, RunRequest, launch

PATIENCE = 10.0  # seconds to wait for a cluster's answer


def run_on_ray(requests: list[RunRequest], address: str | None, stop: StopSignals) -> Iterator[Outcome]:
    """Each run in a task of Ray, with a GPU if the runs ask for one, as they end. Without an address, the cluster is
    that of ``RAY_ADDRESS``, or one that is started here."""
    check_address(address or os.environ.get("RAY_ADDRESS"))
    try:
        import ray
        from ray.exceptions import RayError
    except ImportError:
        raise BadInput("ray is not installed: pip install 'longlens[ray]'") from None

    ours = not ray.is_initialized()
    if ours:
        wanted = {"LONGLENS_HOME": str(home().absolute())}
        if "LONGLENS_IMPORT" in os.environ:
            wanted["LONGLENS_IMPORT"] = ",".join(map(str, added_modules()))
        dashboard = False if address is None else None
        try:
            ray.init(
                address=address, log_to_driver=False, include_dashboard=dashboard, runtime_env={"env_vars": wanted}
            )
        except SystemExit:  # Ray's own answer to a signal
            raise Interrupted("stopped before the first run") from None
        stop.listen()  # Ray has set handlers of its own
    try:
        waiting = {_submit(ray, request): request for request in requests}
        cancelled = False
        while waiting:
            done, _ = ray.wait(list(waiting), num_returns=1, timeout=0.2)
            for task in done:
                request = waiting.pop(task)
                try:
                    result, error = ray.get(task)
                except RayError as problem:  # the machine or the worker died
                    result, error = None, ": ".join([type(problem).__name__, *str(problem).splitlines()[:1]])
                yield Outcome(request.config, request.folder, result, error)
            if stop.asked and not cancelled:
                cancelled = True
                for task in waiting:
                    ray.cancel(task)  # those at work save before they end
        if stop.asked:
            raise Interrupted("stopped, and the runs are saved")
    finally:
        if ours:
            ray.shutdown()


def _submit(ray: Any, request: RunRequest) -> Any:
    device, threads = request.runtime.device, request.runtime.threads or 1
    on_gpu = device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
    for needed, kind in ((threads, "CPU"), (int(on_gpu), "GPU")):
        most = max((node["Resources"].get(kind, 0) for node in ray.nodes()), default=0)
        if needed > most:
            raise BadInput(f"a run needs {needed} {kind}, and no machine of the cluster has more than {most:.0f}")
    task = ray.remote(num_cpus=threads, num_gpus=int(on_gpu), max_retries=0)(launch)
    return task.remote(request.to_json(), request.folder, request.quiet)


def check_address(address: str | None) -> None:
    """Refuse an address where nobody listens, at which Ray itself would wait for minutes."""
    if address is None or address in ("auto", "local"):
        return
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise BadInput(f"address must be HOST:PORT, ray://HOST:PORT or auto, got {address}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE).close()
    except OSError as error:
        answer = f"no Ray cluster answers at {address} ({error.strerror or error})"
        raise BadInput(f"{answer}: start one there, or leave the address out") from None
