/* luce: exact speculative decoding of Qwen3.5/3.6/3.8 and Gemma 4 GGUF models. The whole C ABI.
 *
 * The model of the thing
 *   file        is an opened GGUF (all parts of a split one), mapped into memory; no weights are loaded
 *   model       is weights on one device or several, with the drafters loaded beside them; it is immutable, and engines
 *               share it
 *   engine      is the working memory of a model: KV pages, recurrent slots, buffers, ready graphs
 *   sequence    is one timeline in an engine: a committed prefix of tokens in the caches
 *   checkpoint  is a position that any sequence of the engine can start from
 *   tower       is what makes rows of a prompt out of an image, beside a model; it is immutable
 *
 * The round (one loop serves every decoding mode)
 *   A sequence has `committed` tokens in the caches, and one `anchor` token, which is chosen but not in them.
 *   1 draft   propose candidates that may follow the anchor, or none
 *   2 verify  run one forward of the model, the drafters' target, over [anchor, candidates] of every sequence that takes
 *             part; it commits nothing
 *   3 accept  walk from the anchor to the child whose token is the target's own choice, and on
 *   4 commit  append the accepted rows to the sequence; rejected rows leave no trace
 *   Plain decoding is a round without candidates.
 *
 * The order below: library, files, models, towers, engines; then the calls of one sequence after the other (open, prefill, verify,
 * choose, commit); then rounds that are begun and waited for, and drafts; then checkpoints; then functions on host arrays;
 * last what only inspects.
 *
 * What is promised: a sequence's tokens depend on the model, its prompt, seed and sampling alone. They depend on no
 * drafts, on no sequences beside it, and not on whether its prompt came from a checkpoint. For that a row of a step has
 * the same bits whatever else is in the step. Tests show it on CPUs and on Hopper GPUs; no others were tried.
 *
 * Conventions
 * - Every function returns a luce_status unless stated; results go to out-parameters, written on LUCE_OK only.
 * - luce_last_error() explains the last failure of the calling thread.
 * - Handles are opaque and checked: a null, closed or wrong handle is LUCE_E_ARG, never a crash.
 *   Close in any order: a sequence or checkpoint keeps its engine alive, an engine its model, a model its file. What is
 *   still open when the process exits is left to the system.
 * - Structs begin with `struct_size`, set by the caller to sizeof(struct); a size this library does not know is
 *   LUCE_E_ARG. (Structs that are passed as arrays have none.) In option structs 0 means "the default" for every field.
 * - Text is UTF-8. Strings handed out live as long as the handle they came from.
 * - Calls on one engine, its sequences and checkpoints wait for each other, but for luce_engine_cancel and most of
 *   saving and loading. Engines run beside each other on different threads.
 * - The library prints nothing, reads no files but those named, and never exits the process.
 */
#ifndef LUCE_H
#define LUCE_H

#include <stddef.h>
#include <stdint.h>

#define LUCE_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

#define LUCE_ABI_VERSION 21 /* changes whenever a struct or a signature does */
#define LUCE_MAX_ROWS 64 /* rows of one step over all its sequences: each has an anchor and its candidates */
#define LUCE_MAX_DRAFT 8 /* drafts of a chain of which each is a step */
#define LUCE_MAX_DRAFTERS 16 /* of a model, and in an engine's list */
#define LUCE_MAX_TOP 63 /* candidates that are kept of a draft */
#define LUCE_PAGE 256 /* positions of a KV page */
#define LUCE_MAX_DIMS 4
#define LUCE_MAX_DEVICES 16 /* of a model */

typedef enum luce_status {
    LUCE_OK = 0,
    LUCE_E_ARG = 1, /* an argument is out of range; nothing was done */
    LUCE_E_FILE = 2, /* a file cannot be read or is malformed */
    LUCE_E_UNSUPPORTED = 3, /* the file is well-formed, but luce cannot run it */
    LUCE_E_MEMORY = 4, /* not enough memory; the message gives needed and free */
    LUCE_E_CONTEXT = 5, /* the request does not fit into a sequence's context */
    LUCE_E_NUMERIC = 6, /* non-finite logits; the sequence is now failed */
    LUCE_E_STATE = 7, /* the sequence is failed, or the call is out of order */
    LUCE_E_CANCELLED = 8, /* luce_engine_cancel or a progress callback asked to stop */
    LUCE_E_DEVICE = 9, /* the device or its driver failed */
    LUCE_E_INTERNAL = 10 /* a defect of luce */
} luce_status;

typedef struct luce_file luce_file;
typedef struct luce_model luce_model;
typedef struct luce_engine luce_engine;
typedef struct luce_sequence luce_sequence;
typedef struct luce_checkpoint luce_checkpoint;
typedef struct luce_tower luce_tower;

/* ---- library ------------------------------------------------------------------------------- */

/* LUCE_ABI_VERSION of the loaded library; compare it before anything else. */
LUCE_API int32_t luce_abi_version(void);
/* The version for people: "0.2.0 (ggml 0.25.3, cuda)". The string is static. */
LUCE_API const char *luce_version(void);
/* The message of the calling thread's last failed call is one line; it is valid until its next failing call. */
LUCE_API const char *luce_last_error(void);

/* fn gets each message, from any thread. level: 0 debug (an engine's ops too), 1 info, 2 warning, 3 error. NULL: none. */
typedef void (*luce_log_fn)(int32_t level, const char *text, void *user);
LUCE_API luce_status luce_set_log(luce_log_fn fn, void *user);

typedef struct luce_device_info {
    uint64_t struct_size;
    char name[32]; /* "cpu", "cuda:0", ...: what luce_model_params.device takes */
    char description[128]; /* "NVIDIA H100 80GB HBM3" */
    uint64_t memory_free; /* bytes, now */
    uint64_t memory_total; /* bytes */
    int32_t is_gpu;
} luce_device_info;

/* Counts the devices; index 0 is what `auto` takes: a CUDA device of compute capability 8.0 or more, else the CPU. */
LUCE_API luce_status luce_device_count(int32_t *count);
LUCE_API luce_status luce_device_get(int32_t index, luce_device_info *out);
/* Why GPUs of this machine may be missing above: built without CUDA, what the driver says, or a compute capability below
 * 8.0; "" where none is. One line, static. */
LUCE_API const char *luce_device_missing(void);

