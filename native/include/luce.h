/* luce: exact speculative decoding of Qwen3.5/3.6 GGUF models. The whole C ABI.
 *
 * The model of the thing
 *   file     an opened GGUF (all parts of a split one), memory-mapped: facts, no weights loaded
 *   model    weights on one device; immutable, may be shared by any number of sessions
 *   session  one timeline: a committed prefix of tokens in the caches, bound to one model
 *
 * The round (one loop serves every decoding mode)
 *   state: `committed` tokens in the caches, and one `anchor` token, chosen but not yet in them.
 *   1 verify  one forward over [anchor, candidates]; committed state is not changed
 *   2 accept  walk from the anchor to the child whose token is the target's own choice, and on
 *   3 commit  append the accepted rows to every cache; rejected rows leave no trace
 *   Plain decoding is a round without candidates.
 *
 * Conventions
 * - Every function returns a luce_status unless stated; results go to out-parameters, which are
 *   written on LUCE_OK only. luce_last_error() explains the last failure of the calling thread.
 * - Handles are opaque and checked: a null, closed or wrong handle is LUCE_E_ARG, never a crash.
 *   Close children in any order: a session keeps its model alive, a model its file's mapping.
 * - Structs begin with `struct_size`, set by the caller to sizeof(struct); a size this library does
 *   not know is LUCE_E_ARG. In option structs 0 means "the default" for every field.
 * - Text is UTF-8. Strings handed out live as long as the handle they came from.
 * - One call at a time on a session. Different sessions may run on different threads.
 * - The library prints nothing, reads no files but those named, and never exits the process.
 */
#ifndef LUCE_H
#define LUCE_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define LUCE_API __declspec(dllexport)
#else
#define LUCE_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define LUCE_ABI_VERSION 2 /* changes whenever a struct or a signature does */
#define LUCE_MAX_ROWS 64   /* rows of one verify step: the anchor and up to 63 candidates */
#define LUCE_MAX_DRAFT 8 /* drafts of a NextN chain */
#define LUCE_MAX_DIMS 4

typedef enum luce_status {
    LUCE_OK = 0,
    LUCE_E_ARG = 1,         /* an argument is out of range; nothing was done */
    LUCE_E_FILE = 2,        /* a file cannot be read or is malformed */
    LUCE_E_UNSUPPORTED = 3, /* the file is well-formed, but luce cannot run it */
    LUCE_E_MEMORY = 4,      /* not enough memory; the message gives needed and free */
    LUCE_E_CONTEXT = 5,     /* the request does not fit into the session's context */
    LUCE_E_NUMERIC = 6,     /* non-finite logits; the session is now failed */
    LUCE_E_STATE = 7,       /* the session is failed, or the call is out of order */
    LUCE_E_CANCELLED = 8,   /* a progress callback asked to stop */
    LUCE_E_DEVICE = 9,      /* the device or its driver failed */
    LUCE_E_INTERNAL = 10    /* a defect of luce */
} luce_status;

typedef struct luce_file luce_file;
typedef struct luce_model luce_model;
typedef struct luce_session luce_session;

/* ---- library ------------------------------------------------------------------------------- */

/* LUCE_ABI_VERSION of the loaded library; compare it before anything else. */
LUCE_API int32_t luce_abi_version(void);

/* For people: "0.1.0 (ggml 0.25.3, cuda)"; static storage. */
LUCE_API const char *luce_version(void);

/* Message of the calling thread's last failed call, one line; valid until its next failing call. */
LUCE_API const char *luce_last_error(void);

/* level: 0 debug, 1 info, 2 warning, 3 error. Called from any thread. fn NULL: discard (default). */
typedef void (*luce_log_fn)(int32_t level, const char *text, void *user);
LUCE_API luce_status luce_set_log(luce_log_fn fn, void *user);

typedef struct luce_device_info {
    uint64_t struct_size;
    char name[32];         /* "cpu", "cuda:0", ...: what luce_model_params.device takes */
    char description[128]; /* "NVIDIA H100 80GB HBM3" */
    uint64_t memory_free;  /* bytes, now */
    uint64_t memory_total; /* bytes */
    int32_t is_gpu;
} luce_device_info;

/* Number of devices; index 0 is what `auto` takes (a CUDA device if there is one, else the CPU). */
LUCE_API luce_status luce_device_count(int32_t *count);
LUCE_API luce_status luce_device_get(int32_t index, luce_device_info *out);

