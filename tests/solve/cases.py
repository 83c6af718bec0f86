"""One row per registered solver; ``test_every_solver_has_a_row`` fails when one is missing.

A row holds options that make the solver go through all of its branches within a few iterations.
"""

CASES: dict[str, dict[str, object]] = {
    "proxgd": {},
    "fista": {},
    "anderson": {"window": 2, "weights": "differentiated"},
    "proxsg": {"p": 0.5},
    "ms2gd": {"p": 0.5, "inner": 2},
    "s2gd": {"inner": 2},
    "svrg": {"inner": 2},
    "rcd": {"p": 0.5},
}
DETERMINISTIC = ("proxgd", "fista", "anderson")
SAMPLING = tuple(name for name in CASES if name not in DETERMINISTIC)