/* What the driver says of a GPU beside luce_device_info. */
typedef struct luce_gpu_info {
    uint64_t struct_size;
    char pci[16]; /* its place, by which nvidia-smi knows it: "0000:0F:00.0" */
    uint64_t
        bandwidth; /* bytes a second, by clock and width of the memory's bus; 0: the driver does not say */
    int32_t capability; /* compute capability: 90 is 9.0 */
    int32_t multiprocessors;
    int32_t driver_cuda; /* the newest CUDA that the driver runs: 13000 is 13.0 */
    int32_t built_cuda; /* the CUDA that this library was built with */
} luce_gpu_info;
/* E_ARG: there is no such device, or it is no GPU. */
LUCE_API luce_status luce_device_gpu(int32_t index, luce_gpu_info *out);

/* Measures the bytes a second that a device's memory gives, in some tenths of a second: n_threads of a CPU read an array,
 * a GPU copies one, of which each byte counts twice. It allocates up to 1 GiB of what is free. */
LUCE_API luce_status luce_device_bandwidth(int32_t index, uint32_t n_threads, uint64_t *bytes_per_second);

/* ---- file: what a GGUF says ------------------------------------------------------------------ */

/* Maps `path`, and for `x-00001-of-0000N.gguf` all N parts, and checks all of the structure: the header, every key, and
 * every tensor's type, shape, offset and extent against the file's size. It reads GGUF v2 and v3, little-endian. E_FILE
 * names the file, the byte offset and what was found there. */
LUCE_API luce_status luce_file_open(luce_file **out, const char *path);
LUCE_API luce_status luce_file_close(luce_file *file);

typedef struct luce_file_info {
    uint64_t struct_size;
    uint64_t size_bytes; /* all parts */
    uint64_t n_kv; /* keys of the first part */
    uint64_t n_tensors; /* all parts */
    uint32_t version; /* 2 or 3 */
    uint32_t n_parts;
} luce_file_info;
LUCE_API luce_status luce_file_get_info(luce_file *file, luce_file_info *out);

/* One key. type and elem_type are GGUF's value types (0 u8, 1 i8, 2 u16, 3 i16, 4 u32, 5 i32, 6 f32, 7 bool, 8 string,
 * 9 array, 10 u64, 11 i64, 12 f64). `data` points into the mapping, unaligned, to a scalar (count 1), the `count` bytes
 * of a string (not terminated), or the `count` packed elements of an array (its strings: luce_file_get_strings). */
typedef struct luce_kv {
    uint64_t struct_size;
    const char *name; /* NUL-terminated, lives as long as the file */
    const void *data;
    uint64_t count;
    int32_t type;
    int32_t elem_type; /* of an array, else = type */
} luce_kv;
LUCE_API luce_status luce_file_get_kv(luce_file *file, uint64_t index, luce_kv *out);

/* The strings of array key `index` (luce_kv.count): pointers into the mapping, and lengths in bytes, not terminated. */
LUCE_API luce_status luce_file_get_strings(luce_file *file, uint64_t index, const char **data,
                                           uint64_t *lengths);

typedef struct luce_tensor_info {
    uint64_t struct_size;
    const char *name; /* NUL-terminated, lives as long as the file */
    const char *type_name; /* "Q4_K", ... */
    const void *data; /* in the mapping; size_bytes of them */
    uint64_t ne[LUCE_MAX_DIMS]; /* ggml order, fastest first; 1 from n_dims on */
    uint64_t size_bytes;
    int32_t type; /* ggml type id */
    uint32_t n_dims;
} luce_tensor_info;
LUCE_API luce_status luce_file_get_tensor(luce_file *file, uint64_t index, luce_tensor_info *out);

/* ---- model: weights on a device --------------------------------------------------------------- */

/* It is called with the part done, in 0..1; it returns non-zero to cancel (LUCE_E_CANCELLED). */
typedef int32_t (*luce_progress_fn)(float fraction, void *user);

/* The file of a drafter, which may be the model's own, and the drafter's kind: "nextn", a NextN (MTP) head; "assistant",
 * one of Gemma 4 (MTP), of llama.cpp's layout or a fork's; "dflash", a block drafter (DFlash, DFlash2, DSpark) of
 * llama.cpp's layout or an older one; NULL: what the file holds. E_FILE names what is missing, or both values where it does
 * not fit the model; E_UNSUPPORTED names what luce does not implement; E_ARG lists the kinds. */
typedef struct luce_drafter_file {
    luce_file *file;
    const char *kind;
} luce_drafter_file;

typedef struct luce_model_params {
    uint64_t struct_size;
    /* "auto" (= NULL), "cpu", "cuda", "cuda:N", or several of a kind, "cuda:0,cuda:1": each has consecutive layers in this
     * order, the first the embeddings too, the last the output and the drafters. "cuda:0+cuda:1": each has all layers, with an
     * equal part of their heads and widths, and the last the output and the drafters. Sums over the parts are added in this order:
     * tokens are the same in every mode, and may be others than on one device. E_UNSUPPORTED names what has no equal parts,
     * or that luce does not cut the architecture so. */
    const char *device;
    /* One more of that kind, without layers: the output and the drafters lie there, and rows are chosen there. NULL: on the
     * last of `device`. E_UNSUPPORTED: an assistant, which reads the layers' cells. */
    const char *draft_device;
    const luce_drafter_file
        *drafters; /* (n_drafters): the model's list, in any order; kinds may come twice */
    uint32_t n_drafters; /* 0..LUCE_MAX_DRAFTERS */
    luce_progress_fn progress; /* may be NULL */
    void *progress_user;
    /* The experts of the first so many layers stay in host memory, where the CPU multiplies them. Other numbers may give
     * other tokens; with one number they are the same in every mode. E_ARG: there are fewer layers, or no experts.
     * E_UNSUPPORTED names a type that the CPU does not multiply, or several GPUs. */
    uint32_t n_cpu_experts;
    /* (n_layers): how many layers each of several devices has, without draft_device: one at least and the model's in all.
     * NULL: as many as leave the fullest device as empty as can be. */
    const uint32_t *layers;
    uint32_t n_layers;
    /* Bytes of each GPU that may hold F16 copies of its layers' matrices, the first layers' first. Long prompts multiply in F16, and
     * write out what has no copy for each of their steps. No bit depends on it. 0: there are none. */
    uint64_t copy_bytes;
    /* 1: the experts of all layers of the trunk have their home in host memory, on a GPU pinned, where the device reads them; engines
     * have slots on it for some (luce_engine_params). No bit depends on it: tokens are those of a model with all experts on
     * the device. E_ARG: there are no experts, or the CPU is to multiply some. E_UNSUPPORTED: several GPUs. */
    int32_t experts_at_home;
} luce_model_params;

