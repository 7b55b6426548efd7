// Has the arguments of luce's own ops, which both the CPU reference (attention.cpp, deltanet.cpp and others
// in src/cpu/) and the CUDA launchers (*.cu) take. No ggml is used here, so a kernel compiles and is tested
// alone. Launchers enqueue on `stream` (a cudaStream_t) and return a cudaError_t as int, 0 for success.
#pragma once

#include "sampling/sampling.h"

#include <stddef.h>
#include <stdint.h>

namespace luce {

constexpr int MAX_ROWS = 64; // a step has at most as many rows, over all its sequences
constexpr int PAGE = 256; // a KV page has as many positions
constexpr int MAX_PROMPTS = 16; // a step of prompts has rows of as many sequences

// ---- the control block of a step ---------------------------------------------------------------------
// The host writes it, every op of luce reads it. A step's graph is the same for all contexts, sequences and
// trees: what differs from step to step is here.

// RowCtl is one row of a step of at most MAX_ROWS rows. (A prefill has any number of rows, and one of these for each
// sequence, which stands for that one's last row; row t of a sequence is at n_past + t.)
struct RowCtl {
    int32_t seq; // it is the index into StepCtl::seqs; -1 says that the row only fills the step's width
    // It is the row of this step that this one follows; -1 means the sequence's committed tokens.
    int32_t parent;
    int32_t position; // it is that of the row's token: the sequence's n_past + depth
    int32_t keep; // this entry of `drafts` keeps the row's choice (ChooseArgs); -1 means that none does
};

// SeqCtl is one sequence's part of a step: rows row0 .. row0 + n_rows - 1, in depth-first order, parents
// before children. n_rows may be 0: then only the debts of the sequence are paid.
struct SeqCtl {
    int32_t slot; // the sequence's recurrent state, window and log are in it
    // 1 says that nothing is committed: state and window count as zeros whatever the slot holds.
    int32_t fresh;
    int32_t row0, n_rows;
    int32_t n_past; // so many positions are committed before this step's rows
    // The slot's log has the pending rows' keys and decays in this bank; new rows use the other one.
    int32_t bank;
    int32_t n_replay; // the recurrent state does not hold so many pending rows yet
    // 1 says that KV of the pending rows still lies where the verify wrote it, and is moved ahead of the step (KvMoveArgs).
    int32_t moves;
    int32_t pages; // this sequence's pages begin here in the page table
    // So many of the positions before n_past have KV of the drafter that links of the same graph write: no launch may read
    // them before it has waited for what is ahead of it.
    int32_t n_new;
    int32_t
        cells; // in a prefill its cells begin here, among those of all sequences side by side (KvGatherArgs)
    int32_t reserved; // pending is aligned to 16 bytes
    // pending has the rows of the last verify that were accepted, counted from that verify's first row of
    // this sequence, in commit order: pending[i] >= i. They are committed positions n_past - n_replay .. n_past - 1.
    int32_t pending[MAX_ROWS];
    ChoiceCtl choice;
};

struct StepCtl {
    int32_t n_seqs;
    int32_t n_rows; // so many rows are in use; those up to the step's width have seq -1
    int32_t reserved[2];
    RowCtl rows[MAX_ROWS];
    SeqCtl seqs[MAX_ROWS];
};

// Returns the last i below n whose begin(i), which rise from 0 on, is at most x.
template <class Begin> LUCE_BOTH int32_t last_begun(int32_t n, int32_t x, const Begin &begin) {
    int32_t low = 0, high = n; // it is one of low .. high - 1
    while (high - low > 1) {
        const int32_t middle = (low + high) / 2;
        (begin(middle) <= x ? low : high) = middle;
    }
    return low;
}
// Returns which sequence of a prefill has a row, or a cell of those that are gathered.
LUCE_BOTH int32_t seq_of_row(const StepCtl &ctl, int32_t row) {
    return last_begun(ctl.n_seqs, row, [&](int32_t i) { return ctl.seqs[i].row0; });
}
LUCE_BOTH int32_t seq_of_cell(const StepCtl &ctl, int32_t cell) {
    return last_begun(ctl.n_seqs, cell, [&](int32_t i) { return ctl.seqs[i].cells; });
}
// Rows of a prefill are worked on in groups of `size` rows of one sequence, which begin with the sequence's first row. Group g
// of sequence i has this number, of which a few stand for none: no table says where a sequence's groups begin.
LUCE_BOTH int32_t first_group(const SeqCtl &seq, int32_t i, int32_t size) {
    return seq.row0 / size + i;
}
LUCE_BOTH int32_t seq_of_group(const StepCtl &ctl, int32_t group, int32_t size) {
    return last_begun(ctl.n_seqs, group, [&](int32_t i) { return first_group(ctl.seqs[i], i, size); });
}
// Returns how many numbers there are, of T rows of so many sequences.
LUCE_BOTH int32_t groups_of(int32_t T, int32_t n_seqs, int32_t size) {
    return (T - 1) / size + n_seqs;
}

// ---- DeltaNet ------------------------------------------------------------------------------------------

// DeltaMode says how a DeltaNet op treats the recurrent state. In both modes it first replays the pending
// rows from the log onto the state.
enum DeltaMode : int32_t {
    // Rows have parents, the log is written, and the state holds what was committed before the step.
    DELTA_VERIFY = 0,
    // It is a prefill: of each sequence any number of rows in a chain, committed at once without a log.
    DELTA_APPEND = 1,
};

struct DeltaShape {
    int32_t T; // the call has so many rows, which are the step's width
    int32_t R; // a slot's log has as many rows as one sequence has in a verify at most
    int32_t n_slots;
    int32_t Hk, Hv, S;
    int32_t mode;
    int32_t n_prompts = 1; // a prefill has so many sequences

