"""Compares the logits of some clusters of a vocabulary with numpy, on --luce-device."""

from __future__ import annotations

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from op_run import Weights, op_run

from luce.native import Library

NEVER = np.float32(-1e30)
CLUSTERS, SIZE, USED = 24, 9, 5
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def table_of(native: Library, kind: str, n: int, e: int) -> tuple[Weights, np.ndarray]:
    """Returns random rows as a file has them, and their values."""
    x = np.random.default_rng(n + e).standard_normal((n, e)).astype(np.float32)
    type_id = GGMLQuantizationType[kind]
    rows = np.ascontiguousarray(native.quantize(int(type_id), x)).view(np.uint8).reshape(n, -1)
    return Weights(rows, int(type_id), e), dequantize(rows, type_id).reshape(n, e).astype(np.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("t", [1, 3])
def test_tokens_of_the_clusters_have_logits(native: Library, device: str, kind: str, t: int) -> None:
    n, rng = CLUSTERS * SIZE, np.random.default_rng(t)
    for e in (256, 768) if kind.endswith("_K") else (32, 256, 288):
        table, values = table_of(native, kind, n, e)
        order = rng.permutation(n).astype(np.int32)
        x = rng.standard_normal((t, e)).astype(np.float32)
        best = np.stack([rng.permutation(CLUSTERS)[:USED] for _ in range(t)])
        planes = np.full((4, t * USED), -7, np.int32)  # What lies behind the first plane is not read.
        planes[0] = best.ravel()
        found = op_run(native, device, "cluster_logits", [x, planes, table, order], (SIZE, 0), shape=(t, n))
        for row, clusters in enumerate(best):
            seen = order.reshape(CLUSTERS, SIZE)[clusters].ravel()
            assert (np.delete(found[row], seen) == NEVER).all() and len(set(seen)) == USED * SIZE
            size = np.abs(values[seen]) @ np.abs(x[row])
            assert (np.abs(found[row, seen] - values[seen] @ x[row].astype(np.float64)) <= 1e-6 * size).all()


def test_a_row_has_the_same_bits_beside_any_others(native: Library, device: str) -> None:
    n, rng = CLUSTERS * SIZE, np.random.default_rng(7)
    table, _ = table_of(native, "Q8_0", n, 256)
    order, x = rng.permutation(n).astype(np.int32), rng.standard_normal((8, 256)).astype(np.float32)
    best = np.stack([rng.permutation(CLUSTERS)[:USED] for _ in range(8)]).astype(np.int32)

    def logits(rows: list[int]) -> np.ndarray:
        planes = np.ascontiguousarray(best[rows].reshape(1, -1))
        return op_run(
            native, device, "cluster_logits", [x[rows], planes, table, order], (SIZE, 0), shape=(len(rows), n)
        )

    alone = np.concatenate([logits([row]) for row in range(8)])
    x[5, 3] = np.nan
    together = logits([6, 5, 2, 0])
    assert together[[0, 2, 3]].tobytes() == alone[[6, 2, 0]].tobytes()
    assert np.isnan(together[1][order.reshape(CLUSTERS, SIZE)[best[5]].ravel()]).all()