/* How an engine drafts with one of the model's drafters. Several entries may be of one, and then share its KV. */
typedef struct luce_drafter_params {
    uint32_t drafter; /* index of the model's list */
    uint32_t
        n_draft; /* most drafts of a round; 0: as many as it can (luce_drafter_info), for a block the only number */
    uint32_t
        n_part; /* it drafts among so many first tokens of the vocabulary, a multiple of 128; 0: all, as blocks do */
} luce_drafter_params;

typedef struct luce_engine_params {
    uint64_t struct_size;
    uint32_t n_ctx; /* positions of one sequence; 0: the model's training context, at most 4096 */
    uint32_t n_sequences; /* sequences that may be open at once, 1..LUCE_MAX_ROWS; 0: 1 */
    uint32_t n_checkpoints; /* checkpoints that may be on the device at once, 0..1024 */
    /* KV pages of all sequences and checkpoints; 0: enough for n_sequences full ones and, with checkpoints, one more.
     * Layers with a sliding window have others beside them, always enough. */
    uint32_t n_pages;
    /* Most rows of one sequence in a step, 1..LUCE_MAX_ROWS; 0: the most drafts of any drafter + 1 */
    uint32_t n_rows;
    uint32_t n_drafters; /* 0..LUCE_MAX_DRAFTERS */
    const luce_drafter_params
        *drafters; /* (n_drafters): the engine's list. Calls name a drafter by its index here */
    uint32_t n_top; /* candidates kept of each draft (luce_sequence_get_lists), 0..LUCE_MAX_TOP */
    /* Most rows of a prefill step: a multiple of LUCE_PAGE, at most 4096; 0: 512, 2048 on a GPU, 1024 on several */
    uint32_t n_chunk;
    uint32_t n_threads; /* CPU only; 0: one per core, at most 16 */
    const char *kv_type; /* "f16" (= NULL), "q8_0", "q4_0", "f32" */
    int32_t gaps; /* 1: prompts may leave text out (luce_gap) */
    /* 1: verifies also keep what their rows give each position (luce_sequence_get_scores); n_sequences is then 1. E_UNSUPPORTED:
     * no layer sees all positions, or the model's device has no such kernel. */
    int32_t scores;
    /* Of models whose experts are at home (experts_at_home): slots on the device for so many of the experts of each layer, at most
     * all, which the first ones have first (luce_engine_move_experts). 0: all are read at home. E_ARG: the experts of other models
     * have no home. */
    uint32_t n_expert_slots;
} luce_engine_params;

/* What one of a model's devices has, of the same parts as luce_memory. */
typedef struct luce_device_memory {
    char name[32];
    uint32_t first, n_layers; /* its layers of the trunk, whole or a part of each: a draft_device has none */
    uint64_t weights, kv, state, experts, compute, other, total, free;
} luce_device_memory;

typedef struct luce_memory {
    uint64_t struct_size;
    uint64_t weights; /* bytes on the device; on the CPU they are mapped, not allocated */
    uint64_t kv; /* pages */
    uint64_t state; /* recurrent state, draft logs, hidden rows: of sequences and checkpoints */
    uint64_t experts; /* slots of experts whose home is in host memory */
    uint64_t compute; /* activations, inputs, outputs */
    uint64_t other; /* captured graphs, on a CPU all graphs, and ggml's work buffers: an upper bound */
    uint64_t total; /* what a new model and engine together allocate on the device */
    uint64_t device_free;
    uint32_t n_devices; /* it counts all of this over so many, in the order of layers */
    luce_device_memory devices[LUCE_MAX_DEVICES];
} luce_memory;

/* Counts what a model and one engine of it would need, from the file alone: nothing is loaded or allocated on the
 * device. Where several devices are given no numbers of layers, it shares them out as suits this engine: luce_model_open,
 * which knows none, then gets them from here. It runs every check that luce_model_open makes, so it also answers "can luce run
 * this file": E_UNSUPPORTED names the reason, E_FILE a missing key or a tensor's expected and found shape. */
LUCE_API luce_status luce_plan_memory(luce_file *file, const luce_model_params *model,
                                      const luce_engine_params *engine, luce_memory *out);

/* Loads the weights: a CPU uses them in the mapping, a GPU has them uploaded, with progress. Where they do not fit,
 * it is E_MEMORY before anything is allocated. params may be NULL. */
LUCE_API luce_status luce_model_open(luce_model **out, luce_file *file, const luce_model_params *params);
LUCE_API luce_status luce_model_close(luce_model *model);

typedef struct luce_model_info {
    uint64_t struct_size;
    char architecture[32]; /* general.architecture of the file */
    char device[128]; /* "cpu", "cuda:0", of several "cuda:0,cuda:1" or "cuda:0+cuda:1" */
    uint64_t n_params; /* weights, all tensors */
    uint64_t weight_bytes;
    uint32_t n_vocab;
    uint32_t n_embd;
    uint32_t n_layer; /* trunk blocks */
    uint32_t n_nextn; /* NextN blocks in the file */
    uint32_t n_ctx_train; /* context_length of the file */
    uint32_t n_drafters; /* that are loaded */
} luce_model_info;
LUCE_API luce_status luce_model_get_info(luce_model *model, luce_model_info *out);

/* What the candidates of a draft are. A tree may be grown of any (luce_tree). */
typedef enum luce_form {
    LUCE_FORM_CHAIN =
        0, /* each draft from those before it: the list of a depth holds behind their first choices alone */
    LUCE_FORM_INDEPENDENT = 1, /* the list of a depth holds behind whatever was chosen before it */
    LUCE_FORM_CONDITIONAL = 2 /* a depth has a list behind each candidate of the depth above */
} luce_form;

typedef struct luce_drafter_info {
    uint64_t struct_size;
    char kind[16]; /* as in luce_drafter_file */
    int32_t form; /* luce_form */
    uint32_t n_draft; /* most drafts of a round: that it can, or that the engine's entry allows */
    uint32_t
        n_block; /* rows of the step that drafts all at once, the anchor's among them; 0: a step drafts one token */
    uint32_t n_list; /* candidates of each depth, of conditional lists; else 0 */
    uint32_t n_part; /* of an engine's entry */
    uint32_t drafter; /* index of the model's list */
    int32_t has_kv; /* it has KV of its own in each engine that uses it */
} luce_drafter_info;
/* A drafter of the model's list. E_ARG: there is none of this index. */
LUCE_API luce_status luce_model_get_drafter(luce_model *model, uint32_t index, luce_drafter_info *out);