    int64_t conv_dim() const { return int64_t(2 * Hk + Hv) * S; }
    // Returns the most sequences that a step of T rows has, which is no more than there are slots. (A step
    // without rows of its own pays one sequence's debts, so there is always room for one.)
    int32_t max_seqs() const { return mode == DELTA_APPEND ? n_prompts : T < n_slots ? T : n_slots; }
    // The log of one slot of one layer is F32. It has raw attn_qkv rows and deltas once, since a channel's or
    // column's owner reads its old rows before it writes new ones. It has keys and decays in two banks, since
    // they have many readers.
    int64_t log_qkv(int row) const { return row * conv_dim(); }
    int64_t log_delta(int row) const { return R * conv_dim() + int64_t(row) * Hv * S; }
    int64_t log_key(int bank, int row) const { return log_delta(R) + (int64_t(bank) * R + row) * Hk * S; }
    int64_t log_decay(int bank, int row) const { return log_key(2, 0) + (int64_t(bank) * R + row) * Hv; }
    // A multiple of 4 values, since kernels read 16 bytes of any slot's log at once.
    int64_t log_size() const { return (log_decay(2, 0) + 3) / 4 * 4; }
};

// The conv op is a causal conv of 4 taps over a row's ancestors, SiLU, and then q and k l2-normalised per
// head: x * rsqrt(sum(x^2) + 1e-6). Channels of a row are ordered q(Hk*S), k(Hk*S), v(Hv*S). Rows with seq -1
// are not written.
struct ConvArgs {
    DeltaShape shape;
    const float *x; // [T][C] raw attn_qkv rows
    const float *w; // [C][4], tap 0 is the oldest
    float *window; // [n_slots][3][C] the last three committed raw rows, oldest first; in/out
    float *log; // [n_slots][log_size]; in/out
    const StepCtl *ctl;
    float *out; // [T][C]
};

// The same in a verify whose input, the products with qkv, z, beta and alpha, has stayed parts (matmul/quantised.h), which
// it adds up first. S is 128.
struct RowmmArgs;
struct ConvPartsArgs : ConvArgs { // x is not used
    const RowmmArgs *parts; // they are the parts of four weights' products
    float *others[3]; // [T][N] of z, beta and alpha
};

// The delta op is the gated delta rule, where v head h has k head h % Hk:
//   D = exp(g)*S; delta = beta*(v - D^T k); S = fma(k, delta, D); o = (S^T q)/sqrt(S)
// with g = a*softplus(alpha + dt), beta = sigmoid(b).
struct DeltaArgs {
    DeltaShape shape;
    const float *x; // [T][C] from ConvArgs.out
    const float *alpha; // [T][Hv]
    const float *beta; // [T][Hv], before the sigmoid
    const float *dt; // [Hv]
    const float *a; // [Hv]
    float *state; // [n_slots][Hv][S (k)][S (v)]; in/out
    float *log; // [n_slots][log_size]; in/out
    const StepCtl *ctl;
    float *out; // [T][Hv*S]
};

// deltanet_layer does conv_parts and the delta rule of its results in a verify. Of one row it is one launch, with the same
// bits, and the conv's results, alpha and beta stay in it.
constexpr int64_t DELTA_TURN_BYTES = 256;
struct DeltaLayerArgs {
    ConvPartsArgs conv;
    DeltaArgs delta;
    void *turns; // [DELTA_TURN_BYTES], zero between launches; launches that may run at once need their own
};

// Returns the bytes of scratch that deltanet_chunks wants, aligned to 16. 0 means that it does not do heads
// of this S (it does 64 and 128).
int64_t deltanet_chunks_scratch(const DeltaShape &shape);

// ---- attention -----------------------------------------------------------------------------------------

// The KV of one attention layer is a pool of pages, each of PAGE positions, shared by all sequences. Position p of a
// sequence is in page pages[seq.pages + p / PAGE], whose cell p % PAGE it has. A verify writes its row r of a sequence
// at position n_past + (r - row0), also in a tree, where the row's own position may be smaller. A commit
// leaves the accepted rows there as pending, and ahead of the next step they are moved down.
// A cell holds the layer's KV heads, each a row of D values of `type`: ggml's F32 (0), F16 (1), Q4_0 (2) or Q8_0 (8).
// Within a page rows of one head follow each other, so that attention, which reads head by head, reads memory in a row.
struct KvPool {
    uint8_t *k, *v; // [pages][Hkv][PAGE] rows
    int32_t type; // k and v both have this type
    int32_t Hkv, D;

