"""The reference against a brute force, element by element."""

from qtk.numerics import candidate_errors as reference
from tests.kernels import candidate_error_conformance


class TestReference(candidate_error_conformance.Conformance):
    backend = "reference"
    errors_of = staticmethod(reference.candidate_errors)