/* ---- file: what a GGUF says ------------------------------------------------------------------ */

/* Maps `path`, and for `x-00001-of-0000N.gguf` all N parts, and checks all of the structure: header,
 * every key, every tensor's type, shape, offset and extent against the file's size. GGUF v2 and v3,
 * little-endian. E_FILE names the file, the byte offset and what was found there. */
LUCE_API luce_status luce_file_open(luce_file **out, const char *path);
LUCE_API luce_status luce_file_close(luce_file *file);

typedef struct luce_file_info {
    uint64_t struct_size;
    uint64_t size_bytes; /* all parts */
    uint64_t n_kv;       /* keys of the first part */
    uint64_t n_tensors;  /* all parts */
    uint32_t version;    /* 2 or 3 */
    uint32_t n_parts;
} luce_file_info;
LUCE_API luce_status luce_file_get_info(luce_file *file, luce_file_info *out);

/* One key. type and elem_type are GGUF's value types (0 u8, 1 i8, 2 u16, 3 i16, 4 u32, 5 i32, 6 f32,
 * 7 bool, 8 string, 9 array, 10 u64, 11 i64, 12 f64). `data` points into the mapping, unaligned:
 * the value of a scalar; the `count` bytes of a string (not terminated); the `count` packed elements
 * of an array (for strings: use luce_file_get_strings). count is 1 for a scalar. */
typedef struct luce_kv {
    uint64_t struct_size;
    const char *name; /* NUL-terminated, lives as long as the file */
    const void *data;
    uint64_t count;
    int32_t type;
    int32_t elem_type; /* of an array, else = type */
} luce_kv;
LUCE_API luce_status luce_file_get_kv(luce_file *file, uint64_t index, luce_kv *out);

/* The strings of array key `index`: pointers into the mapping and lengths in bytes, not terminated;
 * both arrays hold luce_kv.count entries and belong to the caller. */
LUCE_API luce_status luce_file_get_strings(luce_file *file, uint64_t index, const char **data,
                                           uint64_t *lengths);

typedef struct luce_tensor_info {
    uint64_t struct_size;
    const char *name;          /* NUL-terminated, lives as long as the file */
    const char *type_name;     /* "Q4_K", ... */
    const void *data;          /* in the mapping; size_bytes of them */
    uint64_t ne[LUCE_MAX_DIMS]; /* ggml order, fastest first; 1 from n_dims on */
    uint64_t size_bytes;
    int32_t type;              /* ggml type id */
    uint32_t n_dims;
} luce_tensor_info;
LUCE_API luce_status luce_file_get_tensor(luce_file *file, uint64_t index, luce_tensor_info *out);

/* ---- model: weights on a device --------------------------------------------------------------- */

/* Called with the part done in 0..1; return non-zero to cancel (LUCE_E_CANCELLED). */
typedef int32_t (*luce_progress_fn)(float fraction, void *user);

typedef struct luce_model_params {
    uint64_t struct_size;
    const char *device; /* "auto" (= NULL), "cpu", "cuda", "cuda:N" */
    luce_file *head;    /* take the NextN head from this file: the model's own, or another that holds the
                           head alone or beside a trunk; NULL: no head. It must fit the trunk: E_FILE names
                           both values */
    luce_progress_fn progress; /* may be NULL */
    void *progress_user;
} luce_model_params;

typedef struct luce_sampling {
    uint64_t struct_size;
    uint64_t seed;
    float temperature; /* 0: greedy, the lowest id on a tie; >= 0 */
    float top_p;       /* (0, 1]; 0 = off (1) */
    float min_p;       /* [0, 1); 0 = off */
    int32_t top_k;     /* 0 = off; >= 0 */
} luce_sampling;

typedef struct luce_session_params {
    uint64_t struct_size;
    uint32_t n_ctx;     /* positions; 0: the model's training context, at most 4096 */
    uint32_t n_rows;    /* most rows of a verify step, 1..LUCE_MAX_ROWS; 0: 1 */
    uint32_t n_chunk;   /* prefill rows per step, 1..4096; 0: 512 */
    uint32_t n_draft;   /* most drafts of a round, 0..LUCE_MAX_DRAFT; needs a model with a head, and
                           n_rows > n_draft */
    uint32_t n_threads; /* CPU only; 0: one per core, at most 16 */
    const char *kv_type; /* "f16" (= NULL), "q8_0", "q4_0", "f32" */
} luce_session_params;