    // Returns which row of k, or of v, a position's head in this page is.
    LUCE_BOTH int64_t row(int32_t page, int32_t position, int32_t head) const {
        return int64_t(page * Hkv + head) * PAGE + position % PAGE;
    }
};

// kv_move moves pending rows down, in the pools of many layers at once. It is launched ahead of a step, where a sequence of
// the step has moves.
constexpr int32_t MAX_POOLS = 30; // of one launch
struct KvMoveArgs {
    KvPool pools[MAX_POOLS]; // [n_pools], of one type
    int32_t n_pools;
    const StepCtl *ctl;
    const int32_t *pages;
};

// norm_rope computes RMS(head) * norm and NEOX RoPE of the query and key heads of rows. The first rope_dim
// values of a head rotate, value i with i + rope_dim / 2 by the angle position * base^(-2 i / rope_dim).
struct RopeHeads {
    const float *x; // [T] rows of heads
    int64_t x_row, x_head; // one row or head is so many values from the next
    int32_t n_heads; // it is 0 where there are none
    const float *norm; // [D]
    float *out; // [T][n_heads][D]
};
struct NormRopeArgs {
    int32_t T, D, rope_dim;
    float base, eps;
    const int32_t *positions; // [T]
    RopeHeads k, q;
    // Rows may have axes of their own, in place of positions: pair i turns by the height where i % 3 is 1 and i is below
    // 3 * height_pairs, by the width where i % 3 is 2 and i is below 3 * width_pairs, else by the time.
    const int32_t *axes = nullptr; // [4][T] time, height, width, time
    int32_t height_pairs = 0, width_pairs = 0;
};
// Returns what pair i of a row's heads turns to.
LUCE_BOTH int32_t rope_position(const NormRopeArgs &a, int64_t row, int pair) {
    if (a.axes == nullptr) {
        return a.positions[row];
    }
    const int axis = pair % 3 == 1 && pair < 3 * a.height_pairs  ? 1
                     : pair % 3 == 2 && pair < 3 * a.width_pairs ? 2
                                                                 : 0;
    return a.axes[axis * a.T + row];
}

// image_rows puts rows of images in the places of embeddings.
struct ImageRowsArgs {
    int64_t T, E; // on a GPU E is a multiple of 4
    const float *x; // [T][E] embeddings
    const int64_t *
        rows; // [T] the address of the E values of a row of an image, in host memory that a GPU reads too; else 0
    float *out; // [T][E]
};

// copy_pieces copies pieces of memory to other places of the device. Addresses and bytes are multiples of 16, and no piece goes
// where another one lies.
struct CopyPiece {
    const void *from;
    void *to;
    int64_t bytes;
};
struct CopyPiecesArgs {
    static constexpr int MOST = 160; // a launch's arguments take 4 KiB at most
    CopyPiece pieces[MOST];
    int32_t n;
};

// kv_store writes K and V of the step's rows. Rows with seq -1 are not written.
struct KvStoreArgs {
    KvPool pool;
    int32_t T;
    // It is 1 for a prefill: row t of a sequence is at n_past + t, and T is any number.
    int32_t append;
    const float *k; // [T][Hkv][D], normalised and rotated
    const float *v; // [T][Hkv][D]
    const StepCtl *ctl;
    const int32_t *pages;
};

// row_scores says how much of the attention of a step's rows each cell has: of each head the mean over the rows of the one
// sequence of softmax(q.k * scale), over the cells that a row sees, those of its ancestors among them. Cells behind the step's
// last row keep what they had.
struct RowScoresArgs {
    KvPool pool; // k alone
    int32_t T, H;
    int32_t on_gpu; // 1: there are partials
    float scale;
    float softcap; // as in AttentionArgs
    int64_t n; // cells that `scores` has room for, in whole pages
    const float *q; // [T][H][D], normalised and rotated
    const StepCtl *ctl;
    const int32_t *pages;
    float *scores; // [H][n]
    float *partials; // on CUDA [row_scores_partials(args)] the rows' sums of each page, and then of all
};
// Returns the values of RowScoresArgs.partials. It needs T, H and n alone.
inline int64_t row_scores_partials(const RowScoresArgs &args) {
    return 2 * (args.n / PAGE + 1) * args.H * int64_t(args.T);
}

// nextn_pack packs the NextN head's input [RMS(e) * e_norm ; RMS(h) * h_norm] as matmul/quantised.h takes rows of 2 E values, where e
// of row t is its token's row of the table, whose tokens are those of row_tokens, and h is row hidden_from[t] of
// `hidden`. E is a multiple of 256.
struct NextnPackArgs {
    int32_t T;
    int64_t E;
    float eps;
    int32_t type, n_vocab; // the table has n_vocab rows of ggml's type
    int64_t row_bytes;
    const void *table;
    const int32_t *tokens, *drafts;
    const float *hidden; // [n][E]
    const int32_t *hidden_from; // [T]
    const float *e_norm, *h_norm; // [E]
    void *out; // [rowmm_x_bytes(T, 2 * E)], aligned to 16
};
bool nextn_has_table(int32_t type); // it says whether nextn_pack reads tables of the type

// keep_hidden leaves RMS(x) * norm of row t in row hidden_to[t] of `hidden`.
struct KeepHiddenArgs {
    int32_t T;
    int64_t E, x_row; // one row of x is x_row values from the next
    float eps;
    const float *x; // [T] rows of E values
    const float *norm; // [E]
    const int64_t *hidden_to; // [T]
    float *hidden; // [n][E]
};

// attention_heads does what norm_rope and kv_store do, and reads q, the gates, k and v as the parts that the product of
// their weights has left (matmul/quantised.h), which spares the kernels between. D is 128, 256 or 512.
struct AttentionHeadsArgs {
    // They are of q (per head D values of q, then where it is gated D of its gate), k and v, or of k and v alone. Where v is
    // missing it is k as the product gives it. Where pool.Hkv is 0 they are of q alone, and of the pool D alone is read.
    const RowmmArgs *parts;
    KvPool pool;
    int32_t T, H; // H is 0 where there is no q
    int32_t rope_dim;
    float base, eps;
    const int32_t *positions; // [T]
    const float *q_norm, *k_norm; // [D]
    const StepCtl *ctl;
    const int32_t *pages;
    float *q, *gate; // [T][H][D]
    int32_t gated;
    int32_t unit_v; // 1: v is normed too, without weights
    const float *rope_factors; // null, or [rope_dim / 2] by which RoPE's frequencies are divided
};

constexpr int PLAN_LAYERS = 128; // as many layers of a step may take a plan

// attention is softmax attention of a step's rows over what they see: committed positions first .. n_past -
// 1, then the row's ancestors by depth and itself, in the cells that kv_store has written. Keys are summed in
// logical order, position by position, in fixed chunks that depend on the absolute position alone. Partial
// results of chunks are combined in a fixed order too. So a row's bits depend on its own sequence only: not on the step's
// width, the tree beside it, the order of pages or other sequences. Query head h reads KV head h / (H / Hkv).
struct AttentionArgs {
    KvPool pool;
    int32_t T, H;
    int32_t
        first; // it is the lowest position that is visible (a drafter that reads the row before has no row 0)
    int32_t window; // where it is > 0, a row at p sees keys above p - window only
    float scale; // it scales q.k
    float softcap; // where it is > 0, scores become softcap * tanh(score / softcap)
    int32_t max_pages; // a sequence has at most so many pages, which bounds the chunks of a row
    int32_t block; // where it is > 0, each sequence has so many rows, a chain, that all see each other
    const float *q; // [T][H][D], normalised and rotated
    const float *gate; // null, or [T][H] rows of D values: out is multiplied by sigmoid(gate)
    int64_t gate_row, gate_head; // one row or head of gate is so many values from the next
    const StepCtl *ctl;
    const int32_t *pages;
    float *out; // [T][H][D]; rows with seq -1 get zeros
    // Null, or [rowmm_x_bytes(T, H * D)], aligned to 16: on CUDA the results go here, packed as matmul/quantised.h takes them, and
    // `out` is null.
    void *packed;
    float *scratch; // [attention_scratch(args)] partial results
    // Null, or what attention_plan has left for these T, H, first, window and pool. On CUDA it spares each block the plan of
    // its own, which takes longer than to read one.
    void *plan;
    // So many layers of the step have taken the plan before this one, fewer than PLAN_LAYERS. A plan serves one launch for each
    // number: a second one would find that all units were taken.
    int32_t layer;
    // Null, or [H] of each head a score without a value, which takes its part of the softmax.
    const float *sinks;
    // It is 1 where rows see committed positions alone, and nothing of their step: each sees what a row at n_past sees of
    // these, whatever its own position is. (On CUDA a window has 2 positions or more then.)
    int32_t committed;
};
// Returns the values of AttentionArgs.scratch for the largest context. It needs T, H, max_pages, and pool.D
// and .type alone.
int64_t attention_scratch(const AttentionArgs &args);

// Returns the bytes of AttentionArgs.plan.
int64_t attention_plan_bytes();

// On CUDA the rows of a block, which all see each other, have a kernel of their own, with other partial results.
constexpr int BLOCK_ATTENTION_SPLITS = 32;
constexpr int64_t block_attention_scratch(int64_t T, int64_t H, int64_t D) {
    return T * H * BLOCK_ATTENTION_SPLITS * (D + 2);
}

// kv_gather is for prefill: it writes the cells of each sequence, in order and from SeqCtl::cells on, as values that
// attention over cells side by side reads.
struct KvGatherArgs {
    KvPool pool;
    int64_t n_kv; // there is room for so many cells, of all sequences
    const StepCtl *ctl;
    const int32_t *pages;
    int32_t which; // 0 means k, 1 means v
    int32_t out_type; // it is F16, or F32 on a CPU
    void *out; // [n_kv][Hkv*D]; behind a sequence's n_past + n_rows cells there are zeros
    // 0, or a window: whole GATHER_CELLS below it, which no row sees, may be left as they are.
    int32_t window;
};
constexpr int32_t GATHER_CELLS = 64;

// What makes the mask of a prefill's T rows over the first n_kv cells of each one's own sequence. It is 0 where a row
// at p sees cell c (first <= c <= p, and c > p - window where there is one), else -inf. With row_ends a row sees up to its end,
// which is p + 1 or more.
struct MaskArgs {
    int32_t T; // rows past the step's are as those that would follow
    int64_t n_kv;
    int32_t first, window;
    const StepCtl *ctl;
    const int32_t *row_ends; // null, or [n_ends]
    int32_t n_ends; // of so many rows
    uint16_t *out; // [T][n_kv] F16 bits
};

// ---- choices -------------------------------------------------------------------------------------------

// choose gives the token that each row's logits stand for, by its sequence's ChoiceCtl, and says whether a
// logit is not finite. Rows with seq -1 are greedy.
constexpr int CHOICE_PARTS = 62; // a row has so many parts, which blocks look at side by side
constexpr int CHOICE_LIST = 1024; // a row has at most so many ids that a block compares with each other
constexpr int64_t CHOICE_MAX_IDS = 1 << 24;
struct ChoicePart {
    int32_t id;
    float value;
};
struct ChoiceRow {
    int32_t token;
    int32_t not_finite; // it is 1 where a logit is not finite
    // The CUDA kernels use the rest as room.
    // The largest logit of each part; id is complemented where one is not finite.
    ChoicePart most[CHOICE_PARTS];
    ChoicePart best[CHOICE_PARTS]; // it has the largest z + G of each part
    uint32_t n_listed;
    uint32_t reserved;
    uint64_t mass[SAMPLE_BINS];
    uint32_t count[SAMPLE_BINS];
    ChoicePart list[CHOICE_LIST];
};
constexpr int CHOICE_WIDTH = sizeof(ChoiceRow) / sizeof(int32_t);
struct ChooseArgs {
    float *logits; // [T][n]
    int64_t n;
    int32_t T;
    const StepCtl *ctl;
    // 1: a row's logits are of the position after its own; 0: of its own, as a block's masks are.
    int32_t ahead;
    ChoiceRow *out; // [T]
    // Entry rows[..].keep of both becomes {token, not-finite flag} of row t: one for later rows, and one for the host, in
    // memory of its own that a GPU writes to, since a copy would take longer. They may be the same, or both null.
    int32_t *drafts, *given; // [n][2]
    // Logits t are those of the step's row first + t * (1 + between): of blocks, of one row each.
    int32_t first, between;

