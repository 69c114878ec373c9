// Gemm: cuBLASLt computes column-major, so it is asked for y^T = w^T x^T, which needs no transpose.
#include "kernels/cuda/dense/gemm.h"

#include <bit>
#include <compare>
#include <cstdint>
#include <map>

#include "absl/strings/str_cat.h"
#include "kernels/base/math.h"
#include "kernels/base/mutex.h"
#include "kernels/base/status.h"
#include "kernels/cuda/core/cublaslt.h"
#include "kernels/cuda/core/error.h"

namespace awqd::dense {
namespace {

using cuda::CublasLt;
using cuda::ToStatus;

cudaDataType Native(DType dtype) {
  switch (dtype) {
    case DType::kFp16:
      return CUDA_R_16F;
    case DType::kBf16:
      return CUDA_R_16BF;
    default:
      return CUDA_R_32F;
  }
}

// The widest power of two, up to 16, that the address is a multiple of.
uint32_t Alignment(const void* data) {
  return uint32_t{1} << std::countr_zero(reinterpret_cast<uintptr_t>(data) | 16);
}

// Nearby token counts share an algorithm; asking for one costs tens of microseconds.
int64_t Bucket(int64_t m) {
  if (m <= 64) return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(m)));
  return m <= 1024 ? RoundUp(m, 64) : RoundUp(m, 256);
}

// Everything that the choice of algorithm may depend on.
struct Key {
  int device;
  int64_t m, n, k, ld_y, workspace_bytes;
  DType in, out;
  uint32_t align_x, align_w, align_y;
  auto operator<=>(const Key&) const = default;
};

// The operation and its matrices, on the stack: cuBLASLt fills them in place.
struct Descriptors {
  cublasLtMatmulDescOpaque_t operation;
  cublasLtMatrixLayoutOpaque_t w, x, y;
};

absl::Status Describe(const GemmArgs& a, int64_t m, Descriptors* d) {
  const CublasLt& lt = CublasLt::Get();
  AWQD_RETURN_IF_ERROR(
      ToStatus(lt.desc_init(&d->operation, sizeof(d->operation), CUBLAS_COMPUTE_32F, CUDA_R_32F),
               "cublasLtMatmulDescInit"));
  AWQD_RETURN_IF_ERROR(ToStatus(lt.layout_init(&d->w, sizeof(d->w), Native(a.in), a.n, a.k, a.n),
                                "cublasLtMatrixLayoutInit of w"));
  AWQD_RETURN_IF_ERROR(ToStatus(lt.layout_init(&d->x, sizeof(d->x), Native(a.in), a.k, m, a.k),
                                "cublasLtMatrixLayoutInit of x"));
  return ToStatus(lt.layout_init(&d->y, sizeof(d->y), Native(a.out), a.n, m, a.ld_y),
                  "cublasLtMatrixLayoutInit of y");
}

template <typename T>
absl::Status Prefer(cublasLtMatmulPreferenceOpaque_t* preference,
                    cublasLtMatmulPreferenceAttributes_t attribute, T value) {
  return ToStatus(CublasLt::Get().preference_set(preference, attribute, &value, sizeof(value)),
                  "cublasLtMatmulPreferenceSetAttribute");
}

absl::Status Prefer(const Key& key, cublasLtMatmulPreferenceOpaque_t* p) {
  AWQD_RETURN_IF_ERROR(
      ToStatus(CublasLt::Get().preference_init(p, sizeof(*p)), "cublasLtMatmulPreferenceInit"));
  AWQD_RETURN_IF_ERROR(Prefer(p, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                              static_cast<uint64_t>(key.workspace_bytes)));
  // Not in place and not in the output's type: those would round partial sums to FP16.
  AWQD_RETURN_IF_ERROR(Prefer(p, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
                              static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)));
  AWQD_RETURN_IF_ERROR(Prefer(p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.align_w));
  AWQD_RETURN_IF_ERROR(Prefer(p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.align_x));
  AWQD_RETURN_IF_ERROR(Prefer(p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.align_y));
  return Prefer(p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.align_y);
}

