"""The reader of machine code that benchmarks/kernels/inspect_gpu.py counts with, on listings small enough to count."""

import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[3] / "benchmarks/kernels/machine_code.py"
SASS = """
        /*0000*/                   S2R R0, SR_TID.X ;                 /* 0x0 */
        /*0010*/                   LDG.E R9, [R2.64] ;                /* 0x0 */
        /*0020*/              @!P0 LDG.E.128 R4, [R2.64+0x10] ;       /* 0x0 */
                                                                      /* 0x0 */
        /*0030*/               @P1 BRA 0x60 ;                         /* 0x0 */
        /*0040*/                   MOV R1, 0x60 ;                     /* 0x0 */
        /*0050*/                   CALL.REL.NOINC 0xa0 ;              /* 0x0 */
        /*0060*/                   STG.E.U16 [R2.64], R4 ;            /* 0x0 */
        /*0070*/               @P2 EXIT ;                             /* 0x0 */
        /*0080*/                   BRA 0x20 ;                         /* 0x0 */
        /*0090*/                   EXIT ;                             /* 0x0 */
        /*00a0*/                   FADD R1, R1, R1 ;                  /* 0x0 */
        /*00b0*/                   RET.REL.NODEC R2 0x0 ;             /* 0x0 */
        /*00c0*/                   BRA 0xc0;                          /* 0x0 */
"""
AMD = """
\t.text
.Lfunc_begin0:
\ts_load_dword s0, s[0:1], 0x0
.LBB0_0:
\t.loc\t1 2 3 ; where
\tglobal_load_dwordx4 v[0:3], v[4:5], off   ; comment
\ts_cbranch_execz .LBB0_2
; %bb.1:
\tv_add_f32_e32 v0, v0, v1
.LBB0_2:
\tglobal_store_short_d16_hi v4, v0, s[2:3]
\ts_cbranch_scc1 .LBB0_0
\ts_endpgm
.Lfunc_end0:
\ts_nop 0
"""


@pytest.fixture(scope="module")
def machine_code():
    spec = importlib.util.spec_from_file_location("machine_code_of_benchmarks", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_a_loop_of_sass_without_the_block_that_calls(machine_code):
    body, is_loop = machine_code.main_loop(machine_code.sass(SASS), 144)
    assert is_loop
    assert [each.name for each in body] == ["LDG.E.128", "BRA", "STG.E.U16", "EXIT", "BRA"]
    assert [each.bits for each in body] == [128, 0, 16, 0, 0]


def test_a_loop_that_reads_too_little_is_not_the_main_one(machine_code):
    body, is_loop = machine_code.main_loop(machine_code.sass(SASS), 145)
    assert not is_loop
    assert [each.name for each in body][:2] == ["S2R", "LDG.E"]
    assert len(body) == 7  # without the call, the subroutine, and what nothing reaches


def test_a_call_with_a_predicate_leaves_the_loop_and_takes_no_block_with_it(machine_code):
    text = SASS.replace("@P2 EXIT ;", "@P2 CALL.REL.NOINC 0x90 ;")
    body, is_loop = machine_code.main_loop(machine_code.sass(text), 144)
    assert is_loop
    assert [each.name for each in body] == ["LDG.E.128", "BRA", "STG.E.U16", "CALL.REL.NOINC", "BRA"]


def test_a_loop_of_amd(machine_code):
    body, is_loop = machine_code.main_loop(machine_code.amdgcn(AMD), 144)
    assert is_loop
    assert [each.bits for each in body] == [128, 0, 0, 16, 0]
    assert [each.is_vector_alu for each in body] == [False, False, True, False, False]


def test_the_outermost_of_nested_loops(machine_code):
    plain, access = machine_code.Instruction("A"), machine_code.Instruction("LDG", bits=32)
    jumps = [machine_code.Instruction("BRA", target=target) for target in (1, 1, 0)]
    code = [plain, access, jumps[0], plain, jumps[1], plain, machine_code.Instruction("EXIT", falls_through=False)]
    body, is_loop = machine_code.main_loop(code, 32)
    assert is_loop
    assert body == code[1:5]


def test_what_cannot_be_disassembled_has_no_instructions(machine_code):
    assert machine_code.sass("cuobjdump fatal: no such file") == []
    assert machine_code.main_loop([], 0) == ([], False)


def test_what_was_spilled_is_told_from_other_memory(machine_code):
    spilling = SASS.replace("MOV R1, 0x60", "STL [R1], R5").replace("FADD R1, R1, R1", "LDL.LU R5, [R1]")
    assert [each.name for each in machine_code.sass(spilling) if each.is_spill] == ["STL", "LDL.LU"]
    spilling = AMD.replace("v_add_f32_e32 v0, v0, v1", "scratch_load_dword v0, off, s0 offset:4")
    assert [each.name for each in machine_code.amdgcn(spilling) if each.is_spill] == ["scratch_load_dword"]
    assert not any(each.is_spill for each in machine_code.sass(SASS) + machine_code.amdgcn(AMD))