/* ---- tower: rows of a prompt, made of an image -------------------------------------------------- */

typedef struct luce_tower_params {
    uint64_t struct_size;
    const char *device; /* as of luce_model_params, but NULL is "cpu" */
    uint32_t
        max_rows; /* most rows of an image, 64..16384; 0: as many as a part of the device's memory has room for */
} luce_tower_params;

/* Opens the vision tower that a file holds (general.architecture "clip", projector_type "qwen3vl_merger"). On a CPU the weights
 * stay in the mapping. On a GPU they are uploaded, and all memory that an image of max_rows rows needs is taken: E_MEMORY gives
 * needed and free. E_FILE and E_UNSUPPORTED name what is wrong with the file. params may be NULL. */
LUCE_API luce_status luce_tower_open(luce_tower **out, luce_file *file, const luce_tower_params *params);
LUCE_API luce_status luce_tower_close(luce_tower *tower);
/* E_FILE: rows of the tower have another width than the model's. E_UNSUPPORTED: the model takes no images. */
LUCE_API luce_status luce_tower_check(luce_tower *tower, luce_model *model);

typedef struct luce_tower_info {
    uint64_t struct_size;
    uint64_t weight_bytes;
    uint64_t identity; /* a hash of its tensors: towers that make other rows have another one */
    uint64_t scratch_bytes; /* memory that an image of max_rows rows takes, which on a GPU is held */
    uint32_t
        max_rows; /* most rows of an image: those of the params, or fewer where even all memory has no room for these */
    uint32_t n_out; /* width of a row: n_embd of the models that it fits */
    uint32_t n_embd; /* its own width */
    uint32_t n_layer;
    uint32_t patch; /* pixels of a patch's side */
    uint32_t merge; /* patches of a row's side */
} luce_tower_info;
LUCE_API luce_status luce_tower_get_info(luce_tower *tower, luce_tower_info *out);

/* Encodes one image of rows x columns patches, multiples of `merge`, on n_threads threads (0: as an engine has by default).
 * patches: F32 (rows * columns, 3 * patch * patch), normalised, by channel, y and x; those of one row of the prompt together:
 * merge x merge blocks in raster order, within a block y before x. out: F32 (n), n = rows * columns / merge^2 * n_out.
 *
 * progress may be NULL. E_ARG: more rows than max_rows. E_CANCELLED where progress asked to stop; E_MEMORY; E_NUMERIC where a row
 * is not finite. Threads may encode beside each other; on a GPU one waits for the other. */
LUCE_API luce_status luce_tower_encode(luce_tower *tower, const float *patches, uint32_t rows,
                                       uint32_t columns, uint32_t n_threads, luce_progress_fn progress,
                                       void *progress_user, float *out, uint64_t n);

/* ---- engine: the working memory of a model ------------------------------------------------------ */

/* Counts and then allocates everything that a run needs on the device (E_MEMORY gives needed and free). It builds
 * the graph of every step width, captures it on a GPU, runs it and times it (luce_engine_costs), so that no request
 * waits for a graph. Nothing is allocated on the device afterwards. params may be NULL. */
LUCE_API luce_status luce_engine_open(luce_engine **out, luce_model *model, const luce_engine_params *params);
LUCE_API luce_status luce_engine_close(luce_engine *engine);

typedef struct luce_engine_info {
    uint64_t struct_size;
    uint64_t memory_bytes; /* allocated on the device by this engine's caches and buffers */
    uint32_t n_ctx, n_sequences, n_checkpoints, n_pages, n_rows, n_drafters, n_top, n_chunk,
        n_threads; /* as resolved */
    uint32_t n_cut; /* a prompt may be cut at multiples of so many tokens (luce_sequence_prefill) */
    uint32_t pages_free; /* with those of checkpoints on their way to the host: one waits for them */
    uint32_t sequences_free; /* that may still be opened */
    uint32_t checkpoints_free; /* that may still be on the device, counted in the same way */
    uint32_t n_expert_layers; /* layers whose experts are at home in host memory */
    uint32_t n_experts, n_expert_slots; /* of such a layer; 0 where there is none */
    uint32_t whole_images; /* 1: rows of an image see each other, so no call has a part of them */
} luce_engine_info;
LUCE_API luce_status luce_engine_get_info(luce_engine *engine, luce_engine_info *out);
/* An entry of the engine's list of drafters. E_ARG: there is none of this index. */
LUCE_API luce_status luce_engine_get_drafter(luce_engine *engine, uint32_t index, luce_drafter_info *out);

/* Reads for each expert of n_expert_layers layers, of which each has n_experts, how often rows of steps have had it since the
 * opening (it wraps around; prompts are not counted), and its slot, or -1 where it is read at home. n counts all: E_ARG where it
 * is another number. It lets rounds end. E_DEVICE: a step failed. */
LUCE_API luce_status luce_engine_get_experts(luce_engine *engine, int32_t *counts, int32_t *slots,
                                             uint32_t n);
/* One expert's move into a slot. */
typedef struct luce_expert_move {
    uint32_t layer; /* which of the n_expert_layers, from 0 */
    uint32_t expert; /* of n_experts, one that has no slot */
    uint32_t slot; /* of n_expert_slots */
} luce_expert_move;
/* Gives slots to experts that have none; who had such a slot is read at home then. It lets rounds end and waits for the copies. No
 * bit of any step depends on it. E_ARG: nothing was done. E_DEVICE: each expert that was to move is at home or has its new slot,
 * and who had such a slot is at home. */
LUCE_API luce_status luce_engine_move_experts(luce_engine *engine, const luce_expert_move *moves, uint32_t n);

/* The engine's next prefill, draft or verify does nothing and returns E_CANCELLED; one that is running ends first, which
 * may take a prefill several steps. Any thread and signal handlers may call it, also while the engine works. It sets no last error. */
LUCE_API luce_status luce_engine_cancel(luce_engine *engine);

/* ---- sequence: one timeline ------------------------------------------------------------------- */

