"""The prompt suite: every prompt alone, in every configuration, next to plain decoding.

The configurations take turns within a prompt, and which one is first changes from prompt to
prompt, so what else the machine does hits them alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.errors import OptionError
from engine.experiments.bench.request import PLAIN, Configuration, RequestResult, measure_request
from engine.experiments.bench.suite_results import Measured, medians
from engine.options import Prompt

if TYPE_CHECKING:
    from engine.session import Session

# enough for passes of most widths to come twice, which records them
_WARM_UP_TOKENS = 32


class PromptSuite:
    """Measures named prompts; `done` holds what is finished, also after an interruption.

    The first configuration must be Configuration.plain. repeats: requests of each kind, of which
    the one with the median time counts. measured: requests that are not done again. Raises
    OptionError for two configurations of one name, and what Session.context raises for a prompt.
    """

    def __init__(
        self,
        session: Session,
        prompts: Sequence[tuple[str, Prompt]],
        configurations: Sequence[Configuration],
        *,
        repeats: int = 1,
        measured: Measured | None = None,
    ) -> None:
        names = [configuration.name for configuration in configurations]
        if names[:1] != [PLAIN]:
            raise ValueError("the first configuration is not the plain one")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise OptionError(
                f"The configuration {twice[0]} is given twice.", "Give every one once."
            )
        session.context([prompt for _, prompt in prompts], configurations[0].options)
        self.prompts, self.configurations = list(prompts), list(configurations)
        self._session, self._repeats = session, repeats
        self.measured: Measured = dict(measured or {})

    @property
    def n_requests(self) -> int:
        """How many requests `requests` makes; those of the warm-up do not count."""
        return len(self.prompts) * len(self.configurations) * self._repeats

    @property
    def done(self) -> dict[str, list[RequestResult]]:
        """Finished requests of each configuration, in the order of the prompts."""
        names = [configuration.name for configuration in self.configurations]
        return medians(names, [name for name, _ in self.prompts], self.measured)

    def warm_up(self) -> None:
        """A few tokens in every configuration, not counted. Raises what Session.start raises."""
        name, prompt = self.prompts[0]
        for configuration in self.configurations:
            n = configuration.options.n_predict
            few = replace(
                configuration.options,
                n_predict=min(n, _WARM_UP_TOKENS) if n > 0 else _WARM_UP_TOKENS,
            )
            measure_request(self._session, prompt, name, Configuration(configuration.name, few))

    def requests(self) -> Iterator[tuple[RequestResult, int]]:
        """Measure what is left; each request is in `done` before it is given with the number of
        its repetition, from 0."""
        for number, (name, prompt) in enumerate(self.prompts):
            for repeat in range(self._repeats):
                first = (number + repeat) % len(self.configurations)
                for configuration in self.configurations[first:] + self.configurations[:first]:
                    key = configuration.name, name, repeat
                    if key not in self.measured:
                        found = measure_request(self._session, prompt, name, configuration)
                        self.measured[key] = found
                        yield found, repeat
