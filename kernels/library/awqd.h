// libawqd: awqd's kernels in the caller's process and on the caller's stream. C11 and C++.
//
// A device computes. A weight is a linear [K, N] (in features, out features) in the device's memory,
// from a checkpoint or from tensors. Products enqueue kernels on a stream of the caller. They allocate
// nothing, start no thread, do not wait for the device, and can be captured in a CUDA graph. On a CPU
// a call returns when its work is done; the device's threads, which awqd_device_open starts, help.
//
// Matrices are row-major and dense. On a GPU, all pointers to their elements, to workspaces, biases
// and scales are addresses of the device's memory.
//
// Functions that can fail return AWQD_OK or another awqd_code, and awqd_error_message() then says
// why. A structure begins with its own size, which tells its version: AWQD_INIT sets it, and makes
// everything else zero. Every function may be called by several threads at a time, except a function
// that ends an object that another call uses.
#ifndef AWQD_H_
#define AWQD_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define AWQD_API __attribute__((visibility("default")))
#else
#define AWQD_API
#endif

// The version of this header. A library serves programs that were compiled with the same one.
#define AWQD_ABI_VERSION 1
AWQD_API uint32_t awqd_abi_version(void);
AWQD_API const char* awqd_version(void);  // of the library, "0.1.0"

// Sets the size of a structure, and every other member to zero: awqd_matmul_args a = AWQD_INIT(a);
#ifdef __cplusplus
// clang-format off
#define AWQD_INIT(structure) {sizeof(structure)}
#else
#define AWQD_INIT(structure) {.size = sizeof(structure)}
#endif
// clang-format on

// --- Errors ---

// With the numbers of google.rpc.Code.
typedef enum awqd_code {
  AWQD_OK = 0,
  AWQD_INVALID_ARGUMENT = 3,
  AWQD_NOT_FOUND = 5,
  AWQD_PERMISSION_DENIED = 7,
  AWQD_RESOURCE_EXHAUSTED = 8,
  AWQD_FAILED_PRECONDITION = 9,
  AWQD_UNIMPLEMENTED = 12,
  AWQD_INTERNAL = 13,
  AWQD_UNAVAILABLE = 14,
  AWQD_UNAUTHENTICATED = 16
} awqd_code;

// Why the last call of this thread that failed did so; "" before the first. Never NULL, and valid
// until the next call of this thread.
AWQD_API const char* awqd_error_message(void);

// --- Devices ---

typedef struct awqd_device awqd_device;

typedef struct awqd_device_options {
  size_t size;
  int64_t memory_budget;    // bytes of device memory for weights; 0: no limit
  int32_t cpu_threads;      // 0: as many as the process may use
  int32_t batch_invariant;  // not 0: a token's result has the same bits whatever M is
} awqd_device_options;

// `name`: "cpu", "cuda:N", or "auto": cuda:0 where a GPU can be used, else the CPU. `options` may be
// NULL. INVALID_ARGUMENT for another name, FAILED_PRECONDITION where that device cannot be used.
AWQD_API int awqd_device_open(const char* name, const awqd_device_options* options,
                              awqd_device** device);
// Weights keep what they need of the device. NULL is allowed.
AWQD_API void awqd_device_close(awqd_device* device);
// "cpu", "cuda:0"; valid as long as the device.
AWQD_API const char* awqd_device_name(const awqd_device* device);

// --- Checkpoints ---

typedef struct awqd_checkpoint awqd_checkpoint;

// `path`: a folder as it is downloaded, a .gguf file, a .safetensors file of ComfyUI, a model's
// folder in a Hub cache, or the "ORG/NAME" of one in the user's cache. Reads settings and headers.
// NOT_FOUND, PERMISSION_DENIED, UNIMPLEMENTED for a format that is not read, INVALID_ARGUMENT for
// files that are wrong.
AWQD_API int awqd_checkpoint_open(const char* path, awqd_checkpoint** checkpoint);
AWQD_API void awqd_checkpoint_close(awqd_checkpoint* checkpoint);
// The paths of its quantised linears, "model.layers.0.mlp.up_proj". NULL for an index that is not
// below the number; valid as long as the checkpoint.
AWQD_API size_t awqd_checkpoint_linears(const awqd_checkpoint* checkpoint);
AWQD_API const char* awqd_checkpoint_linear(const awqd_checkpoint* checkpoint, size_t index);

// --- Weights ---

typedef struct awqd_weight awqd_weight;

// Reads one linear and packs it for the device. Blocks. NOT_FOUND without such a linear,
// INVALID_ARGUMENT for tensors that are wrong, UNIMPLEMENTED without a kernel for it,
// RESOURCE_EXHAUSTED without room.
AWQD_API int awqd_weight_load(awqd_device* device, const awqd_checkpoint* checkpoint,
                              const char* linear, awqd_weight** weight);

