"""Tests of `ckptd.client.capture.uncaptured.shown_variables`."""

from __future__ import annotations

import types
from typing import Any

from ckptd.client.capture.uncaptured.shown_variables import only_shown


def a_loop(loader: Any, trains: Any, writer: Any, bar: Any) -> None:
    """Never runs: its source is read."""
    log: list[float] = []
    running, count, losses, mean, averages = 0.0, 0, [], None, []
    best, history, factor, scores, hidden = 9.0, [], 1.0, [], None
    for step, batch in enumerate(loader):
        loss, hidden = trains.step(batch, hidden, factor)
        running += loss.item()
        count += 1
        losses.append(loss.item())
        mean = loss.item() if mean is None else 0.9 * mean + 0.1 * loss.item()
        average = running / count
        averages.append(average)
        if step % 10 == 0:
            print(f"step {step}: {average:.3f}, {sum(losses) / len(losses):.3f}")  # noqa: T201
            writer.add_scalar("mean", mean, step)
            bar.set_postfix(loss=averages[-1])
            running, count = 0.0, 0
        best = min(best, loss)
        if best < 0.1:
            break
        history.append(loss.item())
        factor *= 0.5
        scores.append(loss)
        trains.adapt(sum(scores))
        print(writer.flush(log))  # noqa: T201
    writer.save(history)


def test_what_is_only_shown() -> None:
    """A running loss was named as if training depended on it. Not what a condition, another call or code after
    the loop uses.
    """
    shown = ["running", "count", "losses", "mean", "average", "averages"]
    used = ["best", "history", "factor", "scores", "hidden", "log", "loss", "batch", "trains"]
    assert only_shown(a_loop.__code__, [*shown, *used, "unknown"]) == frozenset(shown)


def test_variables_that_other_code_may_use_are_not_only_shown() -> None:
    """Those of a notebook's cell, whose source is not all that there is, and those of an enclosing function."""
    total = 0

    def adds() -> None:
        nonlocal total
        total += 1
        print(total)  # noqa: T201

    assert only_shown(adds.__code__, ["total"]) == frozenset()
    assert only_shown(compile("count = 0\nprint(count)", "<cell>", "exec"), ["count"]) == frozenset()


def test_variables_of_a_script_that_it_only_shows(tmp_path: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text("count = used = 0\nwhile used < 3:\n    count += 1\n    used += 1\nprint(count)\n")
    code = compile(script.read_text(), str(script), "exec")
    assert isinstance(code, types.CodeType)
    assert only_shown(code, ["count", "used"]) == {"count"}


def shares(loader: Any, given: list[float], trainer: Any) -> None:
    """Never runs: its source is read."""
    history, other, own = trainer.history, trainer.get(), list[float]()
    alias = given
    for loss in loader:
        for seen in (0,):
            del seen
        given.append(loss.item())
        alias.append(loss.item())
        history.append(loss.item())
        other.append(loss.item())
        own.append(loss.item())
        print(own)  # noqa: T201


def test_what_somebody_else_may_have_is_not_only_shown() -> None:
    """The caller reads a list that it has given, and an object reads its own."""
    assert not only_shown(shares.__code__, ["given", "alias", "history", "other"])
