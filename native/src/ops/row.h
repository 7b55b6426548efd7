// luce has ops of its own in ggml graphs, each a ggml_custom_4d that ggml itself never runs: step.cpp cuts the graph at
// it. On a CPU it runs the op's reference implementation there, on CUDA it launches the op's kernel on the same stream.
//
// name            arguments (ggml shapes, fastest first)                                 params -> result
// deltanet_conv   x{C,T} w{4,C} window{C,3,slots}* log{n,seqs}* ctl                        R n_slots Hk Hv S mode -> {C,T}
// deltanet        x{C,T} alpha{Hv,T} beta{Hv,T} dt{Hv} a{Hv} state{S,S,Hv,slots}* log* ctl  the same -> {Hv*S,T}
// deltanet_chunks  the same, for a long prefill on a GPU                                   the same -> {Hv*S*T, then scratch}
// norm_rope       k{D*Hkv,T} k_norm{D} positions{T} [q_gate{2*D*H,T} q_norm{D}]            rope_dim base eps
//                     -> {D*Hkv*T, then D*H*T}
// kv_store        k{D*Hkv,T} v{D*Hkv,T} pool_k{D,PAGE,Hkv,pages}* pool_v* ctl pages        append owner -> i32{1}
// attention       q{D*H,T} q_gate{2*D*H,T} or gate{D*H,T} pool_k pool_v ctl pages
//                     first window max_pages scale softcap gated block -> {D*H*T, then scratch}
// block_attention the same, of rows that all see each other (block 1), without a gate
// kv_gather       pool{D,PAGE,Hkv,pages} ctl pages                                         - -> f16 or f32{D*Hkv,n_kv}
// prefill_mask    ctl                                                                      first window -> f16{n_kv,T}
// choose          logits{n,T} ctl drafts{2,n}*? given{2,n}*?                               ahead -> i32{WIDTH,T}
// topk            logits{n,T} ctl lists{2*k,entries}*                                      k -> i32{scratch,T}
// row_tokens      tokens{T} drafts{2,n}                                                    n_vocab -> i32{T}
// pack_rows       x{K,T}                                                                   - -> i8{64*K/32,T} blocks
// rows_input      x{K,T} then w{K} residual{K,T}?, or w{S} z{K,T}, or up{K,T} (cpu/inputs.h) kind eps
//                     -> {x + residual{K*T}, where there is one, then values{K*T}, then packed{K/2*T}}
// rows_matmul     packed{64*K/32,T} or x{K,T}, 1 to 4 weights{K,N}: results side by side   - -> {sum of N*T}
// route           logits{n,T}                                                              - -> i32{2*n_used,T}
// experts         route{2*n_used,T} packed or x{K,T or n_used*T} w{K,N,n} up{K,N,n}?       own fused -> {N,n_used*T}
// experts_sum     route y{E,n_used*T}                                                      - -> {E,T}
// add_shared      y{E,T} shared{E,T} open{1,T}: y + shared * sigmoid(open)                 - -> {E,T}
// ram_give        routed{bytes}: for ram_experts, which gets this instead of its route and values on a GPU -> i8{1}
// ram_experts     route values{E,T} down{FF,E,n} gate{E,FF,n} up{E,FF,n}?, on any device   (step/host_experts.h) -> {E,T}
// Of a GPU with luce's own matmul alone (what is computed of x before it is packed: kernels/rowmm.h):
// rowmm_pack      x{K,T}                                                                   eps -> i8{bytes}
// rowmm_pack_rms  x{K,T} w{K}                                                              the same
// rowmm_pack_swiglu  x{K,T} y{K,T}                                                         the same
// rowmm_pack_gated   x{K,T} w{S} y{K,T}                                                    the same
// rowmm           packed{bytes} scratch{bytes}* 1 to 4 packed weights{K,N}: side by side   T normed eps -> {sum of N*T}
// rowmm_norm      x{K,1} w{K} scratch{bytes}* 1 to 4 packed weights{K,N}: it packs the row itself  the same -> {sum of N*T}
// rowmm_add       packed{bytes} scratch{bytes}* residual{N,T} packed weight{K,N}           the same -> {N*T}
// rowmm_parts     packed{bytes} 1 to 4 packed weights{K,N}                                 the same -> {parts}
// rowmm_parts_norm  x{K,1} w{K} 1 to 4 packed weights{K,N}: it packs the row itself        the same -> {parts}
// deltanet_parts  parts of qkv, z, beta, alpha; w window* log* ctl as deltanet_conv; dt a state* as deltanet; scratch{bytes}*
//                     its params -> {Hv*S*T, then z{Hv*S,T}, then scratch}: deltanet_conv and deltanet
// nextn_pack      e{E,T} hidden{E,n} hidden_from{T} e_norm{E} h_norm{E}                    eps -> i8{bytes} of {2*E,T}
// keep_hidden     x{E,T} norm{E} hidden{E,n}* i64 hidden_to{T}                             eps -> i32{1}
// attention_heads parts of q_gate, k, v or of k, v; k_norm{D} positions{T} pool_k* pool_v* ctl pages q_norm{D}?
//                     rope_dim base eps owner -> {D*H*T of q, then of gate}: norm_rope and kv_store
// attention_plan  ctl                                                                      T H first window type Hkv D
//                     -> i32{plan}, which the blocks of all layers' attention_packed read; they count in it, by layer
// attention_packed  as attention, plan{n}?; its values packed as rowmm takes them        its params, layer for block -> {bytes, then scratch}
// rowmm_parts_rms x{K,T} w{K} parts                                                        - -> {K*T: x + sum; packed}
// rowmm_parts_swiglu  parts                                                                - -> i8{bytes}
// gemm_pack       x{K,T}                                                                   - -> i8{bytes}, of a GPU
// gemm_pack_norm  x{K,T} w{K}: RMS(x) * w                                                  eps -> i8{bytes}
// gemm_pack_swiglu  gate{K,T} up{K,T}: silu(gate) * up                                     - -> i8{bytes}
// gemm_pack_gated x{K,T} gate{D,H,T}, heads 2 D apart: x * sigmoid(gate)                   - -> i8{bytes}
// gemm_pack_heads x{K,T} z{K,T} w{head}: RMS(x of a head) * w * silu(z)                    eps -> i8{bytes}
// gemm            packed{bytes} packed weights{K,N} scratch{bytes}*                        - -> {N,T}
// gemm_add        the same, residual{N,T}, which is added                                  - -> {N,T}
// moe_route       x{E,T} norm{E} scratch{bytes}* router{E,n} shared_gate{E}?: kernels/moe.h  dims -> i8{bytes}
// moe_up          routed{bytes} gate{E,FF,n} up{E,FF,n}? shared gate{E,FFs}? shared up?    dims -> {places of FF}
// moe_down        routed{bytes} h{places of FF} down{FF,E,n} shared down{FFs,E}?           dims -> {places of E}
// moe_end         routed{bytes} h{places of FF} down{FF,E,n} residual{E,1} shared down{FFs,E}?  dims -> {E,1}
// moe_sum         routed{bytes} y{places of E} residual{E,T} sums{E,T}?: then y of shared  dims -> {E,T}
//                     (dims: T n_expert n_used E FF FF_shared fused eps)
// ctl is {sizeof(StepCtl) / 4}, scale, softcap and eps are the bits of floats.
// (*: written in place)
#pragma once