/* Opens an empty timeline, which takes no device memory of its own. E_MEMORY when n_sequences are open. */
LUCE_API luce_status luce_sequence_open(luce_sequence **out, luce_engine *engine);
LUCE_API luce_status luce_sequence_close(luce_sequence *sequence);

/* Empties the timeline; this also heals a failed sequence. */
LUCE_API luce_status luce_sequence_reset(luce_sequence *sequence);

typedef struct luce_sequence_info {
    uint64_t struct_size;
    uint32_t n_past; /* committed tokens */
    uint32_t n_verified; /* rows of a verify that is not committed yet, else 0 */
    uint32_t n_pages; /* that it holds, alone or shared */
    int32_t failed; /* 1 after E_NUMERIC, E_DEVICE or E_INTERNAL: only reset, resume and close work */
} luce_sequence_info;
LUCE_API luce_status luce_sequence_get_info(luce_sequence *sequence, luce_sequence_info *out);

typedef struct luce_sampling {
    uint64_t struct_size;
    uint64_t seed;
    float temperature; /* 0: greedy, the lowest id on a tie; >= 0. Below 6e-39 it counts as 6e-39 */
    float top_p; /* (0, 1]; 0 = off (1) */
    float min_p; /* [0, 1); 0 = off */
    int32_t top_k; /* 0 = off; >= 0 */
} luce_sampling;

/* Sets how choices are made after this call (luce_sample is the rule). The default, and NULL, is greedy. */
LUCE_API luce_status luce_sequence_set_sampling(luce_sequence *sequence, const luce_sampling *sampling);

/* Commits the next n tokens of a prompt, 1 <= n <= n_chunk. A prompt that is cut at multiples of the engine's n_cut, wherever
 * that is, has the bits of one that is not cut. Where n_cut is n_chunk, or a prompt is cut elsewhere, the cut decides the last
 * bits of what follows: cut prompts that begin alike at the same places. The end of a prompt past its last multiple of 128
 * positions is computed as the rows of a round are, in a step of its own, where that is sooner: the number of its rows, the
 * model and the device decide it.
 *
 * choice NULL: more of the prompt follows; else it receives the token that is chosen after the last one. E_ARG,
 * E_CONTEXT, E_MEMORY, E_CANCELLED: unchanged. E_NUMERIC, E_DEVICE: failed. */
LUCE_API luce_status luce_sequence_prefill(luce_sequence *sequence, const int32_t *tokens, uint32_t n,
                                           int32_t *choice);

/* Rows of one image among the tokens of a prompt, which may be cut anywhere; but where the model's rows of an image see each
 * other (luce_engine_info: whole_images) one call has all of them, and an image that lies over a multiple of n_cut may have a cut
 * ahead of it or behind it instead. Each row has a name below -1 in the place of a token: rows with one name are taken for the
 * same, so names tell images and their rows apart. An image of height x width rows takes as many tokens, and max(height, width)
 * of RoPE's positions. No row of one is ever looked up, drafted or penalised. */
typedef struct luce_image_span {
    const float *rows; /* (n, n_embd) F32: luce_tower_encode */
    uint32_t at, n; /* the item's tokens at .. at + n - 1 */
    uint32_t first; /* which of the image's rows the first one is */
    uint32_t height, width; /* of the whole image, in rows */
    uint32_t n_embd; /* the model's */
} luce_image_span;

/* A place of a prompt from which text was left out: n positions are skipped ahead of the item's token `at`. RoPE turns that
 * token, and all that follows it, to n positions more; all else counts what is there: the context, pages, a window, the noise of
 * sampling. A recurrent layer has no positions, and sees the tokens that are there in their order. E_ARG: the engine was opened
 * without gaps, they are not in order, the item has images too, or the prompt's positions pass 2^30. */
typedef struct luce_gap {
    uint32_t at; /* one of the item's tokens */
    uint32_t n; /* >= 1 */
} luce_gap;

/* The next tokens of one sequence's prompt, as luce_sequence_prefill takes them. E_UNSUPPORTED: the model takes no images. */
typedef struct luce_prompt_item {
    luce_sequence *sequence; /* each at most once */
    const int32_t *tokens; /* (n) */
    uint32_t n; /* 1..n_chunk */
    int32_t last; /* 1: the prompt ends with them; 0: more of it follows */
    const luce_image_span *images; /* (n_images), in the order of the tokens */
    uint32_t n_images;
    uint32_t n_gaps;
    const luce_gap *gaps; /* (n_gaps), in the order of the tokens */
} luce_prompt_item;

/* Does luce_sequence_prefill of 1..LUCE_MAX_ROWS sequences, with the same bits, and waits, but on GPUs for no step
 * that ends no prompt: the host makes the next one ready while they compute it, and the next call that waits tells its
 * E_DEVICE. They share steps, each of which reads all weights: a step has rows of up to 16 sequences, n_chunk in all, and there
 * may be several. Where the engine's n_cut is n_chunk, rows' bits depend on how many a step has, and each item has steps of its
 * own.
 *
 * choices (n_items) gets the token after each item that is the last of its prompt. status (n_items) says of each item LUCE_OK,
 * or E_NUMERIC where its logits were not finite: its sequence is failed, and its choice is not written. The call then returns
 * E_NUMERIC too.
 *
 * E_ARG, E_CONTEXT, E_MEMORY, E_STATE: nothing was done, and the message names the first item that is to blame: "item 2: ..".
 * E_CANCELLED: nothing was done. E_DEVICE, E_INTERNAL: all sequences of the call are failed. */
LUCE_API luce_status luce_engine_prefill(luce_engine *engine, const luce_prompt_item *items, uint32_t n_items,
                                         int32_t *choices, luce_status *status);

/* Waits for steps of prompts that luce_engine_prefill did not wait for. E_DEVICE: one of them failed, and so did the engine. */
LUCE_API luce_status luce_engine_finish_prompts(luce_engine *engine);

/* The anchor of a round item without tokens, if it is no token. */
enum {
    /* The anchor is what the round ahead chooses: the round that was begun before this one, and is not waited for. Item i
     * is of the sequence of item i there. */
    LUCE_CHOSEN = -1,
    LUCE_DRAFTED =
        -2 /* The anchor is that of the last luce_engine_draft. Its first n - 1 drafts follow it. */
};

/* The rows of one sequence in a round: the anchor and its candidates, LUCE_MAX_ROWS in all of the round's items. A row sees
 * the committed tokens, its ancestors and itself, at position n_past + depth. */