typedef struct luce_memory {
    uint64_t struct_size;
    uint64_t weights; /* bytes on the device; on the CPU they are mapped, not allocated */
    uint64_t kv;      /* attention KV */
    uint64_t state;   /* recurrent state and draft log */
    uint64_t compute; /* activations, inputs, outputs */
    uint64_t total;   /* what a new model and session together allocate on the device */
    uint64_t device_free;
} luce_memory;

/* What a model and one session of it would need, from the file alone: nothing is loaded or allocated
 * on the device. Runs every check that luce_model_open makes, so it also answers "can luce run this
 * file": E_UNSUPPORTED names the reason; E_FILE a missing key or a tensor's expected and found shape. */
LUCE_API luce_status luce_plan_memory(luce_file *file, const luce_model_params *model,
                                      const luce_session_params *session, luce_memory *out);

/* Loads the weights. CPU: uses them in the mapping. CUDA: uploads with progress. E_MEMORY before
 * anything is allocated when the weights do not fit. params may be NULL. */
LUCE_API luce_status luce_model_open(luce_model **out, luce_file *file, const luce_model_params *params);
LUCE_API luce_status luce_model_close(luce_model *model);

typedef struct luce_model_info {
    uint64_t struct_size;
    char architecture[32]; /* "qwen35" */
    char device[32];       /* "cpu", "cuda:0" */
    uint64_t n_params;     /* weights, all tensors */
    uint64_t weight_bytes;
    uint32_t n_vocab;
    uint32_t n_embd;
    uint32_t n_layer;     /* trunk blocks */
    uint32_t n_nextn;     /* NextN blocks in the file */
    uint32_t n_ctx_train; /* context_length of the file */
    int32_t has_head;     /* a NextN head is loaded: sessions may draft */
} luce_model_info;
LUCE_API luce_status luce_model_get_info(luce_model *model, luce_model_info *out);

/* ---- session: one timeline -------------------------------------------------------------------- */

/* Allocates every cache and the largest step's buffers, after comparing the need with what is free
 * (E_MEMORY gives both). Nothing is allocated on the device afterwards. params may be NULL. */
LUCE_API luce_status luce_session_open(luce_session **out, luce_model *model,
                                       const luce_session_params *params);
LUCE_API luce_status luce_session_close(luce_session *session);

/* Back to an empty timeline; also heals a failed session. */
LUCE_API luce_status luce_session_reset(luce_session *session);

typedef struct luce_session_info {
    uint64_t struct_size;
    uint64_t memory_bytes; /* allocated on the device by this session */
    uint32_t n_ctx, n_rows, n_chunk, n_threads, n_draft; /* as resolved */
    uint32_t n_past;       /* committed tokens */
    uint32_t n_verified;   /* rows of a verify that is not committed yet, else 0 */
    int32_t failed;        /* 1 after E_NUMERIC, E_DEVICE or E_INTERNAL: only reset and close work */
} luce_session_info;
LUCE_API luce_status luce_session_get_info(luce_session *session, luce_session_info *out);

/* How choices are made from now on (luce_sample is the rule). Default: greedy. NULL: greedy. */
LUCE_API luce_status luce_session_set_sampling(luce_session *session, const luce_sampling *sampling);

/* Commits `n` >= 1 tokens in chunks that end at multiples of n_chunk (so the result does not depend on
 * how a prompt is split into calls, as long as splits are at such multiples), and chooses the next
 * token (choice may be NULL). E_CONTEXT, E_ARG: unchanged. E_NUMERIC, E_DEVICE: failed. */
LUCE_API luce_status luce_session_prefill(luce_session *session, const int32_t *tokens, uint32_t n,
                                          int32_t *choice);

/* Drafts n tokens (1..n_draft) after `anchor` with the NextN head, chained on its own hidden state. First
 * it brings the head's KV up to date with what was committed, from the target's own hidden states. The
 * drafts stay on the device, for luce_session_verify(tokens = NULL); nothing committed is changed. Needs
 * at least one committed token. E_CONTEXT when n_past + n would pass n_ctx; E_STATE without a head. */
LUCE_API luce_status luce_session_draft(luce_session *session, int32_t anchor, uint32_t n);

/* The n tokens of the last draft; waits for the device only where no verify has done so since. A draft
 * whose logits were not finite is E_NUMERIC; the session is not failed by it. */
LUCE_API luce_status luce_session_get_draft(luce_session *session, int32_t *tokens, uint32_t n);

