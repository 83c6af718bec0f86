"""Measures of a classifier beside its accuracy: top-5 accuracy, macro F1, calibration, and each class by itself."""

import numpy
from numpy.typing import NDArray

BINS = 15
"""Bins of confidence for the calibration error."""


def measure(
    labels: NDArray[numpy.int64],
    answers: NDArray[numpy.int64],
    confidence: NDArray[numpy.float64],
    in_top5: NDArray[numpy.bool_],
    classes: int,
) -> tuple[dict[str, float | None], list[float | None]]:
    """Returns the measures of a classifier's answers in percent, and the accuracy on each class's own examples.

    ``top5`` is None for five classes or fewer. ``macro_f1`` is the mean over the classes of the harmonic mean of
    precision and recall; classes that neither occur nor are answered are left out. ``ece`` is the expected calibration
    error: how far confidence and accuracy are apart, on average over bins of confidence. The accuracy on a class
    without examples is None.
    """
    right = labels == answers
    there, told = numpy.bincount(labels, minlength=classes), numpy.bincount(answers, minlength=classes)
    hits = numpy.bincount(labels[right], minlength=classes)
    met = there + told > 0
    f1 = 2 * hits[met] / (there + told)[met]
    # A network that has diverged answers with NaN, which has no bin; its error is NaN, too.
    bins = numpy.minimum((numpy.nan_to_num(confidence) * BINS).astype(numpy.int64), BINS - 1)
    gaps = numpy.bincount(bins, weights=confidence - right, minlength=BINS)
    measures = {
        "accuracy": 100 * float(right.mean()),
        "top5": 100 * float(in_top5.mean()) if classes > 5 else None,
        "macro_f1": 100 * float(f1.mean()),
        "ece": 100 * float(numpy.abs(gaps).sum()) / len(labels),
    }
    return measures, [100 * float(hit) / int(n) if n else None for hit, n in zip(hits, there, strict=True)]


def average_precision(scores: NDArray[numpy.float64], truth: NDArray[numpy.bool_]) -> float | None:
    """Returns the mean precision over the right examples, each at the threshold of its own score; None without one."""
    if not truth.any():
        return None
    if not numpy.isfinite(scores).all():
        # A network that has diverged.
        return float("nan")
    order = numpy.argsort(-scores, kind="stable")
    hits = numpy.cumsum(truth[order])
    # Examples of the same score are above the threshold together.
    ends = numpy.append(numpy.flatnonzero(numpy.diff(scores[order])), len(scores) - 1)
    found = hits[ends]
    return float((numpy.diff(found, prepend=0) * found / (ends + 1)).sum() / truth.sum())