    LUCE_BOTH int32_t row_of(int32_t t) const { return first + t * (1 + between); }
};

// topk lists the k best candidates of each row, in the order (logit descending, id ascending), with their
// log-probabilities over the whole vocabulary. Entry rows[t].keep of `lists` begins with k ids and then the bits
// of k F32 scores. Where a row has fewer than k logits above -inf, the list ends with ids of -1. (Rows with
// keep -1 are not looked at. Of a row with a logit that is NaN or +inf the list is any list: its entry in
// `drafts` says so.)
struct TopkArgs {
    const float *logits; // [T][n], n <= TOPK_MAX_N
    int64_t n;
    int32_t T, k; // k is 1 .. TOPK_MAX
    const StepCtl *ctl;
    int32_t *lists; // [entries][entry]; in/out
    int32_t *scratch; // [T][topk_scratch(k)]
    int32_t entry; // 2 * k or more
};
constexpr int TOPK_MAX = 63;
constexpr int TOPK_PART = 4096; // one block sorts so many logits
constexpr int TOPK_PARTS = 64;
constexpr int64_t TOPK_MAX_N = int64_t(TOPK_PART) * TOPK_PARTS;
// Of each part there are its k best, id and logit, its largest logit, and the sum of exp(logit - largest).
constexpr int64_t topk_scratch(int32_t k) {
    return int64_t(TOPK_PARTS) * (2 * k + 2);
}

// row_tokens gives the tokens of a step's rows. tokens[t] >= 0 is the token itself, and -1 - i stands for
// entry i of `drafts`. (An entry beyond the vocabulary, of a draft that was not finite, becomes token 0.)
struct TokensArgs {
    const int32_t *tokens; // [T]
    const int32_t *drafts; // [n][2]
    int32_t T, n_vocab;
    int32_t *out; // [T]
};
// Returns the token of a row whose entry of `tokens` is `given`, as TokensArgs says.
// (The entries may be in host memory, where another device has written them: no cache may have them from the time before.)
LUCE_BOTH int32_t token_of(int32_t given, const volatile int32_t *drafts, int32_t n_vocab) {
    const int32_t token = given >= 0 ? given : drafts[2 * int64_t(-1 - given)];
    return token < 0 || token >= n_vocab ? 0 : token;
}

// ---- blocks of drafters whose drafts depend on each other ------------------------------------------------

// block_conv is a causal convolution over the rows of each block, with zeros before its first one:
//   out_t[c] = sum over i of (base[side][i][c] + added_t[side][i][c / G]) * x_{t-i}[c], where G = E / groups
struct BlockConvArgs {
    int32_t T, E, taps, groups;
    int32_t side; // 0: ahead of a sublayer; 1: behind it
    const float *x; // [T][E]
    const float *added; // [T][2][taps][groups]
    const float *base; // [2][taps][E]
    const StepCtl *ctl;
    float *out; // [T][E]
};

// The same on CUDA between products, whose parts it adds up and whose input it packs. Ahead of a sublayer it convolves x normed,
// which is packed; behind one it convolves the results of `parts` and adds x, and what is packed is that for a product which
// norms it, as ROWMM_RMS of RowmmPackArgs.
struct BlockConvPackArgs {
    int32_t T, taps, groups; // G is even
    int64_t K; // E
    const float *x; // [T] rows of K values
    int64_t x_row;
    const float *w; // [K]: weights of the norm of x, or of the one that follows; aligned to 16
    float eps; // of the norm of x
    const void *normed; // x, packed as ROWMM_RMS; null behind a sublayer
    const RowmmArgs *parts; // null ahead of a sublayer, else of one weight of K rows
    const RowmmArgs *added; // of one weight, of 2 * taps * groups rows
    const float *base; // [2][taps][K]
    const StepCtl *ctl;
    float *copy; // behind a sublayer x + the convolution, [T][K]
    void *out; // [rowmm_x_bytes(T, K)], aligned to 16
};

// prior_tokens gives the token before the one that a row drafts, for one row of each block: what the row above it has
// drafted, else the anchor. Row t of T is the step's row first + t * (1 + between), and draws on `drafts` as choose leaves
// them.
struct PriorArgs {
    int32_t T, first, between, n_vocab;
    const int32_t *tokens; // [rows of the step]; those of anchors are read, as TokensArgs says
    const int32_t *drafts; // [n][2]
    const StepCtl *ctl;
    int32_t *out; // [T]

