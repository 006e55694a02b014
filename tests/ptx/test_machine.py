"""Small kernels, written by hand: what the emulator does, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from tests.ptx import machine
from tests.ptx.memory import AccessError
from tests.ptx.text import Address, parse

KERNEL = """
.version 8.7
.target sm_90
.extern .shared .align 16 .b8 global_smem[];
.visible .entry kernel(
    .param .u64 .ptr .global .align 1 kernel_param_0,
    .param .u32 kernel_param_1
)
.reqntid 64
{{
    .reg .pred %p<9>;
    .reg .b16 %rs<9>;
    .reg .b32 %r<30>;
    .reg .b64 %rd<9>;
$L__func_begin0:
    ld.param.b64 %rd1, [kernel_param_0];
    ld.param.b32 %r1, [kernel_param_1];
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, %ctaid.x;
    shl.b32 %r4, %r3, 6;
    add.s32 %r5, %r4, %r2;
    mul.wide.u32 %rd2, %r5, 4;
    add.s64 %rd3, %rd1, %rd2;      // of this thread
{body}
    ret;
$L__func_end0:
}}
"""
STORE = "st.global.b32 [%rd3], %r6;"


def launched(body, out, number=0, programs=1, shared=0, seeds=(0,)):
    """``out`` after each launch of 64 threads a program."""
    found = []
    for seed in seeds:
        result = out.clone()
        machine.run(KERNEL.format(body=body), [result, number], (programs,), 64, shared, seed)
        found.append(result.tolist())
    return found


def words(count):
    return torch.zeros(count, dtype=torch.int32)


def test_the_text_is_parsed():
    kernel = parse(KERNEL.format(body="@!%p1 ld.global.v2.b32 { %r6, %r7 }, [ %rd3 + 16 ];\nend:"))
    assert kernel.parameters == {"kernel_param_0": "u64", "kernel_param_1": "u32"}
    assert kernel.bits == {"%p": 1, "%rs": 16, "%r": 32, "%rd": 64}
    *_, load, leave = kernel.instructions
    assert (load.name, load.modifiers, load.predicate, load.negated) == ("ld", ("global", "v2", "b32"), "%p1", True)
    assert load.operands == (("%r6", "%r7"), Address("%rd3", 16))
    assert kernel.labels["end"] == kernel.instructions.index(leave)


def test_threads_and_programs_have_their_numbers():
    (found,) = launched(f"mad.lo.s32 %r6, %r3, 1000, %r2;\n{STORE}", words(64 * 40), programs=40)
    assert found == [1000 * program + thread for program in range(40) for thread in range(64)]


def test_each_thread_leaves_a_loop_when_it_is_done():
    body = f"""
        mov.b32 %r6, 0;
        mov.b32 %r7, 0;
    loop:
        setp.ge.s32 %p1, %r7, %r5;
        @%p1 bra done;
        add.s32 %r6, %r6, %r7;
        add.s32 %r7, %r7, 1;
        bra.uni loop;
    done:
        {STORE}
    """
    (found,) = launched(body, words(128), programs=2)
    assert found == [sum(range(thread)) for thread in range(128)]


def test_a_branch_of_some_joins_the_others_again():
    body = f"""
        setp.lt.u32 %p1, %r2, 7;
        mov.b32 %r6, 1;
        @%p1 bra some;
        mov.b32 %r6, 2;
        bra.uni joined;
    some:
        mov.b32 %r6, 3;
    joined:
        shfl.sync.bfly.b32 %r7, %r6, 1, 31, -1;
        add.s32 %r6, %r6, %r7;
        {STORE}
    """
    (found,) = launched(body, words(64))  # a part of a warp would be refused
    assert found == [6] * 6 + [5, 5] + [4] * 56


ACROSS_WARPS = """
    shl.b32 %r6, %r2, 2;
    mov.b32 %r7, global_smem;
    add.s32 %r8, %r7, %r6;
    add.s32 %r9, %r2, 100;
    st.shared.b32 [%r8], %r9;
    {barrier}
    xor.b32 %r10, %r6, 128;
    add.s32 %r11, %r7, %r10;
    ld.shared.b32 %r6, [%r11];
    st.global.b32 [%rd3], %r6;