// A tensor of a linear in host memory, read during the call alone.
typedef struct awqd_tensor {
  const char* suffix;    // as the format names it: "qweight", "scales"
  const char* dtype;     // as safetensors spells it: "I32", "F16", "BF16", "F8_E4M3"
  const int64_t* shape;  // [rank]
  size_t rank;
  const void* data;
  size_t bytes;
} awqd_tensor;

// A setting of a format: {"group_size", "128"}, {"zero_point", "true"}.
typedef struct awqd_setting {
  const char* name;
  const char* value;
} awqd_setting;

// Packs a linear that consists of tensors of a format ("awq", "gptq", "gguf", "plain", ...). Blocks;
// fails as awqd_weight_load does.
AWQD_API int awqd_weight_pack(awqd_device* device, const char* format, const awqd_setting* settings,
                              size_t settings_count, const awqd_tensor* tensors,
                              size_t tensors_count, awqd_weight** weight);

// Its memory is free when this returns, unless a stack has it. On a GPU the kernels that read it
// must be done. NULL is allowed.
AWQD_API void awqd_weight_free(awqd_weight* weight);

typedef struct awqd_weight_info {
  size_t size;  // set by the caller
  int64_t k;
  int64_t n;
  int64_t bytes;       // of the device's memory
  const char* format;  // "awq"
  const char* scheme;  // "w4g128z": 4-bit codes, groups of 128, stored zeros
  int32_t has_bias;    // products add it
  // Products transform x first: by a factor of each in feature, a Hadamard matrix, or both.
  int32_t transforms_input;
} awqd_weight_info;

// Strings are valid as long as the weight.
AWQD_API int awqd_weight_describe(const awqd_weight* weight, awqd_weight_info* info);

// --- Products ---

typedef enum awqd_dtype {
  AWQD_FP16 = 1,
  AWQD_BF16 = 2,
  AWQD_FP32 = 3,
  AWQD_INT8 = 4,
  AWQD_INT32 = 5
} awqd_dtype;

typedef enum awqd_activation {
  AWQD_NONE = 0,
  AWQD_RELU = 1,
  AWQD_GELU = 2,  // with erf
  AWQD_SILU = 3,
  AWQD_GELU_TANH = 4,
  AWQD_SWIGLU_OAI = 5,  // gated MLPs alone: gate * sigmoid(alpha * gate) * (up + 1)
  // Gated MLPs alone: beta * tanh(gate / beta) * sigmoid(gate) * linear_beta * tanh(up / linear_beta).
  AWQD_SITU = 6
} awqd_activation;

typedef enum awqd_quantization {
  AWQD_UNQUANTIZED = 0,
  AWQD_INT8_PER_TOKEN = 1,  // scale = max |x| / 127 of the token
  AWQD_INT8_STATIC = 2,     // the scales of the call
  // To E4M3, of any weight.
  AWQD_FP8_PER_TOKEN = 3,      // scale = max |x| / 448 of the token
  AWQD_FP8_PER_BLOCK_128 = 4,  // of each 128 in-features of a token
  AWQD_FP8_STATIC = 5          // the scales of the call
} awqd_quantization;

typedef enum awqd_path {
  AWQD_PATH_AUTO = 0,       // by the number of tokens, as it was measured for the kernel
  AWQD_PATH_FUSED = 1,      // one kernel decodes and multiplies
  AWQD_PATH_DEQUANTIZE = 2  // decodes first, then a dense product
} awqd_path;

// Memory of the device for kernels, 256-byte aligned. It serves one call at a time, on a GPU the calls
// of one stream.
typedef struct awqd_workspace {
  void* data;
  int64_t bytes;
} awqd_workspace;

// Prepares a workspace for its first call; `stream` as for products. Enqueues a copy on a GPU.
AWQD_API int awqd_workspace_init(awqd_device* device, awqd_workspace workspace, void* stream);

// y = activation(x W + bias), summed in FP32 and rounded once. With INT8 x and no scales y is INT32,
// exact, without bias and activation. With quantised x, y = activation(scale (q W) + bias), and the
// sums of q times codes are exact.
typedef struct awqd_matmul_args {
  size_t size;
  int64_t m;      // tokens
  const void* x;  // [M, K]
  void* y;        // [M, N]
  int32_t x_dtype;
  int32_t y_dtype;
  const float* bias;  // [N]; NULL: the weight's own, if it has one
  int32_t activation;
  int32_t quantization;  // of floating x; INT8 x with scales is quantised already
  const float* scales;   // [M], for INT8 x and the static quantisations; else NULL
  int32_t path;
} awqd_matmul_args;

// Bytes of workspace that suffice for `args` and for any smaller m. Reads neither pointers nor what
// they point to, but whether `scales` is NULL.
AWQD_API int awqd_matmul_workspace(const awqd_weight* weight, const awqd_matmul_args* args,
                                   int64_t* bytes);
