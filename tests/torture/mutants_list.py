"""Plausible bugs of the engine, each with the play that shows it, what sees it and what names it.

Each is a few words of the program replaced by others. Where nothing can notice one, the reason is
given here. Further ones, which take more than other words, are in tests.support.mutations.
"""

from __future__ import annotations

from tests.torture.mutants_of_decoding import DECODING
from tests.torture.mutants_of_memory import MEMORY
from tests.torture.mutants_of_rollback import UNDOING
from tests.torture.mutants_of_states import STATES

MUTANTS = (*UNDOING, *STATES, *MEMORY, *DECODING)