#include "abi/status.h"
#include "common/kernels.h"
#include "cpu/attention.h"

#include <ggml.h>

#include <initializer_list>

namespace luce {

struct CustomOp {
    const char *name;
    // The signature gives each argument's extents, fastest first, separated by blanks. An extent is a number,
    // or a letter that stands for one value throughout, or two letters for the product of theirs; ctl is a
    // control block. Before the extents stands the type where it is not F32: i is I32, k is that of KV, x is
    // that of activations, packed or F32, and m is that of a weight matrix. After them stands * where the op
    // writes to the argument, and ? where it may be absent. Behind > are the extents that the result has at
    // least.
    const char *signature;
    void (*cpu)(const ggml_tensor *dst, int ith, int nth);
    // Null where luce is built without CUDA; cpu is null where only a GPU has the op.
    int (*cuda)(const ggml_tensor *dst, void *stream);
    // Any number of parts costs the CPU the same, so more parts than threads spread the work better.
    bool even = false;

    bool on_team = false; // the CPU's team runs it, whatever device the step is on (step/host_experts.h)
    bool to_team = false; // it brings rows to it, from a GPU

    int n_args() const; // it counts the arguments that it takes at most
    int n_required() const; // it counts those that it takes at least
};

const CustomOp *find_op(const char *name); // it returns nullptr when there is none

// Returns the op that `node` stands for, and nullptr for ggml's own nodes.
const CustomOp *custom_op(const ggml_tensor *node);

// Adds an op to a graph, with at most 8 params.
ggml_tensor *add_op(ggml_context *ctx, const char *name, ggml_type type, int64_t ne0, int64_t ne1,
                    std::initializer_list<ggml_tensor *> args, std::initializer_list<int32_t> params = {});
ggml_tensor *add_op(ggml_context *ctx, const CustomOp &op, ggml_type type, int64_t ne0, int64_t ne1,
                    ggml_tensor **args, int n_args, const int32_t *params, int n_params);

int32_t bits_of_real(float x); // it returns x as params hold it

// These are CPU reference implementations. Each call does part ith of nth, and parts run in any order and on
// any thread. attention.h has more of them.
void cpu_topk(const TopkArgs &args, int ith, int nth);
void cpu_conv(const ConvArgs &args, int ith, int nth);
void cpu_deltanet(const DeltaArgs &args, int ith, int nth);
void cpu_norm_rope(const NormRopeArgs &args, int ith, int nth);

} // namespace luce
