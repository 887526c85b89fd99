"""One stack for all tests that need it: it heals between them."""

from collections.abc import Iterator

import pytest

from tests.deploy.compose_stack import ComposeStack


@pytest.fixture(scope="session")
def stack() -> Iterator[ComposeStack]:
    """The stack of `compose.yaml`, up from nothing; it is down afterwards, whatever happened."""
    stack = ComposeStack()
    try:
        stack.up()
        yield stack
    finally:
        stack.down()
