"""These tests run tools/check_sass.py on what cuobjdump prints."""

from __future__ import annotations

from check_sass import kernels_of

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