// `stream`: a cudaStream_t of the weight's device, NULL for its default one; on a CPU NULL.
// INVALID_ARGUMENT for arguments that the product cannot take, UNIMPLEMENTED where the device has no
// kernel for them. Errors of the kernels themselves are the stream's.
AWQD_API int awqd_matmul(const awqd_weight* weight, const awqd_matmul_args* args,
                         awqd_workspace workspace, void* stream);

// y = (f(x gate, x up)) down: the activation function of gate times up in FP32, or one of the
// functions of both. Biases are the weights' own.
typedef struct awqd_gated_mlp_args {
  size_t size;
  const awqd_weight* gate;  // [K, middle]
  const awqd_weight* up;    // [K, middle]
  const awqd_weight* down;  // [middle, N]
  int64_t m;
  const void* x;  // [M, K], floating
  void* y;        // [M, N], floating
  int32_t x_dtype;
  int32_t y_dtype;
  int32_t activation;
  int32_t path;
  float limit;  // gate is at most this, up between -limit and limit; 0: no limit
  float alpha;  // of AWQD_SWIGLU_OAI
  float beta;   // of AWQD_SITU, with the next one; linear_beta 0: up as it is
  float linear_beta;
} awqd_gated_mlp_args;

AWQD_API int awqd_gated_mlp_workspace(const awqd_gated_mlp_args* args, int64_t* bytes);
AWQD_API int awqd_gated_mlp(const awqd_gated_mlp_args* args, awqd_workspace workspace,
                            void* stream);

// --- Products of experts ---

// All experts of one projection. Keeps what it needs of the weights.
typedef struct awqd_stack awqd_stack;

// Expert i is weights[i], of `count`, at most 10000. They are of one device, and have the same K and
// N. On a GPU this blocks, and is UNIMPLEMENTED where one kernel cannot multiply by all of them:
// they differ in their scheme, they reorder or transform x, or there is no kernel for the scheme.
AWQD_API int awqd_stack_make(const awqd_weight* const* weights, size_t count, awqd_stack** stack);
// As awqd_weight_free.
AWQD_API void awqd_stack_free(awqd_stack* stack);

// y[t, j] = activation(x[t] W[id] + bias[id]) of expert id = expert_ids[t, j]; with router weights
// y[t] is the sum over j of router_weights[t, j] y[t, j], in FP32 and rounded once. Biases are the
// weights' own. x may be rounded to E4M3 first, as in awqd_matmul_args, but not by given scales.
// Kernels find the rows of each expert, so a CUDA graph can be replayed with other ids. An id that is
// no expert's is INVALID_ARGUMENT on a CPU; on a GPU its y[t, j] is 0.
typedef struct awqd_grouped_matmul_args {
  size_t size;
  int64_t m;                    // tokens
  int64_t top_k;                // experts of each; M top_k is at most 2^30
  const void* x;                // [M, K], floating
  void* y;                      // [M, top_k, N], or [M, N] with router weights; floating
  const int32_t* expert_ids;    // [M, top_k]
  const float* router_weights;  // [M, top_k], or NULL
  int32_t x_dtype;
  int32_t y_dtype;
  int32_t activation;
  int32_t quantization;  // AWQD_UNQUANTIZED, AWQD_FP8_PER_TOKEN or AWQD_FP8_PER_BLOCK_128
} awqd_grouped_matmul_args;

// As awqd_matmul_workspace and awqd_matmul. The bytes suffice for any smaller m of the same top_k.
AWQD_API int awqd_grouped_matmul_workspace(const awqd_stack* stack,
                                           const awqd_grouped_matmul_args* args, int64_t* bytes);
AWQD_API int awqd_grouped_matmul(const awqd_stack* stack, const awqd_grouped_matmul_args* args,
                                 awqd_workspace workspace, void* stream);

// y[e, i] = activation(x[e, i] W[e] + bias[e]) for rows i < counts[e] of each expert e: others of x are
// not used, and others of y stay as they are. Biases are the weights' own. Kernels read the counts, so
// a CUDA graph can be replayed with others. A count that is not 0 to max_rows is INVALID_ARGUMENT on a
// CPU; on a GPU it counts as 0 below, and as max_rows above.
typedef struct awqd_masked_matmul_args {
  size_t size;
  int64_t max_rows;       // of each expert; of all together at most 2^30
  int64_t expected_rows;  // of each, which the choice of a kernel counts on; 0: max_rows
  const void* x;          // [experts, max_rows, K], floating
  void* y;                // [experts, max_rows, N], floating
  const int32_t* counts;  // [experts]
  int32_t x_dtype;
  int32_t y_dtype;
  int32_t activation;
  int32_t quantization;  // as in awqd_grouped_matmul_args
} awqd_masked_matmul_args;

