// Has rules of the core that luce.h states, failures on demand, and what tests count. All of it is exported for luce's
// tests alone: it is no part of luce.h, and promises nothing. test_hooks.cpp has luce_op_run too, which is in luce.h.
#pragma once

#include "luce.h"

extern "C" {

// Runs the functions of kernels/sampling/sampling.h on n values each: -log(u) and the noise of random words, their
// bound, and the masses of z.
LUCE_API luce_status luce_sampling_run(const uint32_t *words, const float *z, uint64_t n, float *minus_log,
                                       float *gumbel, float *bound, uint64_t *mass);

// Changes n logits in place as penalties do after n_tokens tokens.
LUCE_API luce_status luce_penalise(float *logits, uint32_t n, const luce_penalties *penalties,
                                   const int32_t *tokens, uint32_t n_tokens);

// How many steps an engine has run, those of its opening among them, and how often it has waited for its device.
LUCE_API luce_status luce_engine_counts(luce_engine *engine, uint64_t *steps, uint64_t *synchronisations);

// Makes NaN of an engine's scratch, and of pages and slots that nobody holds: no step may read of them what it has not
// written. Logits of the last step are gone.
LUCE_API luce_status luce_engine_poison(luce_engine *engine);

// Makes NaN of the slots of the layer-th of an engine's mixtures (luce_engine_get_experts), whoever has them.
LUCE_API luce_status luce_engine_poison_experts(luce_engine *engine, uint32_t layer);

// Asks for one failure (faults.h): fault 1 as a graph is built, 2 of a graph that is too large, 3 at one of luce's ops in
// a step, 4 as a captured step is launched, 5 as the host waits for the device, 6 as an expert is moved, 7 as a
// checkpoint is copied to the host, each after so many of its kind; 0 for none. It is the process's, whichever engine comes to
// it first.
LUCE_API luce_status luce_fault(int32_t fault, uint64_t after);

// Makes another device the calling thread's current one, as a caller's own CUDA code may: GPU `index`, where there is
// one, and else none that luce has.
LUCE_API luce_status luce_leave_device(int32_t index);

// Recodes n values as a GPU's upload does (recode.h): from src, of ggml type `from`, to dst, of the type that *to gets.
LUCE_API luce_status luce_recode(int32_t from, const uint8_t *src, uint64_t n, int32_t table, int32_t *to,
                                 uint8_t *dst, uint64_t dst_size);

// Does what luce_sequence_lookup does over n_tokens >= 1 tokens, of which the last is the anchor.
LUCE_API luce_status luce_lookup(const int32_t *tokens, uint32_t n_tokens, int32_t *draft, uint32_t *n,
                                 uint32_t *matched);

// Gives rule `index` of the lowering (graph/rules.h): its name, whether a row has the same bits without it, and how often it
// has fused a pattern in this process. E_ARG: there is no such rule.
LUCE_API luce_status luce_rule(uint32_t index, const char **name, int32_t *same, uint64_t *uses);

// Switches a rule off for the process, or on again. Graphs that are built from then on follow it; E_UNSUPPORTED then says that
// a device has no other op.
LUCE_API luce_status luce_switch_rule(uint32_t index, int32_t on);

// Adds a device that the CPU stands in for and that seems to have so many bytes, or takes all such back where the name is
// empty. Models on them must be closed by then.
LUCE_API luce_status luce_pretend_device(const char *name, uint64_t memory);

// Engines that are opened from now on take their GPUs for such as do not reach each other's memory, or not again.
LUCE_API luce_status luce_part_devices(int32_t on);

// With on 1, stages of engines that are opened on a CPU from now on read prompts beside each other, each on a thread of its own;
// that of stage `slow` sleeps ahead of all that it does. With 0 they do not.
LUCE_API luce_status luce_thread_stages(int32_t on, uint32_t slow);

// Towers that are opened on a CPU from now on build the graph of a GPU, whose blocks of queries take so many bytes of scores;
// with 0 they build their own again.
LUCE_API luce_status luce_block_towers(uint64_t bytes);

// Checkpoints that leave their device are held ahead of the at-th portion of their copies (checkpoint.h), until this is called
// again; -1 holds none.
LUCE_API luce_status luce_hold_copies(int32_t at);

// Engines that are opened on a CPU from now on take made-up costs instead of timing their steps, which is most of what
// an opening takes; with 1 they time them again.
LUCE_API luce_status luce_time_steps(int32_t on);
}
