"""A made-up tokenizer, for tests of stop strings."""


def spell(tokens):
    """Text of the tokens: every token is a word of one, two or three letters."""
    return "".join("abcdefghijklmnopqrstuvwxyz"[token % 26] + "ABCD"[token // 26] * (token % 3) for token in tokens)


def length_until(string: str, tokens: list[int]) -> int:
    """How many tokens it takes until their text contains the string."""
    return next(count for count in range(1, len(tokens) + 1) if string in spell(tokens[:count]))
