"""Arguments of `python -m bench` that would measure nothing."""

import pytest

from bench.__main__ import main


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("casts", ("rows", "columns", "rounds")),
        ("compile", ("rounds",)),
        ("decode", ("rounds",)),
        ("elementwise", ("rows", "features", "rounds", "calls")),
        ("graphs", ("rounds",)),
        ("host", ("rounds",)),
        ("parallel", ("ranks", "rounds", "tokens")),
        ("recipes", ("tokens", "steps", "weights-every")),
        ("speed", ("rounds",)),
        ("tune", ("rounds",)),
    ],
)
def test_counts_below_1_are_refused(command, options, capsys):
    for option in options:
        for count in ("0", "-1"):
            with pytest.raises(SystemExit) as stopped:
                main([command, f"--{option}", count])
            assert stopped.value.code == 2
            assert f"--{option} is {count}, but must be at least 1." in capsys.readouterr().err
