"""Text that others wrote, made fit for one line of a log."""

from __future__ import annotations

_MAX_CHARS = 300


def one_line(value: object, max_chars: int = _MAX_CHARS) -> str:
    r"""Return a value's text as one line that a log or a terminal can show safely.

    Line breaks, escape sequences, characters that reorder or hide text and lone surrogates
    are escaped; what is longer than ``max_chars`` is cut, and the line says by how much. A
    value that fails to say what it is, is named by its type.

    Args:
        value: A text, an exception, or anything else with a ``str``.
        max_chars: Characters of the text that are shown at most, counted before escaping.

    Example:
        >>> one_line("fine\n2026-01-01 ERROR forged \x1b[2J")
        'fine\\n2026-01-01 ERROR forged \\x1b[2J'
        >>> one_line("a" * 50, max_chars=4)
        'aaaa... (46 more characters)'
    """
    try:
        text = value if type(value) is str else str(value)
    except Exception:  # noqa: BLE001 - a log line must not fail for what it is about
        text = f"<{type(value).__name__} without a text>"
    rest = len(text) - max_chars
    if rest <= 0:
        return printable(text)
    return f"{printable(text[:max_chars])}... ({rest:,} more characters)"


def printable(text: str, keep: str = "") -> str:
    r"""Escape what could act on a terminal or stay invisible, but for characters in ``keep``.

    Example:
        >>> printable("a\x1b[31m\tb"), printable("a\nb", keep="\n")
        ('a\\x1b[31m\\tb', 'a\nb')
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1.

    Example:
        >>> counted(1, "turn"), counted(1200, "turn")
        ('1 turn', '1,200 turns')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
