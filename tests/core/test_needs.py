"""Which steps of a list are left out: those that need what a graph does not hold."""

from typing import NamedTuple

from qtk.core.needs import concerned


class Rewrite(NamedTuple):
    name: str
    needs: frozenset[object] = frozenset()


def test_a_step_is_judged_by_what_the_steps_before_it_left():
    held = ["Einsum"]
    rewrites = (Rewrite("to products", frozenset({"Einsum"})), Rewrite("of products", frozenset({"MatMul", "Gemm"})),
                Rewrite("of einsum", frozenset({"Einsum"})), Rewrite("always"))
    ran = []
    for rewrite in concerned(rewrites, lambda: set(held)):
        ran.append(rewrite.name)
        if rewrite.name == "to products":
            held[:] = ["MatMul"]
    assert ran == ["to products", "of products", "always"]