"""


def test_a_barrier_is_waited_at_and_a_missing_one_is_seen():
    expected = [(thread ^ 32) + 100 for thread in range(64)] * 2
    kept = launched(ACROSS_WARPS.format(barrier="bar.sync 0;"), words(128), programs=2, shared=256, seeds=range(8))
    assert kept == [expected] * 8
    broken = launched(ACROSS_WARPS.format(barrier=""), words(128), programs=2, shared=256, seeds=range(8))
    assert any(found != expected for found in broken)


def test_a_barrier_waits_for_no_thread_that_has_ended():
    body = f"setp.lt.u32 %p1, %r2, 32;\n@%p1 ret;\nbar.sync 0;\nmov.b32 %r6, 7;\n{STORE}"
    (found,) = launched(body, words(64))
    assert found == [0] * 32 + [7] * 32


def test_tickets_are_drawn_once_in_every_order():
    body = f"atom.global.gpu.acq_rel.add.u32 %r6, [%rd1+{4 * 64 * 5}], 1;\n{STORE}"
    for found in launched(body, words(64 * 5 + 1), programs=5, seeds=range(3)):
        assert sorted(found[:-1]) == list(range(64 * 5))
        assert found[-1] == 64 * 5


def test_packed_registers_and_narrow_numbers():
    body = f"""
        mov.b32 {{%rs1, %rs2}}, %r1;
        mov.b32 %r6, {{%rs2, %rs1}};
        {STORE}
        st.global.b8 [%rd3], %r2;
    """
    (found,) = launched(body, words(64), number=0x12345678)
    assert found == [0x56781200 | thread for thread in range(64)]


def test_a_matrix_is_stored_and_loaded():
    """Each thread has two elements of its row; the second load is of the transposed matrix."""
    body = """
        and.b32 %r6, %r2, 7;
        shl.b32 %r7, %r6, 4;
        mul.lo.s32 %r8, %r2, 2;
        add.s32 %r9, %r8, 1;
        shl.b32 %r10, %r9, 16;
        or.b32 %r11, %r10, %r8;
        stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r7], {%r11};
        ldmatrix.sync.aligned.m8n8.x1{trans}.shared.b16 {%r6}, [%r7];
        st.global.b32 [%rd3], %r6;
    """
    one_warp = "setp.ge.u32 %p1, %r2, 32;\n@%p1 ret;\n"
    in_order = torch.arange(64, dtype=torch.int16).reshape(8, 8)
    for trans, expected in (("", in_order), (".trans", in_order.t())):
        (found,) = launched(one_warp + body.replace("{trans}", trans), words(64), shared=128)
        assert torch.tensor(found[:32], dtype=torch.int32).view(torch.int16).tolist() == expected.reshape(-1).tolist()


@pytest.mark.parametrize(("body", "count", "message"), [
    (STORE, 63, "byte 252 is written of a tensor of 252, by st.global.b32"),
    ("ld.global.b32 %r6, [%rd3+256];", 64, "byte 384 is read of a tensor of 256"),
    ("ld.global.v4.b32 {%r6, %r7, %r8, %r9}, [%rd3];", 128, "a vector of 16 bytes is not aligned"),
    ("ld.global.b32 %r6, [8];", 64, "is of no tensor"),
    ("ld.shared.b32 %r6, [%r5+4];", 64, "not aligned|shared memory has"),
])
def test_what_a_gpu_would_refuse_is_refused(body, count, message):
    with pytest.raises(AccessError, match=message):
        launched(body, words(count), shared=16)


@pytest.mark.parametrize("verb", ["read", "written"])
def test_a_tensor_that_was_not_given_is_out_of_reach(verb):
    """Also if it lies where the access would be: whether one does is up to the allocator."""
    body = "ld.global.b32 %r6, [%rd3+256];" if verb == "read" else "st.global.b32 [%rd3+256], %r6;"
    memory = bytearray(512)
    tensor, neighbour = (torch.frombuffer(memory, dtype=torch.int32, count=64, offset=at) for at in (0, 256))
    assert neighbour.data_ptr() == tensor.data_ptr() + 256
    with pytest.raises(AccessError, match=f"byte 384 is {verb} of a tensor of 256"):
        machine.run(KERNEL.format(body=body), [tensor, 0], (1,), 64, 0, 0)


def test_reads_may_reach_the_end_of_the_last_16_bytes():
    launched("setp.gt.u32 %p1, %r2, 63;\nld.global.b32 %r6, [%rd3];", words(61))


def test_an_inactive_thread_reads_and_writes_nothing():
    body = f"mov.b32 %r6, 5;\nsetp.lt.u32 %p1, %r2, 8;\n@%p1 {STORE}"
    (found,) = launched(body, words(8))
    assert found == [5] * 8


def test_a_register_that_was_not_written_makes_no_sense():
    (found,) = launched(f"{STORE}", words(64))
    assert found == [0xDEADBEEF - (1 << 32)] * 64
