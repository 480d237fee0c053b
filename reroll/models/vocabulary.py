"""Two models that are to speak about the same tokens: do they mean the same by an id?"""

from __future__ import annotations

from reroll.errors import ModelError
from reroll.models.load import load_tokenizer


def shared_vocabulary(student: str, teacher: str, *, role: str = "teacher") -> int:
    """How many ids the two share: those of the student's tokenizer, without the padding that heads may have behind them.

    `role` is what the other model is called in the error.
    Raises ModelError unless the teacher has every token of the student under the same id. A teacher may know more.
    """
    wanted = load_tokenizer(student).get_vocab()
    has = wanted if teacher == student else load_tokenizer(teacher).get_vocab()
    differing = sorted((id, token) for token, id in wanted.items() if has.get(token) != id)
    if differing:
        id, token = differing[0]
        found = f"id {has[token]}" if token in has else "no token at all"
        raise ModelError(
            f"the {role} {teacher} and the student {student} do not share a vocabulary: {len(differing)} of "
            f"{len(wanted)} tokens differ, the first is {token!r}, id {id} for the student, {found} for the {role} "
            f"(they are compared token by token: use a {role} of the student's model family)"
        )
    return max(wanted.values()) + 1
