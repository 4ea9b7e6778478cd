"""What language models cost, and the caps that hold whatever happens: values only.

No SDK reports dollars, so the prices are data that the owner can edit. What is not known is never taken for free: a
model without a price has no cost (None), and with a cap on money it is refused before the search starts.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError

from harness.config import Section, explain
from harness.errors import BadInput, SpendingCapReached
from harness.paths import StudyPaths
from harness.policy import packaged_prices
from harness.rows import Spent
from harness.terms import Usage
from harness.toml import read_toml, refuse_unknown_keys

Dollars = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Price(Section):
    """Dollars per million tokens of one model."""

    input: Dollars
    cache_read: Dollars
    cache_write: Dollars
    output: Dollars

    def cost_usd(self, usage: Usage) -> float:
        """Return what this usage costs."""
        millionths = (
            usage.input_tokens * self.input
            + usage.cache_read_tokens * self.cache_read
            + usage.cache_write_tokens * self.cache_write
            + usage.output_tokens * self.output
        )
        return millionths / 1e6


class Prices(Section):
    """``prices.toml``: what each model costs, and when somebody last looked."""

    date: datetime.date
    models: Mapping[str, Price] = Field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file; `BadInput` names it and the key that does not fit."""
        return read_toml(path, cls.parse)

    @classmethod
    def parse(cls, table: Mapping[str, Any]) -> Self:
        """Check what is already read from TOML; `BadInput` names the key that does not fit."""
        refuse_unknown_keys(cls, table, "")
        try:
            return cls.model_validate(table)
        except ValidationError as error:
            raise BadInput(explain(error)) from error

    @classmethod
    def of(cls, paths: StudyPaths) -> Self:
        """Return the study's prices, or those that come with us for a study that is older than its prices."""
        return cls.read(paths.prices_toml if paths.prices_toml.exists() else packaged_prices())

    def cost_usd(self, model: str, usage: Usage) -> float | None:
        """Return what a call cost, or None for a model that has no price here."""
        price = self.models.get(model)
        return None if price is None else price.cost_usd(usage)


@dataclass(frozen=True, kw_only=True, slots=True)
class Caps:
    """Totals of the study over all its runs. None: no such cap."""

    max_usd: float | None = None
    max_tokens: int | None = None

    def check(self, spent: Spent, most: Usage, most_usd: float | None) -> None:
        """Raise `SpendingCapReached` if a call could pass a cap at its worst case, calls in flight counted."""
        if self.max_tokens is not None and spent.tokens + most.tokens > self.max_tokens:
            raise SpendingCapReached(
                f"{spent.tokens:,} of {self.max_tokens:,} tokens are used or reserved,"
                f" and a call could take {most.tokens:,} more"
            )
        if self.max_usd is None:
            return
        if most_usd is None or spent.unpriced_calls:
            raise SpendingCapReached(f"a cap of ${self.max_usd:.2f} is set, and a call of this study has no price")
        if spent.usd + most_usd > self.max_usd:
            raise SpendingCapReached(
                f"${spent.usd:.2f} of ${self.max_usd:.2f} are spent or reserved,"
                f" and a call could cost ${most_usd:.2f} more"
            )
