"""Runs on a Ray cluster, whose machines share the folder of the runs and have longlens installed."""

import os
from collections.abc import Iterator

from longlens.registry import added_modules
from longlens.tasks.store import home
from longlens.training.events import Interrupted, StopSignals
from longlens.training.many import Order, Outcome, launch


def launch_on_ray(orders: list[Order], address: str | None) -> Iterator[Outcome]:
    """Each run in a task of Ray, with a GPU if the runs ask for one, as they end.

    Args:
        orders: the runs.
        address: of the cluster; by default the one of ``RAY_ADDRESS``, or else one that is started here.
    """
    try:
        import ray
        from ray.exceptions import RayError
    except ImportError:
        raise ValueError("ray is not installed: pip install 'longlens[ray]'") from None

    wanted = {"LONGLENS_HOME": str(home().absolute())}
    if "LONGLENS_IMPORT" in os.environ:
        wanted["LONGLENS_IMPORT"] = ",".join(map(str, added_modules()))
    ours = not ray.is_initialized()
    if ours:
        ray.init(
            address=address, log_to_driver=False, include_dashboard=False if address is None else None,
            runtime_env={"env_vars": wanted},
        )  # fmt: skip
    try:
        on_gpu = orders[0].runtime.device == "cuda" or (
            orders[0].runtime.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0
        )
        threads = orders[0].runtime.threads or 1
        for needed, kind in ((threads, "CPU"), (int(on_gpu), "GPU")):
            most = max((node["Resources"].get(kind, 0) for node in ray.nodes()), default=0)
            if needed > most:
                raise ValueError(f"a run needs {needed} {kind}, and no machine of the cluster has more than {most:.0f}")
        task = ray.remote(num_cpus=threads, num_gpus=1 if on_gpu else 0, max_retries=0)(launch)
        waiting = {task.remote(order): order for order in orders}
        cancelled = False
        with StopSignals() as stop:
            while waiting:
                done, _ = ray.wait(list(waiting), num_returns=1, timeout=0.2)
                for run in done:
                    order = waiting.pop(run)
                    try:
                        yield ray.get(run)
                    except RayError as error:  # the machine or the worker died
                        reason = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
                        yield Outcome(order.config, order.folder, error=reason)
                if stop.asked and not cancelled:
                    cancelled = True
                    for run in waiting:
                        ray.cancel(run)  # those at work save before they end
        if stop.asked:
            raise Interrupted("stopped, and the runs are saved")
    finally:
        if ours:
            ray.shutdown()
