"""Section: the device suite, tests/gpu; in simulation also the runtime on the simulated accelerator."""

import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from functools import partial

from bench.prove_gpu.device import Device
from bench.prove_gpu.rank import Rows, options

LIMIT_S = 300.0
"""Of pytest, within the section's own: what has passed until then is on the page."""
SIMULATED_ACCELERATOR = ["tests/device/test_runtime.py", "-k", "losses_gradients_and_weights"]


def main() -> None:
    """Runs pytest; a row for each file. Ends with 1 where a test fails or none passes."""
    told = options()
    device, rows = Device.of(told.device), Rows(told.rows, writes=True)
    runs = [["tests/gpu"], *([SIMULATED_ACCELERATOR] if device.simulated else [])]
    failed = False
    for words in runs:
        with tempfile.TemporaryDirectory() as folder:
            report = f"{folder}/report.xml"
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
            environment = {**os.environ, "SHARDWRIGHT_TEST_DEVICE": told.device}
            if not _ended([*command, *words], environment, LIMIT_S):
                rows.fail(f"interrupted after {LIMIT_S:.0f} s: later tests of {words[0]} have not run")
                failed = True
            cases = list(ElementTree.parse(report).iter("testcase"))
        for file in sorted({case.get("classname", "") for case in cases}):
            results = Counter(_result(case) for case in cases if case.get("classname") == file)
            columns = {result: results[result] for result in ("passed", "failed", "skipped")}
            rows.add("tests", file=file.replace(".", "/") + ".py", **columns)
        for case in cases:
            if _result(case) == "failed":
                found = [*case.findall("failure"), *case.findall("error")]
                rows.fail(f"{case.get('classname')}::{case.get('name')}\n{found[0].text}")
        failed = failed or not any(_result(case) == "passed" for case in cases)
        failed = failed or any(_result(case) == "failed" for case in cases)
    sys.exit(int(failed))


def _ended(command: list[str], environment: dict[str, str], limit_s: float) -> bool:
    """Run pytest; whether it came to its end. Interrupted at the limit, it still writes its report."""
    # Behind nohup, or in the background of a script, a process begins with Ctrl-C ignored, and so would this.
    allowing = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, env=environment, preexec_fn=allowing)
    try:
        process.wait(limit_s)
        return True
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        process.wait()
        return False


def _result(case: ElementTree.Element) -> str:
    kinds = {child.tag for child in case}
    return "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"


if __name__ == "__main__":
    main()
