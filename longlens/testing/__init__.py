"""What every mixer must keep, checked for one: ``check_mixer("las")``, or ``check_mixer(MyLayer)`` for one's own.

>>> all(check.passed is not False for check in check_mixer("las", processes=False))
True
"""

import inspect
import traceback
from typing import Any

import torch
from torch import nn

from longlens.mixers.registry import Mixer
from longlens.testing.processes import TWO_PROCESSES, check_two_processes
from longlens.testing.properties import PROPERTIES, DoesNotApply, Failed
from longlens.testing.subject import Check, Subject, describe_error, find_subject, sides

__all__ = ["Check", "check_mixer", "check_properties", "check_property", "check_two_processes", "find_subject", "sides"]


def check_mixer(
    mixer: str | Mixer | type[nn.Module],
    *,
    d_model: int = 16,
    length: int = 27,
    processes: bool = True,
    **options: Any,
) -> list[Check]:
    """Check what every mixer must keep.

    Options of the names in ``SMALL`` that nobody chose are small, so that chunks or buckets show in short sequences.

    Args:
        mixer: a name, a ``Mixer``, or the class of a layer, registered or not.
        d_model: width of the layer.
        length: length of the sequences, at least 8.
        processes: also train the layer in two processes, which takes some seconds.
        options: options of the mixer.
    """
    subject = find_subject(mixer, d_model=d_model, length=length, **options)
    found = check_properties(subject)
    if not processes or found[0].passed is False:
        return [*found, Check(TWO_PROCESSES, None, "left out")]
    return [*found, *check_two_processes([subject])]


def check_properties(subject: Subject) -> list[Check]:
    """All properties that one process can see. Without the first, the others are not looked at."""
    first, *others = PROPERTIES
    found = [check_property(subject, first)]
    if found[0].passed:
        return found + [check_property(subject, name) for name in others]
    return found + [Check(name, None, f"not checked: first mend {first}") for name in others]


def check_property(subject: Subject, name: str) -> Check:
    """One of ``PROPERTIES``. The random numbers of the program stay as they are."""
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Check(name, True, PROPERTIES[name](subject))
    except DoesNotApply as reason:
        return Check(name, None, str(reason))
    except Failed as reason:
        return Check(name, False, str(reason))
    except Exception as error:
        return Check(name, False, describe_error(error, inspect.getsourcefile(subject.layer)), traceback.format_exc())