typedef struct luce_round_item {
    luce_sequence *sequence; /* each at most once; not read with LUCE_CHOSEN */
    const int32_t *tokens; /* (n), row 0 the anchor; NULL: [anchor, n - 1 drafts], on the device */
    const int32_t *parents; /* (n) in depth-first order: parents[0] = -1, parents[i] < i; NULL: a chain */
    uint32_t n; /* rows, 1..n_rows */
    int32_t anchor; /* where tokens is NULL: a token, LUCE_CHOSEN or LUCE_DRAFTED */
    uint32_t drafter; /* of the engine's list: who drafts after a token or LUCE_CHOSEN; one in a round */
} luce_round_item;

/* Runs one forward over the rows of several sequences, and waits for it: luce_engine_begin and luce_engine_wait in one. It
 * commits nothing; a sequence's second verify replaces its first.
 *
 * choices (n_rows, item by item) gets the target's token after each row. tokens (n_rows, or NULL) gets the rows' own: -1 for
 * a draft whose logits were not finite. status (n_items) says of each item LUCE_OK, or E_NUMERIC where the target's were
 * not: its sequence is failed, and its choices and tokens are not written. The call then returns E_NUMERIC too.
 *
 * E_ARG (n_rows is another sum than the items', ..), E_CONTEXT (the deepest row would pass n_ctx), E_STATE, E_MEMORY (pages),
 * E_CANCELLED: nothing was done. E_DEVICE, E_INTERNAL: all sequences of the step are failed. */
LUCE_API luce_status luce_engine_verify(luce_engine *engine, const luce_round_item *items, uint32_t n_items,
                                        int32_t *choices, int32_t *tokens, uint32_t n_rows,
                                        luce_status *status);

/* What changes a row's logits before a choice, by the tokens before it. First each bias is added. Then the logit of
 * every token that occurs before is divided by `repetition` where it is positive, and else multiplied by it. Then
 * count * frequency + presence is subtracted from that of every token that was generated `count` times. */
typedef struct luce_logit_bias {
    int32_t token;
    float bias; /* finite */
} luce_logit_bias;
typedef struct luce_penalties {
    uint64_t struct_size;
    const luce_logit_bias *bias; /* n_bias of them; copied */
    uint32_t n_bias;
    uint32_t n_prompt; /* tokens from this position on count as generated */
    float repetition; /* > 0; 0: 1, which is off */
    float presence; /* finite; 0 is off */
    float frequency; /* finite; 0 is off */
} luce_penalties;

/* Sets what luce_sequence_choose does to logits after this call; NULL, the default, is nothing. Prefill and verify
 * choose of the logits as they are. Where it is not NULL, each step brings the logits of the sequence's rows to the host
 * beside its choices, so that luce_sequence_choose does not wait for the device. E_MEMORY: the host has no room. */
LUCE_API luce_status luce_sequence_set_penalties(luce_sequence *sequence, const luce_penalties *penalties);

/* Chooses the token after one row of the engine's last verify, or after its last prefill with a choice (row 0). The
 * sequence's penalties count the tokens before it: committed ones and the row's path. The mask says which tokens are
 * allowed: token i where bit i % 8 of byte i / 8 is set, and none beyond mask_size bytes; NULL allows all.
 *
 * Walk from row 0 to the child whose token was chosen, and on: a row that is not accepted needs no mask. E_ARG where the
 * mask allows none, E_STATE when the engine has run another step since, or the rows are committed: nothing was done. */
LUCE_API luce_status luce_sequence_choose(luce_sequence *sequence, uint32_t row, const uint8_t *mask,
                                          uint64_t mask_size, int32_t *token);

/* The accept rule: from row 0 step to the child whose token equals choices[row]; stop where there is none. parents
 * NULL: a chain. path has room for n rows; *next is the choice after the last accepted row: the new anchor. */
LUCE_API luce_status luce_accept(const int32_t *tokens, const int32_t *parents, const int32_t *choices,
                                 uint32_t n, int32_t *path, uint32_t *n_path, int32_t *next);

/* Appends rows path[0] = 0, path[1], ... of the last verify, each the child of the one before. Bookkeeping on the
 * host: what has to move on the device is done at the start of the sequence's next step. */
LUCE_API luce_status luce_sequence_commit(luce_sequence *sequence, const int32_t *path, uint32_t n);

/* Reads the F32 logits of one row; n must be n_vocab. It is a row of the engine's last verify, row 0 of its last
 * prefill with a choice (the prompt's last token), or row i of its last drafted block: the drafter's for the token at
 * the anchor's position + i, or where a block drafts as many tokens as it has rows, behind that; without what the draft before
 * adds to them, and -1e30 where it lacks a token. E_STATE when the engine has run another step since. */
LUCE_API luce_status luce_sequence_get_logits(luce_sequence *sequence, uint32_t row, float *out, uint32_t n);

/* ---- rounds: begun here, waited for later ------------------------------------------------------- */

/* A round is a verify, with the drafts that it asks for, that is begun by one call and waited for by another: so the device
 * works while the host does something else. Two may be begun at once, of which the second goes on from the first. */

/* Begins a round of the items' sequences, and does not wait for the device: it drafts what is to be drafted, and verifies
 * all rows. The results of earlier rounds are dropped, and may be where it fails.
 *
 * With LUCE_CHOSEN, in all items or none, it goes on from the round ahead, the only one that was not waited for: of each
 * sequence it commits the rows that the choices accept (luce_accept). Where both rounds have one row of each sequence it
 * is on the device at once; else the wait for the round ahead begins it, or drops it.
 *
 * E_ARG, E_CONTEXT, E_STATE (no round is ahead, it failed, one follows it, or a sequence of it was closed or lost its row),
 * E_MEMORY, E_CANCELLED: nothing was done, all sequences are as they were. E_DEVICE, E_INTERNAL: all sequences of the round
 * are failed, and nothing is to be waited for but the round ahead. */
LUCE_API luce_status luce_engine_begin(luce_engine *engine, const luce_round_item *items, uint32_t n_items);

