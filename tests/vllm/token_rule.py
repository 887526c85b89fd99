"""Which tokens a simulated engine samples: a pure rule, the same inside vLLM and in the tests.

The token at position p (counted from 0 over prompt and answer) of a request with seed s is

    TOKEN_LOW + blake2b("s:p", 8 bytes, big endian) mod (TOKEN_HIGH - TOKEN_LOW)

It depends on neither the batch nor the instance, so two engines given the same requests fill the
same blocks. Standard library only: vLLM's environment imports this module by itself.
"""

import hashlib
from collections.abc import Sequence

TOKEN_LOW = 300  # above the special tokens and the 256 bytes of a byte-level vocabulary
TOKEN_HIGH = 3800  # below the size of every vocabulary in use; no end-of-sequence token in between


def sampled_token(seed: str, position: int) -> int:
    """Returns the token that stands at `position` of the request with this seed."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return TOKEN_LOW + int.from_bytes(digest, "big") % (TOKEN_HIGH - TOKEN_LOW)


def prompt_seed(token_ids: Sequence[int]) -> str:
    """Returns the seed that a simulated server gives to a prompt: equal prompts, equal answers."""
    text = ",".join(map(str, token_ids))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def answer(seed: str, prompt_length: int, count: int) -> list[int]:
    """Returns the first `count` tokens sampled after a prompt of `prompt_length` tokens."""
    return [sampled_token(seed, prompt_length + i) for i in range(count)]