/* One forward over n rows, 1 <= n <= n_rows. Row 0 is the anchor (parents[0] = -1); row i > 0 follows
 * row parents[i] < i, in depth-first order; it sees the committed tokens, its ancestors and itself,
 * at position n_past + depth. tokens NULL: the last draft's anchor and its first n - 1 drafts, without a
 * copy to the host in between. parents NULL: a chain. choices[i]: the target's token after row i.
 * A row's results are bit-identical whatever the other rows are (CPU). Committed state is unchanged;
 * a second verify replaces the first. E_CONTEXT when the deepest row would pass n_ctx. */
LUCE_API luce_status luce_session_verify(luce_session *session, const int32_t *tokens, const int32_t *parents,
                                         uint32_t n, int32_t *choices);

/* Appends rows path[0] = 0, path[1], ... of the last verify, each the child of the one before. */
LUCE_API luce_status luce_session_commit(luce_session *session, const int32_t *path, uint32_t n);

/* Logits of one row of the last verify (or row 0: the last token of the last prefill), F32,
 * n must be n_vocab. */
LUCE_API luce_status luce_session_get_logits(luce_session *session, uint32_t row, float *out, uint32_t n);

/* The committed state as bytes: KV, recurrent state, the head's KV and hidden state, tokens. Two sessions
 * with the same committed tokens save the same bytes, however their rounds went. data NULL: only the size.
 * Recurrent state cannot be rewound: to come back to a position, save there. Rows that are verified and not
 * committed are dropped. A session without a head saves none. */
LUCE_API luce_status luce_session_save(luce_session *session, void *data, uint64_t *size);

/* The session as it was when it saved, in this or another session of the same model with the same kv_type,
 * a context that is large enough, and a head if it had one. E_ARG names what does not fit; the session is
 * then unchanged. A session with a head restores only what was saved with one. */
LUCE_API luce_status luce_session_restore(luce_session *session, const void *data, uint64_t size);

/* ---- pure functions on host arrays -------------------------------------------------------------- */

/* The sampling rule. position: of the token to be chosen. logits / temperature, top-k, softmax, top-p
 * (smallest set reaching p), min-p (relative to the largest), renormalise; candidates by probability,
 * then lower id; inverse CDF at u = first word of Philox4x32-10(key = seed, counter = position) / 2^32,
 * all in F32. E_NUMERIC when a logit is not finite. */
LUCE_API luce_status luce_sample(const float *logits, uint32_t n, const luce_sampling *sampling,
                                 uint64_t position, int32_t *token);

/* The accept rule: from row 0 step to the child whose token equals choices[row]; stop where there is
 * none. parents NULL: a chain. path holds up to n rows; *next is the choice after the last accepted row: the new anchor. */
LUCE_API luce_status luce_accept(const int32_t *tokens, const int32_t *parents, const int32_t *choices,
                                 uint32_t n, int32_t *path, uint32_t *n_path, int32_t *next);

typedef struct luce_type_info {
    uint64_t struct_size;
    char name[16];       /* "Q4_K" */
    uint32_t block_size; /* weights per block: a row's length must be a multiple of it */
    uint32_t type_size;  /* bytes per block */
    int32_t is_weight;   /* luce multiplies with it on every device */
} luce_type_info;
/* E_ARG for an id that ggml does not have. */
LUCE_API luce_status luce_type_get(int32_t type, luce_type_info *out);

/* F32 rows (n_rows x n_per_row, row-major) to `type`; dst_size must be exactly the result's size.
 * Types that want an importance matrix get a uniform one. */
LUCE_API luce_status luce_quantize(int32_t type, const float *src, uint64_t n_rows, uint64_t n_per_row,
                                   void *dst, uint64_t dst_size);

/* Runs one of luce's own ops alone, for tests: argument i is read from args[i].data and, where the op
 * writes to it, copied back; the result goes to `out`. Names, arguments and params: custom_op.h. */
typedef struct luce_array {
    void *data;
    uint64_t ne[LUCE_MAX_DIMS]; /* fastest first */
    int32_t type;               /* ggml type id: 0 F32, 1 F16, 26 I32 */
} luce_array;
LUCE_API luce_status luce_op_run(const char *device, const char *op, luce_array *args, uint32_t n_args,
                                 const int32_t *params, uint32_t n_params, luce_array *out);

#ifdef __cplusplus
}
#endif
#endif
