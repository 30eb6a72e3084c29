"""The private Ray and the tiny checkpoint of the integration tests."""

from tests.integration.conftest import private_ray, tiny_llama  # noqa: F401
