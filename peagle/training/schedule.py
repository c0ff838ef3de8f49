"""The learning rate over a run: it rises, stays, and falls at the end.

While it stays, nobody needs to know when the run will end, so a run can be continued with more data at any time. Owns
the shape. Refuses to know optimisers.
"""

from __future__ import annotations

from peagle.training.config import OptimiserOptions

_LAST_SHARE = 0.1


def learning_rate(options: OptimiserOptions, *, step: int, steps_left: int | None) -> float:
    """Rate of a step.

    Args:
        options: the shape.
        step: from 0.
        steps_left: about how many steps are to come, this one included; None if nobody knows.
    """
    rate = options.learning_rate * min(1.0, (step + 1) / max(options.warmup_steps, 1))
    if options.decay_steps and steps_left is not None and steps_left < options.decay_steps:
        share = max(steps_left, 0) / options.decay_steps
        rate *= _LAST_SHARE + (1.0 - _LAST_SHARE) * share
    return rate