// As awqd_matmul_workspace and awqd_matmul. The bytes suffice for any smaller max_rows.
AWQD_API int awqd_masked_matmul_workspace(const awqd_stack* stack,
                                          const awqd_masked_matmul_args* args, int64_t* bytes);
AWQD_API int awqd_masked_matmul(const awqd_stack* stack, const awqd_masked_matmul_args* args,
                                awqd_workspace workspace, void* stream);

// The gated MLP of each choice, in the place of the product of awqd_grouped_matmul. Members are as
// there and in awqd_gated_mlp_args.
typedef struct awqd_grouped_mlp_args {
  size_t size;
  const awqd_stack* gate;  // [K, middle]
  const awqd_stack* up;    // [K, middle]
  const awqd_stack* down;  // [middle, N]
  int64_t m;
  int64_t top_k;
  const void* x;
  void* y;
  const int32_t* expert_ids;
  const float* router_weights;
  int32_t x_dtype;
  int32_t y_dtype;
  int32_t activation;
  float limit;
  float alpha;
  float beta;
  float linear_beta;
  int32_t quantization;  // of x, and of what enters down
} awqd_grouped_mlp_args;

AWQD_API int awqd_grouped_mlp_workspace(const awqd_grouped_mlp_args* args, int64_t* bytes);
AWQD_API int awqd_grouped_mlp(const awqd_grouped_mlp_args* args, awqd_workspace workspace,
                              void* stream);

// --- Decoding ---

// out = W[row .. row + rows, col .. col + cols], rounded once.
typedef struct awqd_dequantize_args {
  size_t size;
  int64_t row, rows;  // in features
  int64_t col, cols;  // out features
  void* out;          // [rows, cols]
  int32_t dtype;      // floating
} awqd_dequantize_args;

AWQD_API int awqd_dequantize_workspace(const awqd_weight* weight, const awqd_dequantize_args* args,
                                       int64_t* bytes);
// UNIMPLEMENTED for a weight with `transforms_input`: x is not multiplied by the stored W alone.
AWQD_API int awqd_dequantize(const awqd_weight* weight, const awqd_dequantize_args* args,
                             awqd_workspace workspace, void* stream);

// --- Leases ---

// The weights of a server on this machine that lends them (awqd --lend): its memory, mapped for
// reading alone. Products with them are those of own weights.
typedef struct awqd_lease awqd_lease;

// `path`: of the server's --lend; `model`: a model that it serves, "" for the only one; `token`: of an
// identity with the role attach, or NULL where the server has no identities. The device is the GPU, or the CPU, on
// which the server has the weights. Blocks for 30 s at most. UNAVAILABLE where nobody listens,
// PERMISSION_DENIED and UNAUTHENTICATED as the server says, NOT_FOUND for another model,
// FAILED_PRECONDITION, with both versions, where the server's awqd is of another version, and where
// this process's kernels read another layout; INVALID_ARGUMENT for what no server lends.
AWQD_API int awqd_lease_open(awqd_device* device, const char* path, const char* model,
                             const char* token, awqd_lease** lease);
// Weights of it stay, and so do the mapping and the server's count of it until the last is freed.
// NULL is allowed. Neither a reload, an unload nor the server's end changes what is mapped.
AWQD_API void awqd_lease_close(awqd_lease* lease);
// As awqd_checkpoint_linears.
AWQD_API size_t awqd_lease_linears(const awqd_lease* lease);
AWQD_API const char* awqd_lease_linear(const awqd_lease* lease, size_t index);
// Counts the server's loads under the model's name, from 1.
AWQD_API int64_t awqd_lease_model_version(const awqd_lease* lease);
// Compares the bytes of every weight with the server's digest of what it packed. Reads all of them, at
// the speed of memory on a CPU, of the way to the host from a GPU. INVALID_ARGUMENT names the first
// weight that differs, and both digests.
AWQD_API int awqd_lease_check(const awqd_lease* lease);

// The place of a lease's weight in a linear [K, N] that the server's --shard divides among devices. The
// product with a part of the columns is those columns of y. Products with the parts of the rows add up
// to y; the part from row 0 has the bias.
typedef struct awqd_part {
  size_t size;  // set by the caller
  int64_t k;    // of the whole linear; a weight that is whole has the same
  int64_t n;
  int64_t row_begin;  // the weight's k rows begin there, its n columns at col_begin
  int64_t col_begin;
} awqd_part;

// NOT_FOUND without such a linear.
AWQD_API int awqd_lease_part(const awqd_lease* lease, const char* linear, awqd_part* part);
// The linear, or the device's part of it. NOT_FOUND without such a linear.
AWQD_API int awqd_lease_weight(const awqd_lease* lease, const char* linear, awqd_weight** weight);

#ifdef __cplusplus
}
#endif
#endif  // AWQD_H_
