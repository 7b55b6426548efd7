#include "ops/shapes.h"

#include "attention/sizes.h"
#include "cpu/experts.h"
#include "deltanet/sizes.h"

namespace luce {

static void refuse(const char *path, const std::string &lack) {
    if (!lack.empty()) {
        fail(LUCE_E_UNSUPPORTED, "%s: %s", path, lack.c_str());
    }
}

void check_attention(const char *path, const AttentionShape &a, bool gpu_block) {
    if (a.value_dim != a.head_dim) {
        refuse(path, format("attention.key_length is %u and attention.value_length %u: they must be equal",
                            a.head_dim, a.value_dim));
    }
    refuse(path, gpu_block ? attention_lacks<BlockHeadSizes>(a.head_dim, a.n_head, a.n_head_kv)
                           : attention_lacks(a.head_dim, a.n_head, a.n_head_kv));
    refuse(path, rope_lacks(a.rope_dim, a.head_dim, a.rope_base));
}

void check_shapes(const char *path, const HParams &hp) {
    for (const auto &mixer : hp.mixers) {
        if (const auto *attention = std::get_if<AttentionShape>(&mixer)) {
            check_attention(path, *attention, false);
        } else {
            const DeltaNetShape &d = std::get<DeltaNetShape>(mixer);
            refuse(path, delta_lacks(d.state_size, d.n_k_heads, d.n_v_heads));
            refuse(path, conv_lacks(d.conv_taps));
            if (d.n_inner != d.n_v_heads * d.state_size) {
                refuse(path, format("ssm.inner_size is %u, expected time_step_rank * state_size = %u",
                                    d.n_inner, d.n_v_heads * d.state_size));
            }
        }
    }
    if (hp.moe.n_used > uint32_t(MAX_USED)) {
        refuse(path, format("expert_used_count is %u: luce runs up to %d", hp.moe.n_used, int(MAX_USED)));
    }
    if (!(hp.rms_eps > 0)) {
        refuse(path, format("attention.layer_norm_rms_epsilon is %g, expected a positive number",
                            double(hp.rms_eps)));
    }
}

} // namespace luce
