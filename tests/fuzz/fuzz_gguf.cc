// Fuzzes the GGUF reader with whole files, and decodes every tensor of blocks that it accepts.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <vector>

#include "absl/algorithm/container.h"
#include "kernels/checkpoint/containers/gguf.h"
#include "kernels/exact.h"
#include "tests/fuzz/require.h"

namespace {

using awqd::fuzz::Require;

awqd::UniqueFd FileOf(const uint8_t* data, size_t size) {
  awqd::UniqueFd fd(memfd_create("fuzz", MFD_CLOEXEC));
  Require(fd.ok());
  Require(pwrite(fd.get(), data, size, 0) == static_cast<ssize_t>(size));
  return fd;
}

// The tensor's codes and scales all exist, or it is refused.
void Decode(const awqd::model::TensorInfo& tensor, absl::Span<const uint8_t> bytes) {
  const auto weight =
      awqd::kGgufFormat.Decode({}, {{"weight", {tensor.dtype, tensor.shape, bytes}}});
  if (!weight.ok()) {
    Require(weight.status().code() == absl::StatusCode::kInvalidArgument);
    return;
  }
  Require(awqd::Validate(*weight).ok());
  Require(weight->n == tensor.shape[0] && weight->k == tensor.shape[1]);
  (void)awqd::WeightValue(*weight, weight->k - 1, weight->n - 1);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  absl::StatusOr<awqd::model::File> file = awqd::model::File::Adopt(FileOf(data, size), "fuzz");
  Require(file.ok());
  const auto gguf = awqd::model::OpenGguf(*std::move(file));
  if (!gguf.ok()) {
    Require(gguf.status().code() == absl::StatusCode::kInvalidArgument);
    return 0;
  }
  int64_t covered = 0;
  for (const auto& [name, tensor] : gguf->tensors.tensors()) {
    Require(tensor.bytes() >= 0 && tensor.bytes() <= static_cast<int64_t>(size));
    std::vector<uint8_t> bytes(tensor.bytes());
    Require(gguf->tensors.Read(tensor, absl::MakeSpan(bytes)).ok());
    covered += tensor.bytes();
    if (absl::c_linear_search(awqd::kGgufFormat.code_dtypes, tensor.dtype)) Decode(tensor, bytes);
  }
  Require(covered < static_cast<int64_t>(size));
  const awqd::model::TensorMap* const tensors = &gguf->tensors.tensors();
  Require(!awqd::model::FormatOfGguf(gguf->architecture, {&tensors, 1}).config.note.empty());
  return 0;
}
