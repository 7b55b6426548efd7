// luce's own ops in ggml graphs. In the graph an op is a ggml_custom_4d whose CPU callback is the
// reference implementation; on CUDA, step.cpp launches the kernel in its place on the same stream.
//
// name            arguments (ggml shapes, fastest first)                              params      result
// deltanet_conv   x{C,T} w{4,C} window{C,3}* log{n}* ctl{CTL_SIZE}                    R Hk Hv S mode  {C,T}
// deltanet        x{C,T} alpha{Hv,T} beta{Hv,T} dt{Hv} a{Hv} state{S,S,Hv}* log{n}* ctl   same    {Hv*S,T}
// argmax          logits{n,T}                                                         -           i32 {WIDTH,T}
// kv_move         k{row,cells}* v{row,cells}* path{2+MAX_ROWS}                        -           i32 {1}
// (*: written in place)
#pragma once

#include "../kernels/kernels.h"
#include "status.h"

#include <ggml.h>

#include <initializer_list>

namespace luce {

struct CustomOp {
    const char *name;
    int n_args;
    unsigned writes; // bit i: argument i is written in place
    void (*cpu)(const ggml_tensor *dst, int ith, int nth);
    int (*cuda)(const ggml_tensor *dst, void *stream); // null where luce is built without CUDA
};

const CustomOp *find_op(const char *name); // nullptr when there is none

// The op that `node` stands for, nullptr for ggml's own nodes.
const CustomOp *custom_op(const ggml_tensor *node);

// Adds an op to a graph. params: at most 8.
ggml_tensor *add_op(ggml_context *ctx, const char *name, ggml_type type, int64_t ne0, int64_t ne1,
                    std::initializer_list<ggml_tensor *> args, std::initializer_list<int32_t> params = {});
ggml_tensor *add_op(ggml_context *ctx, const CustomOp &op, ggml_type type, int64_t ne0, int64_t ne1,
                    ggml_tensor **args, int n_args, const int32_t *params, int n_params);

// CPU reference implementations: thread ith of nth.
void cpu_conv(const ConvArgs &args, int ith, int nth);
void cpu_deltanet(const DeltaArgs &args, int ith, int nth);

} // namespace luce
