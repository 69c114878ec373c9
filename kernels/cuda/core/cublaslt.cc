// Opens libcublasLt and looks its functions up.
#include "kernels/cuda/core/cublaslt.h"

#include <dlfcn.h>

#include <map>
#include <mutex>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/base/status.h"
#include "kernels/cuda/core/error.h"

namespace awqd::cuda {
namespace {

#define AWQD_STRINGIFY_INNER(x) #x
#define AWQD_STRINGIFY(x) AWQD_STRINGIFY_INNER(x)

// Tried in this order: first the release that this was compiled against. Its neighbours have the
// same opaque structs; every Init function checks their sizes.
constexpr const char* kNames[] = {
    "libcublasLt.so." AWQD_STRINGIFY(CUBLAS_VER_MAJOR),
    "libcublasLt.so.13",
    "libcublasLt.so.12",
};

void* OpenLibrary(CublasLt* out) {
  for (const char* name : kNames) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL); library != nullptr) {
      out->library = name;
      return library;
    }
  }
  out->unavailable = absl::StrCat("cuBLASLt was not found (tried ", absl::StrJoin(kNames, ", "),
                                  "); install libcublas or set LD_LIBRARY_PATH");
  return nullptr;
}

template <typename Function>
void Find(void* library, const char* symbol, CublasLt* out, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, symbol));
  if (*function == nullptr && out->unavailable.empty()) {
    out->unavailable = absl::StrCat(out->library, " has no ", symbol);
  }
}

CublasLt Load() {
  CublasLt out;
  void* library = OpenLibrary(&out);
  if (library == nullptr) return out;
  Find(library, "cublasLtCreate", &out, &out.create);
  Find(library, "cublasLtGetVersion", &out, &out.get_version);
  Find(library, "cublasLtGetStatusName", &out, &out.status_name);
  Find(library, "cublasLtMatmul", &out, &out.matmul);
  Find(library, "cublasLtMatmulAlgoGetHeuristic", &out, &out.heuristic);
  Find(library, "cublasLtMatmulDescInit_internal", &out, &out.desc_init);
  Find(library, "cublasLtMatmulDescSetAttribute", &out, &out.desc_set);
  Find(library, "cublasLtMatrixLayoutInit_internal", &out, &out.layout_init);
  Find(library, "cublasLtMatmulPreferenceInit_internal", &out, &out.preference_init);
  Find(library, "cublasLtMatmulPreferenceSetAttribute", &out, &out.preference_set);
  if (out.get_version != nullptr) out.version = out.get_version();
  return out;
}

absl::StatusCode CodeOf(cublasStatus_t status) {
  if (status == CUBLAS_STATUS_ALLOC_FAILED) return absl::StatusCode::kResourceExhausted;
  return status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_ARCH_MISMATCH
             ? absl::StatusCode::kUnimplemented
             : absl::StatusCode::kInternal;
}

}  // namespace

const CublasLt& CublasLt::Get() {
  static const CublasLt* const loaded = new CublasLt(Load());
  return *loaded;
}

absl::StatusOr<cublasLtHandle_t> CublasLtHandle() {
  const CublasLt& lt = CublasLt::Get();
  if (!lt.unavailable.empty()) return absl::FailedPreconditionError(lt.unavailable);
  static std::mutex mutex;
  static auto* const handles = new std::map<int, cublasLtHandle_t>;
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = handles->find(CurrentDevice());
  if (found != handles->end()) return found->second;
  cublasLtHandle_t handle = nullptr;
  AWQD_RETURN_IF_ERROR(ToStatus(lt.create(&handle), "cublasLtCreate"));
  handles->emplace(CurrentDevice(), handle);
  return handle;
}

absl::Status ToStatus(cublasStatus_t status, absl::string_view call) {
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  const auto name = CublasLt::Get().status_name;
  return absl::Status(
      CodeOf(status),
      absl::StrCat(call, ": ", name != nullptr ? name(status) : "cuBLASLt is not loaded", " (",
                   static_cast<int>(status), ")"));
}

}  // namespace awqd::cuda