    LUCE_BOTH int32_t row_of(int32_t t) const { return first + t * (1 + between); }
};
// Returns the row above in the same block where that drafts, or -1: there is the anchor.
LUCE_BOTH int32_t drafted_above(const StepCtl &ctl, int32_t row) {
    const int32_t above = ctl.rows[row].parent;
    return above >= 0 && ctl.rows[above].keep >= 0 ? above : -1;
}
// Returns what token_of() takes for row t: the entry of the draft above, or the anchor's entry of `tokens`.
LUCE_BOTH int32_t prior_of(const PriorArgs &a, int32_t t) {
    const int32_t row = a.row_of(t), above = drafted_above(*a.ctl, row), seq = a.ctl->rows[row].seq;
    return above >= 0 ? -1 - a.ctl->rows[above].keep : a.tokens[seq < 0 ? row : a.ctl->seqs[seq].row0];
}

// candidates lists the K largest logits of each row, in the order (logit descending, id ascending). Where one of the row's
// logits is NaN or +inf, the ids are any and the logits NaN.
struct CandidatesArgs {
    int32_t T, K; // K <= n
    int64_t n;
    const float *logits; // [T][n]
    const int64_t *tokens; // [n] the target's token of each; null: the same
    int32_t *out; // [3][T][K]: indexes of logits, the target's tokens, bits of logits. Behind them is room
};
// Returns how many [T][K] the results and their room are.
constexpr int64_t candidate_planes(int32_t K) {
    return 3 + (topk_scratch(K) + K - 1) / K;
}

// cluster_logits gives the logits of the tokens of K clusters of each row, and NEVER_CHOSEN to all others: the vocabulary lies
// cluster by cluster in `order`, each cluster with as many tokens as the others.
constexpr float NEVER_CHOSEN = -1e30f; // a logit with which a token is not chosen where another one has any
struct ClusterLogitsArgs {
    int32_t T, K, E;
    int32_t size; // tokens of a cluster
    int32_t type; // ggml's, of the table
    int32_t on_gpu;
    int64_t n; // tokens
    int64_t row_bytes;
    const float *x; // [T][E]
    const int32_t *clusters; // [T][K]: the first plane of CandidatesArgs
    const void *table; // [n] rows of E weights
    const int32_t *order; // [n] each token once
    float *out; // [T][n]
};

// lattice scores each candidate b of a row behind each candidate a of the row above in the same block:
//   s_t(b | a) = z_t(b) + sum over r of before(a)[r] * gates_t[r] * behind(b)[r]
// The first row that drafts has the anchor alone in the place of a. Where `drafts` is not null, it drafts along the
// rows: of each the candidate that the sequence's ChoiceCtl takes of s_t(. | the one above), as choose does of logits.
// Entry rows[t].keep of `lists`, where that is not null, begins with K tokens and then the bits of [K][K] F32: by a, and
// then by b, the logarithm of the softmax over b.
struct LatticeArgs {
    int32_t T, K, R;
    int32_t ahead; // as ChooseArgs says
    int32_t chooses; // 0: another op drafts
    const int32_t *candidates; // [3][T][K] of CandidatesArgs
    const float *anchors; // [T][R]: before() of the rows' own tokens, of which those of anchors are read
    const float *before; // [T][K][R]
    const float *behind; // [T][K][R]
    const float *gates; // [T][R]; null: ones
    const StepCtl *ctl;
    int32_t *drafts, *given; // [n][2], as ChooseArgs says
    int32_t *lists; // [entries][entry]; null: none are kept
    int32_t entry;
    float *out; // [T][K][K] s_t by a and b; of a that was not chosen only where there are lists
};

// confidence says how likely a draft is right where those above it are. Behind the K tokens and [K][K] scores of lattice's
// entry rows[t].keep lie the bits of [K] F32, by the candidate a of the row above, or the anchor alone:
//   log(sigmoid(head . (hidden_t, before(a)) + bias))
struct ConfidenceArgs {
    int32_t T, K, R, E;
    int32_t n; // weights of the head: E, or E + R
    int32_t type; // ggml's, of the head; F32 on a GPU
    const float *hidden; // [T][E]
    const float *anchors; // [T][R] as LatticeArgs
    const float *before; // [T][K][R]
    const void *head; // [n]
    const float *bias; // [1]; null: 0
    const StepCtl *ctl;
    int32_t *lists; // [entries][entry]
    int32_t entry;
    float *out; // [T][K]: the same
};

// Rows go to the host and their results come back through pinned memory, which the device's kernels read and write. The
// host clears `given` before the launch, and sees it set when all of a row is there.
struct GiveRowsArgs {
    int32_t T, n_used;
    int64_t E; // it is a multiple of 4
    const float *values; // [T][E], aligned to 16
    const int32_t *ids; // [T][n_used]
    const float *weights; // [T][n_used]
    float *x; // pinned [T][E], aligned to 16
    int32_t *route; // pinned [T][2*n_used]: ids, then the bits of weights
    uint32_t *given; // pinned [T]
};

// What launchers that use cuBLAS return of its statuses: beyond CUDA's own codes.
constexpr int CUBLAS_ERRORS = 20000;

namespace cuda {
int conv(const ConvArgs &args, void *stream);
int conv_parts(const ConvPartsArgs &args, void *stream);
int deltanet(const DeltaArgs &args, void *stream);
int deltanet_layer(const DeltaLayerArgs &args, void *stream);
bool deltanet_with_conv(const DeltaShape &shape); // it says whether deltanet_layer is one launch
// It takes DELTA_APPEND, for long prefills.
int deltanet_chunks(const DeltaArgs &args, void *scratch, void *stream);
int norm_rope(const NormRopeArgs &args, void *stream);
int image_rows(const ImageRowsArgs &args, void *stream);
int copy_pieces(const CopyPiecesArgs &args, void *stream);
int kv_move(const KvMoveArgs &args, void *stream);
int kv_store(const KvStoreArgs &args, void *stream);
int row_scores(const RowScoresArgs &args, void *stream);
int nextn_pack(const NextnPackArgs &args, void *stream);
int keep_hidden(const KeepHiddenArgs &args, void *stream);
int attention_heads(const AttentionHeadsArgs &args, void *stream);
int attention(const AttentionArgs &args, void *stream); // it takes block 0
// Makes the plan of all layers whose attention differs in pool.k, pool.v, q, gate, the results and scratch alone. It needs
// T, H, first, window, ctl, and of pool what is not a pointer.
int attention_plan(const AttentionArgs &args, void *plan, void *stream);
int block_attention(const AttentionArgs &args, void *stream); // it takes block 1, without a gate
int kv_gather(const KvGatherArgs &args, void *stream);
int choose(const ChooseArgs &args, void *stream);
int topk(const TopkArgs &args, void *stream);
int row_tokens(const TokensArgs &args, void *stream);
int block_conv(const BlockConvArgs &args, void *stream);
int block_conv_pack(const BlockConvPackArgs &args, void *stream);
int prior_tokens(const PriorArgs &args, void *stream);
int candidates(const CandidatesArgs &args, void *stream); // n <= TOPK_MAX_N
int cluster_logits(const ClusterLogitsArgs &args, void *stream); // E is a multiple of 8
int lattice(const LatticeArgs &args, void *stream);
int confidence(const ConfidenceArgs &args, void *stream);
const char *error_text(int error); // it puts what a launcher returned into words
int set_device(int device); // kernels launch on the current device of the calling thread
int current_device(); // it returns the calling thread's, or -1 after an error
int device_error(); // it returns why CUDA counts no devices, or 0
int compute_capability(int device); // it returns 90 for 9.0

int give_rows(const GiveRowsArgs &args, void *stream);
// Copies from or to pinned memory, or from a peer's, sooner than the device's copy engines. Both places, and the bytes, are
// multiples of 16.
int bring(const void *from, void *to, int64_t bytes, void *stream);
// The same by a copy engine, for a stream beside that of a step.
int bring_beside(const void *pinned, void *device, int64_t bytes, void *stream);
// Lets kernels and copies of two devices reach each other's memory, and says whether they do.
bool peers(int device, int other);
// Records `event`, of the device of `ahead`, where that stream is now, and lets `stream` wait for it there.
int follow(void *ahead, void *event, void *stream);
// The other way, and a mark behind it.
int leave_beside(const void *device, void *host, int64_t bytes, void *stream);
int record(void *event, void *stream);
// Pins host memory that was allocated otherwise, for all devices, and says whether that worked. unpin() undoes it.
bool pin(void *host, size_t bytes);
void unpin(void *host);
bool is_pinned(void *host); // it says whether kernels reach this host memory at its own address
int failed(void *stream); // it returns what a stream's work has failed with so far, or 0
// Returns 0 while a stream has work to do, then what it failed with, or cudaErrorUnknown.
int stopped(void *stream);

// Wait for all that is enqueued, or for a cudaEvent_t, and return what that failed with.
int finish(void *stream);
int finish_event(void *event);

// A step is captured once and replayed: begin, enqueue the step, end; then launch any number of times.
// capture_abandon ends a recording that failed, so that the stream can be used again.
int capture_begin(void *stream);
int capture_end(void *stream, void **executable);
void capture_abandon(void *stream);
int capture_launch(void *executable, void *stream);
void capture_free(void *executable);
} // namespace cuda

} // namespace luce
