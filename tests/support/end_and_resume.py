"""Runs train_lm three times in one process: whole, until SIGTERM after step 5, and resumed.

Usage: end_and_resume.py OUT OPTION...; exits with 0 if the second run ended with 75.
"""

import functools
import os
import pathlib
import signal
import sys

import jax

from support.paths import ROOT

sys.path.insert(0, str(ROOT / "experiments"))
import train_lm
from lm import corpus, processes, report

OUT, OPTIONS = pathlib.Path(sys.argv[1]), sys.argv[2:]


# These take long and do not matter here.
corpus.load = functools.cache(corpus.load)
corpus.bigram_entropy = corpus.zlib_entropy = lambda text: 1.0


class StopAfterFive(processes.StopSignal):
    def is_set(self, step):
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)  # Python handles it before the next line
        return super().is_set(step)


def main():
    train_lm.main([*OPTIONS, "--out", str(OUT / "whole")])
    update = jax.config.update
    jax.config.update = lambda name, value: name == "jax_num_cpu_devices" or update(name, value)
    ours, processes.StopSignal = processes.StopSignal, StopAfterFive
    report.plot_loss = lambda *args: None  # once is enough
    ended = [*OPTIONS, "--out", str(OUT / "ended")]
    try:
        train_lm.main([*ended, "--save-every", "3"])
    except SystemExit as error:
        assert error.code == processes.TRY_AGAIN, error.code
    else:
        raise AssertionError("the run went on after SIGTERM")
    processes.StopSignal = ours
    train_lm.main([*ended, "--save-every", "4", "--resume"])


main()