/* Waits for the oldest round, and gives its results as luce_engine_verify does. E_NUMERIC is also the result of the round
 * that is behind it on the device. *left (or NULL) gets the number of rounds that can be waited for after it: 0 or 1.
 *
 * A round that this wait is to begin is dropped after any error, and where a draft's logits were not finite, pages or the
 * context run out, a sequence was closed or has penalties, a cancel is due, or a call has rejected its rows: nothing of it
 * was done. Once it has begun, its errors are those of its own wait.
 *
 * E_DEVICE, E_INTERNAL: all sequences of the round are failed, and only *left is written. E_STATE: there is no round.
 * E_ARG: it has other rows or items, and can be waited for again. In both nothing is written.
 *
 * Until a round is waited for, other calls on the engine, its sequences and checkpoints let it end first, and its results
 * stay. Lookups, infos, saves and closing a sequence leave it alone. */
LUCE_API luce_status luce_engine_wait(luce_engine *engine, int32_t *choices, int32_t *tokens, uint32_t n_rows,
                                      luce_status *status, uint32_t n_items, uint32_t *left);

/* Drafts n tokens for each of several sequences, all with one drafter of the engine's list: n links of a chain, or the
 * first n of a block. The drafts stay on the device, for a round of LUCE_DRAFTED. Nothing committed is changed; rows that
 * are verified and not committed are rejected. */
typedef struct luce_draft_item {
    luce_sequence *sequence; /* with at least one committed token */
    int32_t anchor;
    uint32_t n; /* drafts: 1..n_draft of the drafter */
} luce_draft_item;
/* It does not wait for the device. E_CONTEXT when n_past + n would reach n_ctx (a verify of them has a row more),
 * E_ARG: there is no such drafter, E_MEMORY when pages run out: then nothing was done. E_DEVICE,
 * E_INTERNAL: a step failed, and its sequences are failed; others have their drafts, or are as they were. */
LUCE_API luce_status luce_engine_draft(luce_engine *engine, uint32_t drafter, const luce_draft_item *items,
                                       uint32_t n_items);

/* Reads the n tokens of the last draft. It waits for the device only where no verify has done so since. A draft
 * whose logits were not finite is E_NUMERIC; the sequence is not failed by it. */
LUCE_API luce_status luce_sequence_get_draft(luce_sequence *sequence, int32_t *tokens, uint32_t n);

/* A drafter's candidates after the anchor, depth by depth. In the forms LUCE_FORM_CHAIN and LUCE_FORM_INDEPENDENT a depth has
 * one list, best first, of which an id < 0 or a score of -inf is the end. With LUCE_FORM_CONDITIONAL a depth has k candidates
 * in any order, and a list behind each candidate of the depth above: scores[d][a][b] is that of candidate b behind candidate
 * a, and -inf where it is none. At depth 0 a is 0, the anchor. */
typedef struct luce_lists {
    uint64_t struct_size;
    int32_t *ids; /* (depth, k) */
    float *scores; /* (depth, k), or conditional (depth, k, k) */
    uint32_t depth, k;
    int32_t form; /* luce_form */
} luce_lists;
/* Reads the candidates of the last draft's first lists->depth tokens into lists->ids and lists->scores; its form is that of the
 * drafter, and k at most n_top, or conditional luce_drafter_info.n_list. Scores are log-probabilities: over the whole
 * vocabulary, with ties in the order of ids, or conditional over the k. A sequence that samples has log-probability and
 * noise, within its filters, and unless conditional the draft first. A confidence head says how likely a draft behind a
 * candidate is right: where the drafter has one, the logarithm of that is added to the candidate's list, and the list is all
 * -inf where it is below 0.05. It waits for the device and fails as get_draft does; E_ARG: the last draft has other lists, or
 * n_top is 0. */
LUCE_API luce_status luce_sequence_get_lists(luce_sequence *sequence, const luce_lists *lists);

/* Drafts what followed where the text stood before: the committed tokens, then `anchor`. Earlier positions match where
 * their last four tokens are those at the end. The newest 32 are compared, over 256 tokens at most. The longest match
 * is taken, of equal ones the newest; *matched is its length, 0 where there is none.
 *
 * What followed it goes to `draft`; where that reaches the end of the text, it goes on with draft itself. *n: in, the most
 * tokens; out, how many, 0 or all. The first call indexes all tokens. It waits for no device. */
LUCE_API luce_status luce_sequence_lookup(luce_sequence *sequence, int32_t anchor, int32_t *draft,
                                          uint32_t *n, uint32_t *matched);

/* The draft tree makes rows for luce_engine_begin. A drafter has a list for each depth, of which `budget` nodes are taken,
 * best first by the sum of scores along their path. A node comes after its parent and its better siblings; ties go to the
 * lexicographically smaller path of ranks.
 *
 * tokens, parents: room for 1 + budget <= LUCE_MAX_ROWS rows, of which *n are written, depth first, the anchor first.
 * E_ARG; E_NUMERIC where a score is NaN. */
LUCE_API luce_status luce_tree(int32_t anchor, const luce_lists *lists, uint32_t budget, int32_t *tokens,
                               int32_t *parents, uint32_t *n);

/* What a step costs over a short context: the time from its begin to its choices on the host, at the opening. */
typedef struct luce_cost {
    uint32_t rows; /* of the step, or its sequences */
    /* 0: a verify of `rows` rows; 1 + i: one more draft, or a block, of drafter i of the engine's list for each of `rows`
     * sequences; 1 + n_drafters: what drafters are fed, before they draft, of `rows` rows that were verified in steps of
     * one row each */
    uint32_t step;
    float seconds;
} luce_cost;
/* The costs come in the order of `step`, then of rows, for each number of rows from 1 to the most that a step can have.
 * out NULL: *n becomes the number of entries; else *n entries at most are written and counted. */
LUCE_API luce_status luce_engine_costs(luce_engine *engine, luce_cost *out, uint32_t *n);

/* ---- checkpoint: where sequences start --------------------------------------------------------- */

/* Keeps the sequence's present position, where n_past is a multiple of n_cut, or of LUCE_PAGE where that is no multiple of
 * n_cut, and nothing but prefill brought it there, in parts that began at such multiples, or where whole_images lets a prompt be
 * cut (E_STATE otherwise). A prompt that is resumed there gives the bits of a cold one; where n_cut is n_chunk, of one that is
 * cut at the same places, this one among them.
 *
 * Pages are shared, and the recurrent state and a page that has begun are copied on the device: no call waits. E_MEMORY when
 * n_checkpoints are on the device, or no page is free for the copy. */
LUCE_API luce_status luce_checkpoint_make(luce_checkpoint **out, luce_sequence *sequence);
LUCE_API luce_status luce_checkpoint_close(luce_checkpoint *checkpoint);

