"""What the commands print."""

from collections.abc import Mapping
from typing import Any

from rich.table import Table


def rises_table(summary: Mapping[str, Any]) -> Table:
    """The rise of every reward, and of gold by kind of prompt, from an evaluation's summary."""
    gold = summary["gold"]
    title = f"{gold['num_prompts']} held-out prompts, {gold['num_captions']} different captions"
    table = Table(title=title, title_justify="left")
    for column in ("score", "base", "tuned", "rise", "95 % interval"):
        table.add_column(column, justify="left" if column == "score" else "right")
    rows = {f"{name} (gold)" if name == gold["name"] else name: rise for name, rise in summary["rewards"].items()}
    rows |= {f"{gold['name']}, {kind}": rise for kind, rise in summary["by_kind"].items()}
    for name, r in rows.items():
        interval = f"{_number(r['rise_low'], '+.3g')} to {_number(r['rise_high'], '+.3g')}"
        table.add_row(name, _number(r["base"]), _number(r["tuned"]), _number(r["rise"], "+.3g"), interval)
    return table


def _number(value: float | None, form: str = ".4g") -> str:
    return "-" if value is None else format(value, form)
