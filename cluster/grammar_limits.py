"""What llguidance's own limits let through: `multipleOf`, whose automaton has a state for each remainder.

999,983 took 14 s of CPU to compile, and the memory grows as fast. Where schemas are joined (`allOf` and the like), so
are their multiples, to the least common one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

MAX_MULTIPLE = 50_000
"""Takes a quarter of a second."""
_EMBEDDED = "%json"  # a schema within Lark's syntax


def check_multiples(grammar: Any) -> None:
    """Raises ValueError if the `multipleOf`s in an llguidance grammar, as JSON, have a least common multiple above
    `MAX_MULTIPLE`, counted in units of the last decimal place."""
    found = set(_multiples(grammar))
    places = max((-number.as_tuple().exponent for number in found), default=0)
    if places > len(str(MAX_MULTIPLE)):
        raise ValueError(f"multipleOf: more than {len(str(MAX_MULTIPLE))} decimal places")
    units = [abs(int(number.scaleb(max(places, 0)))) for number in found if number.adjusted() <= len(str(MAX_MULTIPLE))]
    if len(units) < len(found) or math.lcm(*units) > MAX_MULTIPLE:
        raise ValueError(
            f"multipleOf: the least common multiple of those in a schema may be at most {MAX_MULTIPLE}, in units of "
            "the last decimal place"
        )


def _multiples(value: Any) -> Iterator[Decimal]:
    if isinstance(value, dict):
        for key, each in value.items():
            if key == "multipleOf" and each and (type(each) is int or (type(each) is float and math.isfinite(each))):
                yield Decimal(str(each)).normalize()
            else:
                yield from _multiples(each)
    elif isinstance(value, list):
        for each in value:
            yield from _multiples(each)
    elif isinstance(value, str):
        for text in value.split(_EMBEDDED)[1:]:
            try:
                schema, _ = json.JSONDecoder().raw_decode(text.lstrip())
            except ValueError:  # llguidance says what is wrong with it
                continue
            yield from _multiples(schema)
