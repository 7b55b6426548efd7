"""These tests run tools/check_sass.py on what cuobjdump prints."""

from __future__ import annotations

import check_sass
import pytest
from check_sass import Usage, kernels_of, memory_errors, shrunk, usages_of

LISTING = """
		Function : _Z5firstv
	.headerflags	@"EF_CUDA_TEXMODE_UNIFIED EF_CUDA_64BIT_ADDRESS"
        /*0000*/                   S2R R0, SR_TID.X ;                       /* 0x0000000000007919 */
                                                                            /* 0x000e220000002100 */
        /*0010*/                   SHFL.BFLY PT, R3, R4, 0x10, 0x1f ;       /* 0x0e001f0004037f89 */
        /*0020*/              @!P0 SHFL.IDX PT, R3, R4, RZ, 0x1f ;          /* 0x0e001f0004037f89 */
        /*0030*/               @P2 HMMA.16816.F32 R4, R8, R12, R4 ;         /* 0x0e001f0004037f89 */
        /*0040*/              @UP1 VOTE.ANY R7, PT, P0 ;                    /* 0x0e001f0004037f89 */
        /*0050*/               @PT LDSM.16.M88.4 R4, [R5] ;                 /* 0x0e001f0004037f89 */
        /*0060*/               @P0 BRA 0x20 ;                               /* 0x0000000c00080947 */
        /*0070*/                   BRA.DIV UR4, 0x1200 ;                    /* 0x0000000c00080947 */
		Function : _Z6secondv
        /*0000*/               @P0 STG.E desc[UR4][R2.64], R3 ;             /* 0x0e001f0004037f89 */
        /*0010*/               @P0 ELECT P1, URZ, PT ;                      /* 0x0e001f0004037f89 */
"""


def test_a_lanes_condition_on_what_a_warp_does_together_is_found() -> None:
    first, second = kernels_of(LISTING.splitlines())
    assert (first.name, first.together, first.branched) == ("_Z5firstv", 5, 1)
    assert first.conditional == ["0020 SHFL.IDX", "0030 HMMA.16816.F32"]
    assert (second.name, second.together, second.conditional, second.branched) == ("_Z6secondv", 0, [], 0)


def test_nothing_is_no_kernel() -> None:
    assert list(kernels_of(["", "Fatbin elf code:", "================"])) == []


USAGE = """
Fatbin elf code:
================
arch = sm_86
code version = [1,8]

Resource usage:
 Common:
  GLOBAL:0
 Function _Z5firstv:
  REG:72 STACK:80 SHARED:128 LOCAL:0 CONSTANT[0]:3840 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function _Z6secondv:
  REG:32 STACK:0 SHARED:50000 LOCAL:0 CONSTANT[0]:360 TEXTURE:0 SURFACE:0 SAMPLER:0

Fatbin elf code:
================
arch = sm_120

Resource usage:
 Function _Z5firstv:
  REG:72 STACK:0 SHARED:128 LOCAL:0 CONSTANT[0]:3840 TEXTURE:0 SURFACE:0 SAMPLER:0

Fatbin ptx code:
================
arch = sm_80
"""


def test_what_kernels_keep_in_memory_is_read_for_each_gpu() -> None:
    assert list(usages_of(USAGE.splitlines())) == [
        Usage("sm_86", "_Z5firstv", 72, 80, 128),
        Usage("sm_86", "_Z6secondv", 32, 0, 50000),
        Usage("sm_120", "_Z5firstv", 72, 0, 128),
    ]


def test_more_in_memory_than_is_known_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    usages = list(usages_of(USAGE.splitlines()))
    monkeypatch.setattr(check_sass, "STACKS", [])
    stack, shared = memory_errors(usages)
    assert "sm_86 first" in stack and "80 bytes" in stack
    assert "sm_86 second" in shared and "50000 bytes of shared memory" in shared
    monkeypatch.setattr(check_sass, "STACKS", [(("sm_86",), r"first(\(\))?", 80)])
    assert memory_errors(usages) == [shared]
    monkeypatch.setattr(check_sass, "STACKS", [(("sm_86",), r"first(\(\))?", 72)])
    assert len(memory_errors(usages)) == 2


def test_what_has_shrunk_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    usages = list(usages_of(USAGE.splitlines()))
    monkeypatch.setattr(check_sass, "STACKS", [(("sm_86", "sm_120"), r"first(\(\))?", 80)])
    assert shrunk(usages) == ["sm_120 first: 0 bytes of a thread's 80 are left in memory"]
