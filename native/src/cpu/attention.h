// The CPU runs its ops of attention here, and row_tokens. Each call does the part of thread ith of nth, and none
// waits for another.
#pragma once

#include "common/kernels.h"

namespace luce {

void cpu_norm_rope(const NormRopeArgs &args, int ith, int nth);
void cpu_kv_move(const KvMoveArgs &args, int ith, int nth);
void cpu_kv_store(const KvStoreArgs &args, int ith, int nth);
void cpu_attention(const AttentionArgs &args, int ith, int nth); // it does not touch args.scratch
void cpu_kv_gather(const KvGatherArgs &args, int ith, int nth);
void cpu_row_scores(const RowScoresArgs &args, int ith, int nth); // it does not touch args.partials
void cpu_prefill_mask(const MaskArgs &args, int ith, int nth);
void cpu_row_tokens(const TokensArgs &args, int ith, int nth);

} // namespace luce