absl::StatusOr<cublasLtMatmulAlgo_t> AskFor(const GemmArgs& args, const Key& key,
                                            cublasLtHandle_t handle) {
  Descriptors d;
  AWQD_RETURN_IF_ERROR(Describe(args, key.m, &d));
  cublasLtMatmulPreferenceOpaque_t preference;
  AWQD_RETURN_IF_ERROR(Prefer(key, &preference));
  cublasLtMatmulHeuristicResult_t result = {};
  int found = 0;
  AWQD_RETURN_IF_ERROR(ToStatus(CublasLt::Get().heuristic(handle, &d.operation, &d.w, &d.x, &d.y,
                                                          &d.y, &preference, 1, &result, &found),
                                "cublasLtMatmulAlgoGetHeuristic"));
  if (found == 0 || result.state != CUBLAS_STATUS_SUCCESS) {
    return absl::UnimplementedError(absl::StrCat("cuBLASLt has no algorithm for ", Name(args.in),
                                                 " [", key.m, ", ", args.k, "] x [", args.k, ", ",
                                                 args.n, "] to ", Name(args.out)));
  }
  return result.algo;
}

absl::StatusOr<cublasLtMatmulAlgo_t> Remembered(const GemmArgs& args, const Key& key,
                                                cublasLtHandle_t handle) {
  // The shapes of the loaded models times the buckets. Models come and go; asking again gives the
  // same answer, so that a full table is simply emptied.
  constexpr size_t kMost = 4096;
  static Mutex mutex;
  static auto* const algorithms = new std::map<Key, cublasLtMatmulAlgo_t>;
  {
    MutexLock lock(&mutex);
    const auto found = algorithms->find(key);
    if (found != algorithms->end()) return found->second;
  }
  AWQD_ASSIGN_OR_RETURN(const cublasLtMatmulAlgo_t algorithm, AskFor(args, key, handle));
  MutexLock lock(&mutex);
  if (algorithms->size() >= kMost) algorithms->clear();
  algorithms->emplace(key, algorithm);
  return algorithm;
}

cublasStatus_t Run(const GemmArgs& args, Descriptors* d, const cublasLtMatmulAlgo_t& algorithm,
                   cublasLtHandle_t handle, StreamView stream) {
  const float one = 1, zero = 0;
  return CublasLt::Get().matmul(handle, &d->operation, &one, args.w, &d->w, args.x, &d->x, &zero,
                                args.y, &d->y, args.y, &d->y, &algorithm, args.workspace,
                                static_cast<size_t>(args.workspace_bytes),
                                static_cast<cudaStream_t>(stream.handle));
}

bool RefusesShape(cublasStatus_t status) {
  return status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE;
}

}  // namespace

absl::Status Gemm(const GemmArgs& args, StreamView stream) {
  AWQD_ASSIGN_OR_RETURN(const cublasLtHandle_t handle, cuda::CublasLtHandle());
  Key key{cuda::CurrentDevice(),
          Bucket(args.m),
          args.n,
          args.k,
          args.ld_y,
          args.workspace_bytes,
          args.in,
          args.out,
          Alignment(args.x),
          Alignment(args.w),
          Alignment(args.y)};
  AWQD_ASSIGN_OR_RETURN(cublasLtMatmulAlgo_t algorithm, Remembered(args, key, handle));
  Descriptors d;
  AWQD_RETURN_IF_ERROR(Describe(args, args.m, &d));
  cublasStatus_t status = Run(args, &d, algorithm, handle, stream);
  if (RefusesShape(status) && key.m != args.m) {
    // The bucket's algorithm does not take this exact count: ask for its own.
    key.m = args.m;
    AWQD_ASSIGN_OR_RETURN(algorithm, Remembered(args, key, handle));
    status = Run(args, &d, algorithm, handle, stream);
  }
  return ToStatus(status, "cublasLtMatmul");
}

}  // namespace awqd::dense
