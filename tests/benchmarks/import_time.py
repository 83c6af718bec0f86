"""What `import solver_plugins` takes beyond `import torch`: processor time, best of several processes, taken in turns.

    python -m tests.benchmarks.import_time [--repeats 7]

Bytecode is written aside first, as an installed package has it.
"""

import argparse
import os
import subprocess
import sys
import tempfile

IMPORTS = {"torch": "import torch", "torch and solver_plugins": "import torch, solver_plugins"}


def seconds(statement: str, environment: dict[str, str]) -> float:
    """Returns the processor time of a fresh interpreter that runs a statement."""
    code = f"{statement}; import time; print(time.process_time())"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": cache, "OMP_NUM_THREADS": "1"}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for statement in IMPORTS.values():
            seconds(statement, environment)
        found = [{name: seconds(one, environment) for name, one in IMPORTS.items()} for _ in range(repeats)]
    best = {name: min(one[name] for one in found) for name in IMPORTS}
    for name, value in best.items():
        print(f"{name:26} {value:.2f} s")
    print(f"{'difference':26} {best['torch and solver_plugins'] - best['torch']:.2f} s (aim: below 0.3)")


if __name__ == "__main__":
    main()