typedef struct luce_checkpoint_info {
    uint64_t struct_size;
    uint64_t size_bytes; /* of luce_checkpoint_save */
    uint32_t n_past;
    int32_t on_device;
} luce_checkpoint_info;
/* Also copies the n committed tokens to `tokens`; n must be n_past. tokens NULL: only the facts. */
LUCE_API luce_status luce_checkpoint_get_info(luce_checkpoint *checkpoint, luce_checkpoint_info *out,
                                              int32_t *tokens, uint32_t n);

/* Moves a checkpoint to host memory (on_device 0; pinned on a GPU) or to the device (1). The copy runs beside the
 * engine's steps; what needs its result waits for it. To the device: E_MEMORY when pages or slots lack. To the host: E_MEMORY
 * when the host lacks memory; where the copy fails later, the checkpoint is lost, and each call on it says so with E_STATE. */
LUCE_API luce_status luce_checkpoint_move(luce_checkpoint *checkpoint, int32_t on_device);

/* Write a checkpoint as bytes, and load it, into host memory, in any engine of the same model, kv_type, n_cut and
 * kinds of drafters, of the same build of luce on the same kind of device with the same libraries: elsewhere a prompt has
 * other last bits. The bytes carry all of this, a version and a checksum: E_ARG names what does not fit.
 *
 * data NULL: only the size. A save keeps the engine waiting for 2 MiB at a time; E_STATE: it was closed meanwhile. */
LUCE_API luce_status luce_checkpoint_save(luce_checkpoint *checkpoint, void *data, uint64_t *size);
LUCE_API luce_status luce_checkpoint_load(luce_checkpoint **out, luce_engine *engine, const void *data,
                                          uint64_t size);

/* Puts the sequence at the checkpoint's position; this also heals a failed one. From the device only the recurrent
 * state and a page that has begun are copied, and other KV pages are shared; from the host all of it is copied. E_CONTEXT
 * when n_ctx is too small for another step, E_MEMORY when pages lack: the sequence is unchanged. */
LUCE_API luce_status luce_sequence_resume(luce_sequence *sequence, luce_checkpoint *checkpoint);

/* ---- pure functions on host arrays -------------------------------------------------------------- */

/* Chooses the token at `position`. With z = (logit - largest) / temperature it keeps the first top_k in the order
 * (logit descending, id ascending), of these the fewest first ones whose probabilities reach top_p, and of these the
 * ones at least min_p times as probable as the first. The token is the kept id with the largest z + G, the lowest on a tie.
 *
 * G = -log(-log(u)), u = (x + 1/2) / 2^32, and x is word id % 4 of Philox4x32-10(key = seed, counter = (position, id / 4)):
 * an exact sample of the renormalised softmax (Gumbel-max). Probabilities are integers of 2^-40 of the largest; z and G are
 * F32 with luce's own exp and log. So the CPU and a GPU choose alike of the same logits.
 *
 * A logit of -inf is never chosen. E_NUMERIC when one is NaN or +inf, or all are -inf. */
LUCE_API luce_status luce_sample(const float *logits, uint32_t n, const luce_sampling *sampling,
                                 uint64_t position, int32_t *token);

typedef struct luce_type_info {
    uint64_t struct_size;
    char name[16]; /* "Q4_K" */
    uint32_t block_size; /* weights per block: a row's length must be a multiple of it */
    uint32_t type_size; /* bytes per block */
    int32_t is_weight; /* luce multiplies with it on every device */
} luce_type_info;
/* E_ARG for an id that ggml does not have. */
LUCE_API luce_status luce_type_get(int32_t type, luce_type_info *out);

/* Quantises F32 rows (n_rows x n_per_row, row-major) to `type`, with a uniform importance matrix for types that want one.
 * dst_size must be exactly the result's size in bytes. */
LUCE_API luce_status luce_quantize(int32_t type, const float *src, uint64_t n_rows, uint64_t n_per_row,
                                   void *dst, uint64_t dst_size);

/* ---- inspection: for tests and `luce doctor` ------------------------------------------------------- */

typedef struct luce_array {
    void *data;
    uint64_t ne[LUCE_MAX_DIMS]; /* the fastest dimension comes first */
    int32_t type; /* ggml's id: 0 is F32, 24 I8, 26 I32, else a type of KV or of weights */
} luce_array;

/* Runs one of luce's own ops alone, on host arrays. Argument i is read from args[i].data and, where the op writes to it,
 * copied back; null data says that it is left out. out is what the result holds before the op, and then the result. The
 * rows in native/src/ops say which arguments and params there are, and so does E_ARG. E_UNSUPPORTED: the device has
 * no such op. Names, arguments and params promise nothing: they change with the kernels. */
LUCE_API luce_status luce_op_run(const char *device, const char *op, luce_array *args, uint32_t n_args,
                                 const int32_t *params, uint32_t n_params, luce_array *out);

/* Reads the F32 hidden state of one row of the engine's last verify, after the output norm: what the logits are a product
 * of. n must be n_embd. It waits for the device. E_STATE when the engine has run another step since. */
LUCE_API luce_status luce_sequence_get_hidden(luce_sequence *sequence, uint32_t row, float *out, uint32_t n);

/* Reads how much of the attention of the engine's last verify, whose rows are this sequence's, each position had. In every
 * head h of the layers l that see all positions, a row's softmax gives the positions that it sees shares, which add up to 1;
 * s(l, h, p) is the mean of position p's over the rows. out[p] is the mean of the n_best largest of s(.., .., p), of all where
 * n_best is 0. out is F32 (n). Behind the positions that were committed come the verify's own rows, in their order: there are
 * n_past of them, with rows that are not committed yet n_past + n_verified.
 *
 * It waits for the device. E_ARG: n, or the engine was opened without scores. E_STATE when the engine has run another step
 * since, or its last step was no verify. */
LUCE_API luce_status luce_sequence_get_scores(luce_sequence *sequence, uint32_t n_best, float *out,
                                              uint32_t n);

/* Writes the committed state as bytes, for tests and inspection: KV, recurrent state, the drafters' KV, the hidden
 * state, tokens. Sequences with the same committed tokens give the same bytes, however their rounds went. data NULL:
 * only the size; else *size bytes are there. Rows that are verified and not committed are rejected. */
LUCE_API luce_status luce_sequence_dump(luce_sequence *sequence, void *data, uint64_t *size);

#ifdef __cplusplus
}
#endif
#endif
