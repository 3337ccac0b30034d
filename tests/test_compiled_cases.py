"""Compiled training steps have the bits of the interpreter and of the reference: a covering array.

Two values of any two choices are together in one of these programs, if they fit each other.
"""

import pytest

from support import covering
from support.fast_compilation import AS_FOR_USERS
from support.interpreted import compile_and_interpret

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
ROWS = covering.rows()


@pytest.mark.parametrize("row", range(len(ROWS)))
def test_it_has_the_bits_of_the_interpreter(row):
    compile_and_interpret(covering.configuration(ROWS[row]), compiler_options=AS_FOR_USERS)


def test_every_pair_of_values_is_in_a_row():
    assert len(ROWS) <= 40
    missing = covering.possible() - set().union(*map(covering.pairs, ROWS))
    assert not missing, "run: PYTHONPATH=tests python -m support.covering"
